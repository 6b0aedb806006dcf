"""Loggers that a case may name, and the rows that train with them, killed and compared: each row is data."""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Row:
    """One line of the table of what a script may use.

    Args:
        case: Fields of `Case` that differ from their defaults.
        kills: Rank, crash point, step of each kill.
        status: "exact" or "at least once".
        reason: Why it is not exact.
    """

    case: dict[str, Any]
    kills: tuple[tuple[int, str, int], ...]
    status: str = "exact"
    reason: str = ""


def recording_logger(pl: Any, base: Any) -> Any:
    """A user's own logger: appends each call to a file, and to another that it was opened."""

    class Recording(base):  # type: ignore[misc]
        def __init__(self, directory: str) -> None:
            super().__init__()
            self.directory, self._opened, self._run_id = directory, None, None

        name = property(lambda self: "recording")
        version = property(lambda self: self.experiment and self._run_id)
        save_dir = property(lambda self: self.directory)

        @property
        @pl.loggers.logger.rank_zero_experiment
        def experiment(self) -> Any:
            if self._opened is None:
                self._run_id = self._run_id or "run"
                os.makedirs(self.directory, exist_ok=True)
                with open(f"{self.directory}/opened.txt", "a") as file:
                    file.write(f"{os.getpid()}\n")
                self._opened = open(f"{self.directory}/calls.jsonl", "ab", buffering=0)  # noqa: SIM115
            return self._opened

        def note(self, *what: Any) -> None:
            if pl.utilities.rank_zero.rank_zero_only.rank == 0:
                self.experiment.write((json.dumps(what, default=str) + "\n").encode())

        def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
            self.note("metrics", step, {name: float(value).hex() for name, value in metrics.items()})

        def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
            self.note("hyperparams", dict(params))

        def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
            self.note("checkpoint", os.path.basename(checkpoint_callback.last_model_path))

        def finalize(self, status: str) -> None:
            self.note("finalize", status)

    return Recording


def _recording(pl: Any, out: str) -> Any:
    return recording_logger(pl, pl.loggers.Logger)(f"{out}/recorded")


def _own_csv(pl: Any, out: str) -> Any:
    class OwnCsv(pl.loggers.CSVLogger):  # type: ignore[misc]
        def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
            with open(f"{out}/own-csv.txt", "a") as file:
                file.write(f"{step} {sorted(metrics)}\n")
            super().log_metrics(metrics, step)

    return OwnCsv(f"{out}/logs", name="own")


LOGGERS: dict[str, Callable[[Any, str], Any]] = {
    "csv": lambda pl, out: pl.loggers.CSVLogger(f"{out}/logs"),
    "csv_often": lambda pl, out: pl.loggers.CSVLogger(f"{out}/logs", name="often", flush_logs_every_n_steps=1),
    "tensorboard": lambda pl, out: pl.loggers.TensorBoardLogger(f"{out}/logs"),
    "tensorboard_options": lambda pl, out: pl.loggers.TensorBoardLogger(
        f"{out}/logs", name="", version="v", sub_dir="s", prefix="p", default_hp_metric=False, filename_suffix=".x"
    ),
    "tensorboard_graph": lambda pl, out: pl.loggers.TensorBoardLogger(f"{out}/logs", name="graph", log_graph=True),
    "recording": _recording,
    "own_csv": _own_csv,
}


def draws(pl: Any) -> Any:
    """A callback that logs everything a SummaryWriter takes, through `logger.experiment`."""

    class Draws(pl.Callback):  # type: ignore[misc]
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            self.writer = trainer.logger.experiment

        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            step, loss = trainer.global_step, outputs["loss"].item()
            self.writer.add_scalars("both", {"a": loss, f"b{step % 3}": 2 * loss}, step)
            self.writer.add_histogram("weights", pl_module.head.weight, step)
            self.writer.add_image("image", batch[0][:1, :4].reshape(1, 2, 2).sigmoid(), step)

        def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            if trainer.is_global_zero and not trainer.sanity_checking:
                step = trainer.global_step
                self.writer.add_text("note", f"step {step}", step)
                self.writer.add_hparams({"step": step}, {"seen": 1.0}, run_name=f"run-{step}")
                self.writer.add_embedding(torch.eye(3), tag="eye", global_step=step)
                trainer.logger.log_hyperparams({"last": step})

    return Draws()


ROWS: dict[str, Row] = {
    "TensorBoard and CSV together": Row(
        {"loggers": ["tensorboard", "csv", "csv_often"], "callbacks": ["checkpoint", "lr_monitor"], "hparams": True},
        ((1, "batch_end", 2), (0, "chunk_updating", 7)),
    ),
    "everything a SummaryWriter takes": Row(
        {"loggers": ["tensorboard"], "callbacks": ["draws", "lr_monitor"], "hparams": True},
        ((0, "batch_end", 2), (0, "validation", 6), (1, "chunk_updating", 9)),
    ),
    "TensorBoard with all its options, three ranks": Row(
        {
            "loggers": ["tensorboard_options", "tensorboard_graph"],
            "devices": 3,
            "log_every_n_steps": 2,
            "hparams": True,
        },
        ((0, "start_before", 0), (2, "chunk_updating", 5), (0, "checkpoint_middle", 8)),
    ),
    "TensorBoard, pytorch_lightning": Row(
        {"loggers": ["tensorboard"], "flavour": "pytorch_lightning", "callbacks": ["draws"], "hparams": True},
        ((0, "epoch_end", 6), (1, "chunk_updating", 8)),
    ),
    "TensorBoard, two fits and a test": Row(
        {
            "loggers": ["tensorboard", "csv"],
            "fits": 2,
            "log_around": True,
            "epochs": 1,
            "test_after": True,
            "callbacks": ["checkpoint"],
        },
        ((0, "chunk_updating", 3), (0, "batch_end", 4)),
    ),
    "a logger of the user's own": Row(
        {"loggers": ["recording", "csv", "own_csv"], "callbacks": ["in_log_dir", "lr_monitor"], "hparams": True},
        ((0, "batch_end", 2), (1, "chunk_updating", 7)),
        status="at least once",
        reason="calls go to where nothing can be taken back",
    ),
}
