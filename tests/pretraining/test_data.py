"""Sources: what they give a rank, and what they say when a path or an option is wrong."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tokenizers
import torch

from leto_strategy.errors import ConfigurationError
from leto_strategy.pretraining.data import GeneratedData, StreamData, TextData
from leto_strategy.pretraining.packing import PackedStream
from leto_strategy.pretraining.tokenizer import ByteTokenizer, load_tokenizer

TEXT = "The quick brown fox jumps over the lazy dog. Zwölf Boxkämpfer jagen Viktor quer über den Sylter Deich. " * 8


@pytest.fixture
def bpe(tmp_path: Path) -> str:
    """A tokenizer.json with 300 tokens and an end of document."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|end|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return str(tmp_path / "tokenizer.json")


def text_data(path: Path | str | None, **options: Any) -> TextData:
    arguments = {
        "tokenizer": "bytes",
        "end_token": "<|end|>",
        "vocabulary": 300,
        "validation_fraction": 0.25,
        "context": 16,
        "batch_size": 2,
        **options,
    }
    return TextData(path=None if path is None else str(path), **arguments)


def stream_data(path: str = "json", data_files: Any = None, **options: Any) -> StreamData:
    arguments = {
        "name": None,
        "split": "train",
        "revision": None,
        "column": "text",
        "tokenizer": "bytes",
        "end_token": "<|end|>",
        "vocabulary": 300,
        "validation_rows": 3,
        "shuffle_windows": 4,
        "seed": 1,
        "context": 16,
        "batch_size": 2,
        **options,
    }
    return StreamData(path=path, data_files=data_files, **arguments)


def trainer(*, rank: int = 0, world: int = 1, max_steps: int = 10, limit: float | int = 1.0) -> Any:
    return SimpleNamespace(global_rank=rank, world_size=world, max_steps=max_steps, limit_train_batches=limit)


@pytest.fixture
def documents(tmp_path: Path) -> str:
    """JSON lines, ten documents that begin with their numbers."""
    path = tmp_path / "documents.jsonl"
    path.write_text("".join(json.dumps({"text": f"{n}: {TEXT[: 60 + n]}"}) + "\n" for n in range(10)))
    return str(path)


# Tokenizers


def test_bytes_come_back_as_they_were_and_an_end_follows() -> None:
    data = bytes(range(256))
    tokens = ByteTokenizer().encode(data.decode("utf-8", errors="surrogateescape"))
    assert tokens.tolist() == [*data, 256]


def test_a_tokenizer_of_hugging_face_is_used_as_it_is(bpe: str) -> None:
    tokenizer = load_tokenizer(bpe, end_token="<|end|>", vocabulary=300)
    tokens = tokenizer.encode(TEXT)
    assert tokens.dtype == torch.int32
    assert len(tokens) < len(TEXT) * 0.8
    reference = tokenizers.Tokenizer.from_file(bpe)
    assert tokens[-1] == reference.token_to_id("<|end|>")
    assert reference.decode(tokens[:-1].tolist()) == TEXT


def test_a_wrong_tokenizer_is_refused(bpe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match=r"data\.vocabulary=300 or more"):
        load_tokenizer(bpe, end_token="<|end|>", vocabulary=257)
    with pytest.raises(ConfigurationError, match=r"data\.end_token='</s>' is not in the vocabulary"):
        load_tokenizer(bpe, end_token="</s>", vocabulary=300)
    broken = tmp_path / "broken.json"
    broken.write_text("{}")
    with pytest.raises(ConfigurationError, match=r"data\.tokenizer=.*broken\.json"):
        load_tokenizer(str(broken), end_token="<|end|>", vocabulary=300)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'leto-strategy\[train\]'"):
        load_tokenizer(bpe, end_token="<|end|>", vocabulary=300)


# Text


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_a_text_file_is_cut_into_training_and_validation(tmp_path: Path, bpe: str, tokenizer: str) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    name = bpe if tokenizer == "bpe" else "bytes"
    data = text_data(tmp_path / "text.txt", tokenizer=name)
    data.setup("fit")
    tokens = load_tokenizer(name, end_token="<|end|>", vocabulary=300).encode(TEXT)
    split = len(tokens) - len(tokens) // 4
    assert data.training[0].tolist() == tokens[:17].tolist()
    assert data.validation is not None
    assert data.validation[0].tolist() == tokens[split : split + 17].tolist()
    batch = next(iter(data.train_dataloader()))
    assert (batch.shape, batch.dtype) == ((2, 17), torch.int64)
    assert next(iter(data.val_dataloader())).shape == (2, 17)


