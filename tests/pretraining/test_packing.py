"""Windows hold every token once; a stream goes on behind any window exactly, and ranks share its documents."""

import json
import pickle
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from datasets.distributed import split_dataset_by_node
from torch.utils.data import DataLoader

from leto_strategy.errors import ConfigurationError
from leto_strategy.pretraining.packing import GeneratedWindows, PackedStream, Windows
from leto_strategy.pretraining.tokenizer import ByteTokenizer

CONTEXT = 8
TEXTS = [f"document {n}: " + "abcdefghij" * (n * 7 % 5) for n in range(24)]


def open_stream(folder: Path, *, num_files: int = 3, rank: int = 0, world: int = 1) -> Any:
    files = []
    for number in range(num_files):
        path = folder / f"part{number}.jsonl"
        share = TEXTS[number * len(TEXTS) // num_files : (number + 1) * len(TEXTS) // num_files]
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in share))
        files.append(str(path))
    cache = str(folder / "cache")
    rows = datasets.load_dataset("json", data_files=files, split="train", streaming=True, cache_dir=cache)
    return split_dataset_by_node(rows, rank, world)


def packed(rows: Any, **options: Any) -> PackedStream:
    return PackedStream(rows, column="text", encode=ByteTokenizer().encode, context=CONTEXT, **options)


def as_lists(windows: Any) -> list[list[int]]:
    return [window.tolist() for window in windows]


def joined(windows: list[list[int]]) -> list[int]:
    return [windows[0][0], *(token for window in windows for token in window[1:])]


def test_windows_predict_every_token_once() -> None:
    tokens = torch.arange(35, dtype=torch.int32)
    windows = Windows(tokens, CONTEXT)
    assert len(windows) == 4
    assert joined(as_lists(windows[n] for n in range(4))) == list(range(33))
    assert windows[0].dtype == torch.int64
    with pytest.raises(IndexError):
        windows[4]


def test_generated_windows_follow_from_seed_and_number() -> None:
    windows = GeneratedWindows(50, 64, successors=3, seed=7)
    again = GeneratedWindows(50, 64, successors=3, seed=7)
    assert all(torch.equal(windows[n], again[n]) for n in (49, 0, 17))
    assert not torch.equal(windows[0], windows[1])
    assert not torch.equal(windows[0], GeneratedWindows(50, 64, successors=3, seed=8)[0])
    followers: dict[int, set[int]] = {}
    for n in range(50):
        walk = windows[n].tolist()
        for before, after in pairwise(walk):
            followers.setdefault(before, set()).add(after)
    assert max(map(len, followers.values())) == 3


@pytest.mark.parametrize("successors", [0, 257])
def test_a_wrong_number_of_successors_is_refused(successors: int) -> None:
    with pytest.raises(ConfigurationError, match=r"data\.successors"):
        GeneratedWindows(1, 8, successors=successors, seed=0)


def test_packing_keeps_every_token_and_its_order(tmp_path: Path) -> None:
    expected = torch.cat([ByteTokenizer().encode(text) for text in TEXTS]).tolist()
    windows = as_lists(packed(open_stream(tmp_path), passes=1))
    assert all(len(window) == CONTEXT + 1 for window in windows)
    assert joined(windows) == expected[: len(windows) * CONTEXT + 1]
    assert len(expected) - len(joined(windows)) < CONTEXT


