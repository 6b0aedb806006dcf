"""The large workload: a GPT of a given number of parameters, fp32 state, on random tokens. Times are the device's."""

import os
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import Dataset

from benchmarks.notes import note_forward, write_note
from leto_strategy.pretraining.gpt import GPT, INITIAL_STD

WIDTHS = (4096, 2048, 1024, 512, 256, 128, 64)
CONTEXT, CONTEXT_SMALL = 1024, 32
_BLOCK_LENGTH = 4_194_301  # prime: no two rows of a matrix begin at the same place of the block

_num_forwards = 0
"""Of this process: what must not be carried from a dead trainer to the next is no attribute."""


def shape_of(num_parameters: int) -> dict[str, int]:
    """Sizes of a GPT of about so many parameters, about a hundred times as wide as deep."""
    width = next((w for w in WIDTHS if 12 * w**2 * max(2, w // 114) <= num_parameters), WIDTHS[-1])
    vocabulary = 16384 if width >= 1024 else 256
    layers = max(2, round((num_parameters - 2 * vocabulary * width) / (12 * width**2)))
    context = CONTEXT if width >= 1024 else CONTEXT_SMALL
    return {
        "vocabulary": vocabulary,
        "context": context,
        "width": width,
        "layers": layers,
        "heads": width // 32 // 4 or 1,
    }


class Tokens(Dataset[tuple[Tensor, int]]):
    """Random tokens, one more than the context has, and their numbers.

    Args:
        shape: Of the network.
        length: Number of samples.
    """

    def __init__(self, shape: dict[str, int], length: int) -> None:
        self.shape, self.length = shape, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        generator = torch.Generator().manual_seed(index)
        return torch.randint(self.shape["vocabulary"], (self.shape["context"] + 1,), generator=generator), index


class Language(pl.LightningModule):
    """Predicts tokens.

    Args:
        shape: Of the network.
        out: Directory of the notes.
    """

    def __init__(self, shape: dict[str, int], out: Path) -> None:
        super().__init__()
        self.out = out
        with torch.device("meta"):  # a billion random numbers take longer than everything else
            self.network = GPT(**shape, tie_weights=False)  # type: ignore[arg-type]
        self.network.to_empty(device="cpu")
        _initialise(self.network)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Cross-entropy in nats a token."""
        global _num_forwards
        _num_forwards += 1
        tokens, _ = batch
        if _num_forwards == 1 and tokens.is_cuda:  # the first kernel of a trainer that was promoted
            (tokens + 1).sum()
            torch.cuda.current_stream().synchronize()
        note_forward(self, self.out)
        logits, _ = self.network(tokens[:, :-1])
        return functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """The gradients of a step are there: when, is noted for a trainer's first one."""
        if _num_forwards == 1:
            if self.device.type == "cuda":
                torch.cuda.current_stream().synchronize()
            path = self.out / f"gradients.r{self.global_rank}.jsonl"
            write_note(path, step=self.trainer.global_step, pid=os.getpid(), monotonic_ns=time.monotonic_ns())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), 1e-4)


def _initialise(network: GPT) -> None:
    """Normal numbers, the same few millions for all matrices."""
    block = INITIAL_STD * torch.randn(_BLOCK_LENGTH, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0)
                continue
            for piece in parameter.view(-1).split(_BLOCK_LENGTH):
                piece.copy_(block[: len(piece)])
