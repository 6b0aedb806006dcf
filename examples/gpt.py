"""A small GPT on bytes, written as for any other strategy: `python examples/gpt.py --strategy leto`.

The text is the documentation that CPython ships (`pydoc_data.topics`, some 0.7 MB), so nothing is downloaded. The only
lines about Leto are those that pick the strategy in `main`. `Notes` writes down what each step saw, exactly; `demo.py`
compares such notes of several runs.
"""

import argparse
import hashlib
import json
import math
import pydoc_data.topics
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

import leto_strategy

NUM_BYTES = 256


class Text(Dataset[tuple[Tensor, int]]):
    """Windows of the text, each with one byte more than a context has, and their numbers.

    Args:
        context: Bytes the model sees.
    """

    def __init__(self, context: int) -> None:
        topics: dict[str, str] = pydoc_data.topics.topics
        text = "\n".join(topics[name] for name in sorted(topics)).encode()
        self.bytes, self.context = torch.frombuffer(bytearray(text), dtype=torch.uint8), context

    def __len__(self) -> int:
        return (len(self.bytes) - 1) // self.context

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        start = index * self.context
        return self.bytes[start : start + self.context + 1].long(), index


class Block(nn.Module):
    """Attention, then a perceptron, each around a residual connection."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.attention_norm, self.perceptron_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.queries_keys_values, self.merge = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.perceptron = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Batch x context x width, to the same."""
        batch, context, width = x.shape
        projected = self.queries_keys_values(self.attention_norm(x))
        q, k, v = projected.view(batch, context, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.merge(attended.transpose(1, 2).reshape(batch, context, width))
        update: Tensor = self.perceptron(self.perceptron_norm(x))
        return x + functional.dropout(update, self.dropout, self.training)


class GPT(pl.LightningModule):
    """Predicts the next byte.

    Args:
        width: Size of the residual stream.
        layers: Number of blocks.
        heads: Attention heads of a block.
        context: Bytes the model sees.
        steps: Length of the learning-rate schedule, in steps.
        dropout: Probability; it draws random numbers in every step, which a recovery has to repeat.
    """

    def __init__(self, *, width: int, layers: int, heads: int, context: int, steps: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.steps = steps
        self.embedding, self.position = nn.Embedding(NUM_BYTES, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads, dropout) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, NUM_BYTES)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the byte after each byte."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        logits: Tensor = self.head(self.norm(self.blocks(self.embedding(tokens) + self.position(places))))
        return logits

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Mean cross-entropy in nats a byte."""
        windows, _ = batch
        logits = self(windows[:, :-1])
        loss = functional.cross_entropy(logits.reshape(-1, NUM_BYTES), windows[:, 1:].reshape(-1))
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        """AdamW with decay of matrices only; a short warm-up, then a cosine."""
        matrices = [p for p in self.parameters() if p.dim() > 1]
        vectors = [p for p in self.parameters() if p.dim() <= 1]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95))
        warmup = max(1, self.steps // 15)

        def factor(step: int) -> float:
            return min((step + 1) / warmup, 0.55 + 0.45 * math.cos(math.pi * min(1.0, step / self.steps)))

        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.LambdaLR(optimizer, factor), "interval": "step"}]


class Notes(pl.Callback):
    """Writes one JSON line a step and rank to `steps.r<rank>.jsonl`: the loss bit for bit, which samples, which bytes.

    A recovered trainer goes on with the same file. It is opened for each line: a callback's attributes are carried over
    a failure, and the number of an open file means nothing in another process.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """A step is over."""
        windows, ids = batch
        note = {
            "step": trainer.global_step - 1,
            "loss": outputs["loss"].item().hex(),
            "ids": ids.tolist(),
            "batch": hashlib.sha256(windows.cpu().numpy().tobytes()).hexdigest()[:16],
            "monotonic_ns": time.monotonic_ns(),
        }
        with open(self.directory / f"steps.r{trainer.global_rank}.jsonl", "a") as file:
            file.write(json.dumps(note) + "\n")


def main() -> None:
    """Train, and save the weights that the script has in its hands after `fit`."""
    parser = argparse.ArgumentParser(description="Train a small GPT on the text that CPython ships.")
    parser.add_argument("--strategy", default="leto", help="any strategy of Lightning; default: leto")
    parser.add_argument("--out", type=Path, default=Path("outputs/gpt"), help="directory of notes and weights")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--accelerator", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--devices", type=int, default=2, help="ranks: one a GPU, or processes on the CPU")
    parser.add_argument("--batch-size", type=int, default=8, help="windows a rank and step")
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument(
        "--faults", type=json.loads, default=[], help="planned faults as JSON, see leto_strategy.faults"
    )
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()

    options.out.mkdir(parents=True, exist_ok=True)
    pl.seed_everything(options.seed, verbose=False)
    context = 96
    model = GPT(width=options.width, layers=options.layers, heads=4, context=context, steps=options.steps)
    strategy = leto_strategy.LetoStrategy(faults=options.faults) if options.faults else options.strategy
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator=options.accelerator,
        devices=options.devices,
        deterministic=options.accelerator == "gpu",  # a GPU computes the same bits each time only if it is told to
        max_steps=options.steps,
        gradient_clip_val=1.0,
        callbacks=[Notes(options.out)],
        default_root_dir=options.out,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, DataLoader(Text(context), options.batch_size, shuffle=True))
    if trainer.is_global_zero:  # wherever the weights were trained, they are on the CPU now
        torch.save(model.state_dict(), options.out / "weights.pt")


if __name__ == "__main__":
    main()