def test_without_validation_there_is_no_loader(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    data = text_data(tmp_path / "text.txt", validation_fraction=0.0)
    data.setup("fit")
    assert data.val_dataloader() == []


def test_a_file_that_is_missing_or_wrong_is_named(tmp_path: Path, bpe: str) -> None:
    with pytest.raises(ConfigurationError, match=r"data\.path=corpus\.txt"):
        text_data(None)
    with pytest.raises(ConfigurationError, match=r"nowhere\.txt is no file"):
        text_data(tmp_path / "nowhere.txt")
    (tmp_path / "short.txt").write_text("short")
    with pytest.raises(ConfigurationError, match=r"short\.txt gives 0 training windows of 17 tokens"):
        text_data(tmp_path / "short.txt").setup("fit")
    (tmp_path / "latin.txt").write_bytes("für".encode("latin-1") * 40)
    text_data(tmp_path / "latin.txt").setup("fit")
    with pytest.raises(ConfigurationError, match=r"latin\.txt is no UTF-8; use data\.tokenizer=bytes"):
        text_data(tmp_path / "latin.txt", tokenizer=bpe).setup("fit")
    with pytest.raises(ConfigurationError, match=r"data\.validation_fraction=1\.0"):
        text_data(tmp_path / "short.txt", validation_fraction=1.0)


# Generated bytes


def test_generated_data_validate_on_other_windows_of_the_same_walk() -> None:
    data = GeneratedData(
        num_windows=6, num_validation_windows=3, successors=2, seed=4, vocabulary=256, context=16, batch_size=2
    )
    data.setup("fit")
    assert data.validation is not None
    windows = [*(data.training[n] for n in range(6)), *(data.validation[n] for n in range(3))]
    assert len({tuple(window.tolist()) for window in windows}) == 9


def test_generated_data_that_fill_no_step_are_refused() -> None:
    options = {"successors": 2, "seed": 4, "context": 16, "batch_size": 4, "num_validation_windows": 0}
    with pytest.raises(ConfigurationError, match=r"data\.num_windows=3 gives 3 training windows"):
        GeneratedData(num_windows=3, vocabulary=256, **options).setup("fit")
    with pytest.raises(ConfigurationError, match=r"data\.vocabulary=100"):
        GeneratedData(num_windows=8, vocabulary=100, **options)


# Streams


@pytest.mark.parametrize("world", [1, 2])
def test_a_stream_trains_on_the_rows_behind_those_that_validate(documents: str, world: int) -> None:
    numbers: list[int] = []
    for rank in range(world):
        data = stream_data(data_files=documents, shuffle_windows=1)
        data.trainer = trainer(rank=rank, world=world)
        data.setup("fit")
        assert isinstance(data.training, PackedStream)
        expected = torch.cat([ByteTokenizer().encode(f"{n}: {TEXT[: 60 + n]}") for n in range(3)])
        assert data.validation is not None
        assert data.validation[0].tolist() == expected[:17].tolist()
        tokens = next(iter(data.train_dataloader())).flatten()
        numbers.append(int(bytes(tokens[:1].tolist())))
    assert numbers == {1: [3], 2: [4, 3]}[world], "rank 0 has the even ones"


@pytest.mark.parametrize(
    ("num_files", "world", "rows"), [(1, 1, 15), (1, 2, 15), (4, 1, 15), (4, 2, 15), (4, 4, 8), (3, 2, 15)]
)
def test_no_rank_trains_on_what_validates_and_all_else_is_trained_on(
    tmp_path: Path, num_files: int, world: int, rows: int
) -> None:
    """The library's own `skip` would leave out the first rows of each rank's files, and train on some that validate."""
    texts = [f"<{n}> " + "x" * (n % 9) for n in range(40)]
    for number in range(num_files):
        share = texts[number * len(texts) // num_files : (number + 1) * len(texts) // num_files]
        lines = "".join(json.dumps({"text": text}) + "\n" for text in share)
        (tmp_path / f"part{number}.jsonl").write_text(lines)
    seen = []
    for rank in range(world):
        data = stream_data(data_files=str(tmp_path / "part*.jsonl"), validation_rows=rows, context=4)
        data.trainer = trainer(rank=rank, world=world)
        data.setup("fit")
        assert isinstance(data.training, PackedStream)
        data.training._passes, data.training._shuffle_windows = 1, 1
        windows = [window.tolist() for window in data.training]
        tokens = [windows[0][0], *(token for window in windows for token in window[1:])]
        seen += bytes(min(token, 255) for token in tokens).split(b"\xff")[:-1]
        validated = torch.cat([ByteTokenizer().encode(text) for text in texts[:rows]])
        assert data.validation is not None
        assert data.validation[0].tolist() == validated[:5].tolist()
    trained = {text.decode() for text in seen}
    assert len(trained) == len(seen)
    assert trained <= set(texts[rows:])
    assert len(set(texts[rows:]) - trained) <= world, "a rank's last document may not fill its window"


def test_validation_needs_a_window(documents: str) -> None:
    with pytest.raises(ConfigurationError, match=r"data\.validation_rows=1: these documents fill no window"):
        stream_data(data_files=documents, validation_rows=1, context=200).setup("fit")


def test_lines_of_a_text_file_can_be_streamed(tmp_path: Path) -> None:
    (tmp_path / "lines.txt").write_text("one line and then\nanother one, and so on\n" * 20)
    data = stream_data("text", str(tmp_path / "lines.txt"), validation_rows=0, shuffle_windows=1)
    data.setup("fit")
    window = next(iter(data.train_dataloader()))[0]
    assert bytes(window.tolist()) == b"one line and then"
    assert data.val_dataloader() == []


def test_options_that_do_not_go_with_a_stream_are_refused(documents: str) -> None:
    cases = [
        ({}, trainer(max_steps=-1), r"set trainer\.max_steps"),
        ({}, trainer(limit=5), r"trainer\.limit_train_batches"),
        ({"num_workers": 2}, trainer(), r"data\.num_workers=2: the data set has 1 files"),
    ]
    for options, given, message in cases:
        data = stream_data(data_files=documents, **options)
        data.trainer = given
        with pytest.raises(ConfigurationError, match=message):
            data.setup("fit")


def test_a_data_set_that_can_not_be_opened_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match=r"data\.data_files=.*nowhere\.jsonl"):
        stream_data(data_files=str(tmp_path / "nowhere.jsonl")).setup("fit")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'leto-strategy\[train\]'"):
        stream_data(data_files="x")
