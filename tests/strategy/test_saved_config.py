"""LightningCLI's configuration: written by the user's process, completed by active trainers, left alone by others."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.cli import LightningArgumentParser, SaveConfigCallback
from lightning.pytorch.demos.boring_classes import BoringModel

from leto_strategy.config import TrainerIdentity
from leto_strategy.strategy.flavour import flavour
from leto_strategy.strategy.launch import saved_config

LIGHTNING = flavour("lightning.pytorch")


class Saves(SaveConfigCallback):
    calls = 0

    def save_config(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.calls += 1


class Overridden(SaveConfigCallback):
    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        super().setup(trainer, pl_module, stage)


def prepared(cls: type[SaveConfigCallback], directory: Path, **kwargs: Any) -> tuple[Any, Any]:
    parser = LightningArgumentParser()
    parser.add_argument("--x", default=1)
    callback = cls(parser, parser.parse_args([]), **kwargs)
    trainer = pl.Trainer(accelerator="cpu", logger=False, callbacks=[callback], default_root_dir=str(directory))
    trainer.strategy._lightning_module = BoringModel()
    trainer.state.fn = "fit"
    return trainer, callback


def become(role: str, generation: int, monkeypatch: pytest.MonkeyPatch) -> None:
    identity = TrainerIdentity("j", 0, 1, generation, role, 0, "fit", -1, -1, (), "", 0, -1, 1, 2)
    monkeypatch.setattr(saved_config, "trainer_identity", lambda: identity)


def test_the_users_process_writes_the_file_and_leaves_the_rest_to_trainers(tmp_path: Path) -> None:
    trainer, callback = prepared(Saves, tmp_path, config_filename="mine.yaml")
    saved_config.save(trainer, LIGHTNING)
    assert (tmp_path / "mine.yaml").read_text() == "x: 1\n"
    assert callback.calls == 0
    saved_config.save(trainer, LIGHTNING)  # a later call: nothing is checked again
    fresh, _ = prepared(Saves, tmp_path, config_filename="mine.yaml")
    with pytest.raises(RuntimeError, match="to NOT exist"):
        saved_config.save(fresh, LIGHTNING)


@pytest.mark.parametrize(("role", "generation", "calls"), [("active", 0, 1), ("active", 3, 1), ("shadow", 1, 0)])
def test_active_trainers_do_what_a_subclass_adds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, role: str, generation: int, calls: int
) -> None:
    become(role, generation, monkeypatch)
    (tmp_path / "config.yaml").write_text("as it was")
    trainer, callback = prepared(Saves, tmp_path)
    saved_config.leave_files(trainer, LIGHTNING)
    callback.setup(trainer, trainer.lightning_module, "fit")
    assert callback.calls == calls
    saved_config.note_saved(trainer, LIGHTNING)
    callback.setup(trainer, trainer.lightning_module, "test")
    assert callback.calls == calls, "a later call saves nothing"
    assert (tmp_path / "config.yaml").read_text() == "as it was"


def test_a_setup_of_the_users_own_stays_a_hook_of_trainers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, _ = prepared(Overridden, tmp_path)
    saved_config.save(trainer, LIGHTNING)
    assert not (tmp_path / "config.yaml").exists()
    for generation in (0, 1):
        become("active", generation, monkeypatch)
        trainer, callback = prepared(Overridden, tmp_path)
        saved_config.leave_files(trainer, LIGHTNING)
        callback.setup(trainer, trainer.lightning_module, "fit")
    assert (tmp_path / "config.yaml").read_text() == "x: 1\n"
