"""What a workload writes down while it trains, and how the benchmarks steer it: by files in the directory of the run.

`forwards.r<rank>.jsonl`: a training step was entered. `steps.r<rank>.jsonl`: it was over. `stop` holds the number of
steps after which training ends; it is written ahead of time, so that all ranks see it before they get there. `hold`
holds the number of steps after which each rank stands still, until it is told otherwise; `held.r<rank>.jsonl` says that
it does, and its GPU too. `end.r<rank>.jsonl`: what the run has used, when training is over.
"""

import hashlib
import json
import os
import resource
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn

from benchmarks.device_time import DeviceClock, parts_of
from benchmarks.exact import ExactRows
from benchmarks.timers import RecordTimers

HOLD_SECONDS_MAX = 150.0
_LOOK_AGAIN_SECONDS = 0.002

_files: dict[Path, int] = {}
_rows: ExactRows | None = None
_timers: RecordTimers | None = None
_clock: DeviceClock | None = None


def write_note(path: Path, **note: Any) -> None:
    """Append a line. Open files belong to the process: they must not be attributes, which a recovery carries over."""
    if path not in _files:
        _files[path] = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    os.write(_files[path], json.dumps(note).encode() + b"\n")


def note_forward(module: pl.LightningModule, out: Path) -> None:
    """A training step is entered now."""
    step = module.trainer.global_step
    write_note(
        out / f"forwards.r{module.global_rank}.jsonl", step=step, pid=os.getpid(), monotonic_ns=time.monotonic_ns()
    )


def start_timers(*, parts: bool) -> None:
    """Time the step records of this process."""
    global _timers
    _timers = RecordTimers(parts=parts)


class Notes(pl.Callback):
    """Notes each step's end, stands still while it is held, and stops where it is told to.

    A large model is never brought to the user's process: its run is over when `result.json` is there, and is killed.

    Args:
        out: Directory of the notes.
        exact: Note loss, samples and weights too.
        large: They are rows of `exact.py`, for which nobody waits.
    """

    def __init__(self, out: Path, *, exact: bool, large: bool) -> None:
        self.out, self.exact, self.large = out, exact, large

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """A step is over; on a GPU the device may still be at it."""
        rank, done = trainer.global_rank, trainer.global_step
        note: dict[str, Any] = {"step": done - 1, "monotonic_ns": time.monotonic_ns()}
        note["cpu_ns"] = time.process_time_ns()
        if self.exact and self.large:
            self._write_row(pl_module, done - 1, outputs["loss"], batch[1])
        elif self.exact:
            note |= {"loss": outputs["loss"].item().hex(), "ids": batch[1].tolist(), "weights": digest(pl_module)}
        if _timers is not None:
            note["parts_ns"] = _timers.take()
        write_note(self.out / f"steps.r{rank}.jsonl", **note)
        self._stand_still(pl_module, done)
        if self.large:
            _mark(pl_module.device)
        stop = self.out / "stop"
        if stop.exists() and done >= int(stop.read_text()):
            self._end(trainer, pl_module)

    def _write_row(self, module: pl.LightningModule, step: int, loss: Any, ids: Any) -> None:
        global _rows
        if _rows is None:
            _rows = ExactRows(self.out, module.global_rank, on_gpu=module.device.type == "cuda")
        _rows.write(step, loss, ids, module.parameters())

    def _stand_still(self, module: pl.LightningModule, done: int) -> None:
        if not self._is_held(done):
            return
        _synchronise(module.device)
        write_note(self.out / f"held.r{module.global_rank}.jsonl", steps=done)
        deadline = time.monotonic() + HOLD_SECONDS_MAX
        while self._is_held(done) and time.monotonic() < deadline:
            time.sleep(_LOOK_AGAIN_SECONDS)

    def _is_held(self, done: int) -> bool:
        try:
            return done >= int((self.out / "hold").read_text())
        except FileNotFoundError:
            return False

    def _end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if not self.large:
            trainer.should_stop = True
            return
        self.on_train_end(trainer, module)
        trainer.strategy.barrier()
        if trainer.is_global_zero:
            partial = self.out / "result.partial"
            partial.write_text(json.dumps({"steps": trainer.global_step}))
            partial.rename(self.out / "result.json")
        time.sleep(HOLD_SECONDS_MAX)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Training is over: what this process needed, and what the device's time went to."""
        note: dict[str, Any] = {"pid": os.getpid()}
        note["rss_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        session = getattr(trainer.strategy, "_session", None)
        if session is not None:
            note["slot_waits"] = session.page.slot_waits
        if self.large:
            assert _clock is not None
            note["device_ms"] = _clock.between_ms()
            note["reserved_mib"] = torch.cuda.max_memory_reserved() >> 20 if pl_module.device.type == "cuda" else None
            note["parts_ms"] = None if session is None else parts_of(session)
        write_note(self.out / f"end.r{trainer.global_rank}.jsonl", **note)


def _mark(device: torch.device) -> None:
    global _clock
    if _clock is None:
        _clock = DeviceClock(device)
    _clock.mark()


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def digest(module: nn.Module) -> str:
    """Hash of all weights' bytes."""
    sha = hashlib.sha256()
    for _, value in sorted(module.state_dict().items()):
        sha.update(value.contiguous().numpy())
    return sha.hexdigest()[:24]