def test_a_stream_begins_again_when_it_ends(tmp_path: Path) -> None:
    once = torch.cat([ByteTokenizer().encode(text) for text in TEXTS]).tolist()
    windows = as_lists(islice(packed(open_stream(tmp_path, num_files=1)), 2 * len(once) // CONTEXT))
    assert joined(windows) == (once * 3)[: len(windows) * CONTEXT + 1]


@pytest.mark.parametrize("shuffle_windows", [1, 5])
@pytest.mark.parametrize("num_files", [1, 3])
@pytest.mark.parametrize("world", [1, 2])
def test_a_stream_goes_on_behind_any_window(tmp_path: Path, shuffle_windows: int, num_files: int, world: int) -> None:
    """At every place of a bit more than two passes, in another object, from a state that went through pickle."""
    options = {"shuffle_windows": shuffle_windows, "seed": 3}
    rows = open_stream(tmp_path, num_files=num_files, rank=world - 1, world=world)
    stream = packed(rows, **options)
    iterator, states, windows = iter(stream), [pickle.dumps(stream.state_dict())], []
    for _ in range(2 * 900 // CONTEXT // world + 7):
        windows.append(next(iterator).tolist())
        states.append(pickle.dumps(stream.state_dict()))
    assert max(map(len, states)) < 3000
    other = packed(open_stream(tmp_path, num_files=num_files, rank=world - 1, world=world), **options)
    for place in range(len(windows) - 9):
        other.load_state_dict(pickle.loads(states[place]))
        assert as_lists(islice(other, 9)) == windows[place : place + 9], place
    assert as_lists(islice(other, 9)) == windows[:9], "without a state it begins at the first document"


def test_shuffling_changes_only_the_order_within_a_block(tmp_path: Path) -> None:
    plain = as_lists(packed(open_stream(tmp_path), passes=1))
    shuffled = as_lists(packed(open_stream(tmp_path), passes=1, shuffle_windows=10, seed=1))
    assert shuffled != plain
    for start in range(0, len(plain), 10):
        assert sorted(shuffled[start : start + 10]) == sorted(plain[start : start + 10])


@pytest.mark.parametrize(("num_files", "world"), [(1, 2), (3, 3), (2, 3), (4, 2)])
def test_ranks_share_the_documents(tmp_path: Path, num_files: int, world: int) -> None:
    """Whether the files can be dealt out evenly or not: no document twice, none left out."""
    seen = []
    for rank in range(world):
        windows = as_lists(packed(open_stream(tmp_path, num_files=num_files, rank=rank, world=world), passes=1))
        text = bytes(token if token < 256 else 0 for token in joined(windows))
        seen.append({document.decode() for document in text.split(b"\0")[:-1]})
    assert sum(map(len, seen)) == len(set().union(*seen))
    cut_off = set(TEXTS) - set().union(*seen)
    assert len(cut_off) <= world, "only the last document of a rank may not fill its window"


def test_workers_share_the_documents_of_a_rank(tmp_path: Path) -> None:
    loader = DataLoader(packed(open_stream(tmp_path), passes=1), batch_size=None, num_workers=3)
    expected = []
    for part in range(3):
        tokens = torch.cat([ByteTokenizer().encode(text) for text in TEXTS[part * 8 : part * 8 + 8]])
        expected += as_lists(Windows(tokens, CONTEXT)[n] for n in range(len(Windows(tokens, CONTEXT))))
    assert sorted(as_lists(loader)) == sorted(expected)


def test_a_batch_of_a_loader_is_what_the_state_says(tmp_path: Path) -> None:
    stream = packed(open_stream(tmp_path), shuffle_windows=4)
    iterator = iter(DataLoader(stream, batch_size=6))
    for _ in range(5):
        next(iterator)
    state = stream.state_dict()
    expected = next(iterator)
    other = packed(open_stream(tmp_path), shuffle_windows=4)
    other.load_state_dict(state)
    assert torch.equal(next(iter(DataLoader(other, batch_size=6))), expected)


def test_a_wrong_column_names_those_there_are(tmp_path: Path) -> None:
    stream = PackedStream(open_stream(tmp_path), column="txt", encode=ByteTokenizer().encode, context=CONTEXT)
    with pytest.raises(ConfigurationError, match=r"data\.column='txt'.*columns are text"):
        next(iter(stream))


def test_too_little_data_is_an_error_not_an_endless_loop(tmp_path: Path) -> None:
    stream = PackedStream(open_stream(tmp_path), column="text", encode=ByteTokenizer().encode, context=100_000)
    with pytest.raises(ConfigurationError, match=r"fewer than 100001 tokens"):
        next(iter(stream))


def test_a_block_needs_a_window() -> None:
    with pytest.raises(ConfigurationError, match=r"data\.shuffle_windows=0"):
        packed([], shuffle_windows=0)
