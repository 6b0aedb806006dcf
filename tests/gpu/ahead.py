"""Trains a model whose step takes some 50 ms of a GPU, with Leto or in a plain loop, and prints what the host waited.

python ahead.py leto|plain FILE
"""

import json
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

sys.path[:0] = [str(Path(__file__).resolve().parents[2] / part) for part in ("", "src")]

from benchmarks.device_time import DeviceClock  # noqa: E402

from leto_strategy import LetoStrategy  # noqa: E402

WIDTH, LAYERS, ROWS = 4096, 6, 4096
STEPS, WARMUP_STEPS = 60, 20
DEVICE = torch.device("cuda:0")


class Inputs(Dataset[Tensor]):
    """Small ones: a batch that is not in pinned memory is copied without a wait only up to 64 KiB."""

    def __len__(self) -> int:
        return 8 * STEPS

    def __getitem__(self, index: int) -> Tensor:
        return torch.randn(WIDTH // 8, generator=torch.Generator().manual_seed(index))


class Deep(pl.LightningModule):
    """One matrix, used again and again."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.matrix = nn.Linear(WIDTH // 8, WIDTH), nn.Linear(WIDTH, WIDTH)

    def training_step(self, batch: Tensor, batch_idx: int = 0) -> Tensor:
        """Some loss."""
        x = self.first(batch).repeat(ROWS // len(batch), 1)
        for _ in range(LAYERS):
            x = torch.tanh(self.matrix(x))
        return x.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), 1e-4)


class Ahead(pl.Callback):
    """At the end of each step: how many steps the device is behind."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """A step is over, on the host."""
        look()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """All are."""
        session = trainer.strategy._session
        report(slot_waits=session.page.slot_waits)


clock = DeviceClock(DEVICE)
behind: list[int] = []


def look() -> None:
    """Mark the end of a step."""
    clock.mark()
    behind.append(sum(not mark.query() for mark in clock.marks[-20:]))


def report(**more: Any) -> None:
    """Write what was seen."""
    step_ms = sorted(clock.between_ms()[WARMUP_STEPS:])
    found = {"step_ms": step_ms[len(step_ms) // 2], "behind": behind[WARMUP_STEPS:], **more}
    Path(sys.argv[2]).write_text(json.dumps(found))


def train_plainly() -> None:
    """The same with nothing but torch."""
    model = Deep().to(DEVICE)
    optimizer = model.configure_optimizers()
    for batch in DataLoader(Inputs(), 8):
        loss = model.training_step(batch.to(DEVICE))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        look()
    report()


def main() -> None:
    """Train."""
    pl.seed_everything(1, verbose=False)
    if sys.argv[1] == "plain":
        train_plainly()
        return
    trainer = pl.Trainer(
        strategy=LetoStrategy(shadows=0),
        accelerator="gpu",
        devices=1,
        max_epochs=1,
        callbacks=[Ahead()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=str(Path(sys.argv[2]).parent),
    )
    trainer.fit(Deep(), DataLoader(Inputs(), 8))


if __name__ == "__main__":
    main()
