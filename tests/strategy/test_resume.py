"""Which checkpoint a call loads, and that it stays that one."""

import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.trainer.states import TrainerFn

from leto_strategy.config import TrainerIdentity
from leto_strategy.context import CHECKPOINT_FILE, CallContext
from leto_strategy.errors import ConfigurationError
from leto_strategy.strategy.launch import resume


def trainer_for(directory: Path, fn: TrainerFn = TrainerFn.FITTING) -> Any:
    callback = ModelCheckpoint(dirpath=directory)
    trainer = pl.Trainer(accelerator="cpu", logger=False, callbacks=[callback], default_root_dir=str(directory))
    trainer.strategy._lightning_module = BoringModel()
    trainer.state.fn = fn
    return trainer


def test_words_mean_what_they_mean_in_lightning(tmp_path: Path) -> None:
    trainer = trainer_for(tmp_path)
    assert resume.select_checkpoint(trainer, {"model": object(), "ckpt_path": None}) is None
    assert resume.select_checkpoint(trainer, {"ckpt_path": "some/path.ckpt"}) == "some/path.ckpt"
    with pytest.raises(ValueError, match="no HPC checkpoint"):
        resume.select_checkpoint(trainer, {"ckpt_path": "hpc"})
    for name in ("last.ckpt", "hpc_ckpt_3.ckpt"):
        (tmp_path / name).touch()
    assert resume.select_checkpoint(trainer, {"ckpt_path": "last"}) == str(tmp_path / "last.ckpt")
    assert resume.select_checkpoint(trainer, {"ckpt_path": "hpc"}) == str(tmp_path / "hpc_ckpt_3.ckpt")
    testing = trainer_for(tmp_path, TrainerFn.TESTING)
    testing.checkpoint_callback.best_model_path = "best.ckpt"
    assert resume.select_checkpoint(testing, {"model": None, "ckpt_path": None}) == "best.ckpt"
    assert resume.select_checkpoint(testing, {"model": object(), "ckpt_path": None}) is None
    trainer.ckpt_path = "set by hand"
    assert resume.select_checkpoint(trainer, {"ckpt_path": None}) == "set by hand"


@pytest.mark.parametrize("path", ["registry", "registry:model:version:2"])
def test_a_registry_is_refused(tmp_path: Path, path: str) -> None:
    with pytest.raises(ConfigurationError, match="download it first"):
        resume.select_checkpoint(trainer_for(tmp_path), {"ckpt_path": path})


def test_a_pinned_file_is_read_whatever_becomes_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "last.ckpt"
    torch.save({"a": 1}, path)
    fd = resume.pin(path)
    assert fd is not None
    files = {CHECKPOINT_FILE: fd}
    identity = TrainerIdentity("j", 0, 1, 0, "shadow", 0, "fit", -1, -1, (), "", 0, -1, 1, 2, files=files)
    monkeypatch.setattr(resume, "trainer_identity", lambda: identity)
    monkeypatch.setattr(resume, "call_context", lambda: CallContext(ckpt_path=path))
    path.unlink()
    path.write_text("garbage")
    strategy = pl.strategies.DDPStrategy()
    for _ in range(2):
        assert strategy.load_checkpoint(resume.pinned(path)) == {"a": 1}
    assert resume.pinned(tmp_path / "other.ckpt") == tmp_path / "other.ckpt"
    os.close(fd)


def test_what_cannot_be_held_is_left_to_its_name(tmp_path: Path) -> None:
    assert resume.pin(None) is None
    assert resume.pin(tmp_path) is None
    assert resume.pin(tmp_path / "missing.ckpt") is None
    assert resume.pin("memory://bucket/last.ckpt") is None
