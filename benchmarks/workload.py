"""The script that the benchmarks train with: a small perceptron, and notes of what each rank did and when.

Notes are lines of JSON: `forwards.r<rank>.jsonl` when a training step was entered, `steps.r<rank>.jsonl` when it was
over, with loss, sample numbers and a hash of all weights. A file `stop` in the directory holds the number of steps
after which training ends; it is written ahead of time, so that all ranks see it before they get there.
"""

import argparse
import hashlib
import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.timers import RecordTimers
from leto_strategy import LetoStrategy

NUM_FEATURES = 32
_files: dict[Path, int] = {}
_timers: RecordTimers | None = None


def write_note(path: Path, note: dict[str, Any]) -> None:
    """Append a line. Open files belong to the process: they must not be attributes, which a recovery carries over."""
    if path not in _files:
        _files[path] = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    os.write(_files[path], json.dumps(note).encode() + b"\n")


class Numbers(Dataset[tuple[Tensor, int]]):
    """Fixed random vectors and their numbers."""

    def __init__(self, length: int) -> None:
        self.values = torch.randn(length, NUM_FEATURES, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.values[index], index


class Perceptron(pl.LightningModule):
    """Squares of a deep perceptron's outputs, with dropout.

    Args:
        width: Size of the hidden layers.
        depth: Their number.
        out: Directory of the notes.
    """

    def __init__(self, width: int, depth: int, out: Path) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Linear(NUM_FEATURES, width), nn.ReLU()]
        for _ in range(depth - 1):
            layers += [nn.Linear(width, width), nn.ReLU(), nn.Dropout(0.1)]
        self.net = nn.Sequential(*layers, nn.Linear(width, 1))
        self.out = out

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Mean square."""
        note = {"step": self.trainer.global_step, "pid": os.getpid(), "monotonic_ns": time.monotonic_ns()}
        write_note(self.out / f"forwards.r{self.global_rank}.jsonl", note)
        loss: Tensor = ((self.net(batch[0]) - batch[0].mean(1, keepdim=True)) ** 2).mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), 1e-3)


class Notes(pl.Callback):
    """Notes each step's end, and stops where the file `stop` says.

    Args:
        out: Directory of the notes.
        exact: Note loss, samples and weights too.
    """

    def __init__(self, out: Path, exact: bool) -> None:
        self.out, self.exact = out, exact

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """A step is over."""
        note: dict[str, Any] = {"step": trainer.global_step - 1, "monotonic_ns": time.monotonic_ns()}
        note["cpu_ns"] = time.process_time_ns()
        if self.exact:
            note |= {"loss": outputs["loss"].item().hex(), "ids": batch[1].tolist(), "weights": digest(pl_module)}
        if _timers is not None:
            note["parts_ns"] = _timers.take()
        write_note(self.out / f"steps.r{trainer.global_rank}.jsonl", note)
        stop = self.out / "stop"
        if stop.exists() and trainer.global_step >= int(stop.read_text()):
            trainer.should_stop = True

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Training is over: how much memory this process needed."""
        rss_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        write_note(self.out / f"memory.r{trainer.global_rank}.jsonl", {"pid": os.getpid(), "rss_mib": rss_kib / 1024})


def digest(module: nn.Module) -> str:
    """Hash of all weights' bytes."""
    sha = hashlib.sha256()
    for _, value in sorted(module.state_dict().items()):
        sha.update(value.contiguous().numpy())
    return sha.hexdigest()[:24]


def main() -> None:
    """Train until the file `stop` says so."""
    global _timers
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--strategy", default="leto")
    parser.add_argument("--options", type=json.loads, default={}, help="options of LetoStrategy as JSON")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--depth", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--exact", action="store_true", help="note loss, samples and weights of each step")
    parser.add_argument("--timers", choices=("records", "parts"), help="time the step records")
    arguments = parser.parse_args()
    if arguments.timers:
        _timers = RecordTimers(parts=arguments.timers == "parts")
    pl.seed_everything(3, verbose=False)
    model = Perceptron(arguments.width, arguments.depth, arguments.out)
    trainer = pl.Trainer(
        strategy=LetoStrategy(**arguments.options) if arguments.strategy == "leto" else arguments.strategy,
        accelerator="cpu",
        devices=arguments.ranks,
        max_epochs=-1,
        callbacks=[Notes(arguments.out, arguments.exact)],
        default_root_dir=arguments.out,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = DataLoader(Numbers(256 * arguments.batch_size * arguments.ranks), arguments.batch_size, shuffle=True)
    trainer.fit(model, loader)
    if trainer.is_global_zero:
        (arguments.out / "result.json").write_text(json.dumps({"weights": digest(model), "steps": trainer.global_step}))


if __name__ == "__main__":
    main()
