"""The script that the benchmarks train with: a small perceptron, or a GPT with `--parameters`.

What it notes, and how it is steered: `notes.py`.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.language import Language, Tokens, shape_of
from benchmarks.notes import Notes, digest, note_forward, start_timers
from leto_strategy import LetoStrategy

NUM_FEATURES = 32
NUM_BATCHES = 256


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
        note_forward(self, self.out)
        loss: Tensor = ((self.net(batch[0]) - batch[0].mean(1, keepdim=True)) ** 2).mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), 1e-3)


def main() -> None:
    """Train until the file `stop` says so."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--strategy", default="leto")
    parser.add_argument("--options", type=json.loads, default={}, help="options of LetoStrategy as JSON")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: one GPU for all ranks")
    parser.add_argument("--parameters", type=float, default=None, help="train a GPT of about so many parameters")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--depth", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--exact", action="store_true", help="note loss, samples and weights of each step")
    parser.add_argument("--timers", choices=("records", "parts"), help="time the step records")
    arguments = parser.parse_args()
    if arguments.timers:
        start_timers(parts=arguments.timers == "parts")
    pl.seed_everything(3, verbose=False)
    num_samples = NUM_BATCHES * arguments.batch_size * arguments.ranks
    dataset: Dataset[tuple[Tensor, Any]]
    if arguments.parameters:
        shape = shape_of(int(arguments.parameters))
        model: pl.LightningModule = Language(shape, arguments.out)
        dataset = Tokens(shape, num_samples)
    else:
        model, dataset = Perceptron(arguments.width, arguments.depth, arguments.out), Numbers(num_samples)
    trainer = pl.Trainer(
        strategy=strategy_of(arguments),
        **devices_of(arguments),
        max_epochs=-1,
        callbacks=[Notes(arguments.out, exact=arguments.exact, large=bool(arguments.parameters))],
        default_root_dir=arguments.out,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, DataLoader(dataset, arguments.batch_size, shuffle=True))
    if trainer.is_global_zero:
        (arguments.out / "result.json").write_text(json.dumps({"weights": digest(model), "steps": trainer.global_step}))


def devices_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Options of the Trainer: where it trains, and how a GPU computes: alike each time."""
    if arguments.device == "cpu":
        return {"accelerator": "cpu", "devices": arguments.ranks}
    return {"accelerator": "gpu", "devices": 1, "deterministic": True, "precision": "bf16-mixed"}


def strategy_of(arguments: argparse.Namespace) -> Any:
    """The strategy; several ranks on one GPU can be told to an object only."""
    if arguments.strategy != "leto":
        return arguments.strategy
    options = dict(arguments.options)
    if arguments.device == "cuda" and arguments.ranks > 1:
        options |= {"parallel_devices": [torch.device("cuda:0")] * arguments.ranks, "process_group_backend": "gloo"}
    return LetoStrategy(**options)


if __name__ == "__main__":
    main()
