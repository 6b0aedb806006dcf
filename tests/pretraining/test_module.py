"""Training: the loss falls, weight decay and learning rate are what they should be, a checkpoint is whole."""

import itertools
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from leto_strategy.pretraining.data import TextData
from leto_strategy.pretraining.module import LanguageModule, decay_groups, schedule

TEXT = "she sells sea shells by the sea shore; the shells she sells are sea shells, she is sure. " * 12
NETWORK = {
    "_target_": "leto_strategy.pretraining.gpt.GPT",
    "vocabulary": 257,
    "context": 32,
    "width": 32,
    "layers": 2,
    "heads": 2,
}
QUIET = {
    "accelerator": "cpu",
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "logger": False,
    "enable_checkpointing": False,
}


def module(steps: int = 150, **network: object) -> LanguageModule:
    return LanguageModule(
        {**NETWORK, **network}, learning_rate=1e-2, min_learning_rate=1e-3, warmup_steps=5, decay_steps=steps
    )


def text_data(folder: Path) -> TextData:
    (folder / "text.txt").write_text(TEXT)
    return TextData(
        path=str(folder / "text.txt"),
        tokenizer="bytes",
        end_token="",
        vocabulary=257,
        validation_fraction=0.2,
        context=32,
        batch_size=4,
    )


@pytest.mark.parametrize("experts", [0, 4])
def test_training_on_a_small_text_learns_it(tmp_path: Path, experts: int) -> None:
    torch.manual_seed(1)
    model = module(experts=experts)
    trainer = pl.Trainer(max_steps=150, default_root_dir=tmp_path, **QUIET)
    trainer.fit(model, datamodule=text_data(tmp_path))
    metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
    assert metrics["loss"] < 2.0, "from ln 257 = 5.5"
    assert metrics["val_loss"] < 2.2
    assert metrics["perplexity"] == pytest.approx(2.718281828 ** metrics["loss"], rel=1e-5)
    assert metrics["val_perplexity"] == pytest.approx(2.718281828 ** metrics["val_loss"], rel=1e-5)
    assert metrics["tokens"] == model.num_tokens == 150 * 4 * 32
    assert ("balance" in metrics) == bool(experts)


def test_matrices_decay_and_vectors_do_not_and_no_parameter_is_left_out() -> None:
    model = module(experts=2, positions="learned")
    decaying, others = decay_groups(model.network, 0.3)
    assert (decaying["weight_decay"], others["weight_decay"]) == (0.3, 0.0)
    assert {p.dim() for p in decaying["params"]} == {2}
    assert {p.dim() for p in others["params"]} == {1}
    grouped = {id(p) for p in itertools.chain(decaying["params"], others["params"])}
    assert grouped == {id(p) for p in model.parameters()}
    assert len(grouped) == len(decaying["params"]) + len(others["params"])


def test_the_learning_rate_warms_up_and_falls_to_its_least() -> None:
    factors = [schedule(step, warmup=4, decay=20, lowest=0.1) for step in range(25)]
    assert factors[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert all(later < earlier for earlier, later in itertools.pairwise(factors[4:21]))
    assert factors[20:] == [pytest.approx(0.1)] * 5
    assert factors[12] == pytest.approx(0.55)


def test_a_checkpoint_needs_nothing_else_to_be_loaded(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = module(steps=3, experts=2)
    trainer = pl.Trainer(max_steps=3, default_root_dir=tmp_path, **QUIET)
    trainer.fit(model, datamodule=text_data(tmp_path))
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    loaded = LanguageModule.load_from_checkpoint(tmp_path / "last.ckpt")
    assert loaded.num_tokens == model.num_tokens > 0
    tokens = torch.arange(32).unsqueeze(0)
    assert torch.equal(loaded(tokens).logits, model(tokens).logits)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_learning_rate": 1.0}, r"module\.min_learning_rate"),
        ({"learning_rate": 0.0, "min_learning_rate": 0.0}, r"module\.learning_rate"),
        ({"decay_steps": -1}, r"trainer\.max_steps"),
        ({"warmup_steps": -1}, r"module\.warmup_steps"),
    ],
)
def test_a_schedule_that_can_not_be_is_refused(options: dict[str, Any], message: str) -> None:
    arguments = {"learning_rate": 1e-2, "min_learning_rate": 1e-3, "warmup_steps": 5, "decay_steps": 60, **options}
    with pytest.raises(ValueError, match=message):
        LanguageModule(NETWORK, **arguments)
