"""The LightningModule: loss, optimizer, schedule and what is logged. The network comes from the configuration."""

import math
from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from hydra.utils import instantiate
from torch import Tensor
from torch.nn import functional


class LanguageModule(pl.LightningModule):
    """Trains a network to predict the next token.

    A batch is B × (C + 1) tokens: each is predicted from those before it, but for the first. Logged are `loss` (nats a
    token), `perplexity`, `tokens` (seen by all ranks so far), `balance` (with experts), and `val_loss` and
    `val_perplexity`.

    Args:
        network: The network as Hydra writes it, `{"_target_": ..., **arguments}`; kept in checkpoints, so that
            `load_from_checkpoint` needs nothing else. It returns logits B × C × V and a load-balancing loss.
        learning_rate: Largest learning rate.
        min_learning_rate: Learning rate at the end.
        warmup_steps: Steps over which it grows linearly.
        decay_steps: Step at which the cosine ends, warm-up included.
        weight_decay: Of matrices and embeddings; norms have none.
        betas: AdamW's decay of first and second moment.
        balance_coefficient: Weight of the load-balancing loss.

    Raises:
        ValueError: A schedule that can't be.
    """

    def __init__(
        self,
        network: Mapping[str, Any],
        *,
        learning_rate: float,
        min_learning_rate: float,
        warmup_steps: int,
        decay_steps: int,
        weight_decay: float = 0.1,
        betas: tuple[float, float] = (0.9, 0.95),
        balance_coefficient: float = 0.01,
    ) -> None:
        super().__init__()
        _check_schedule(learning_rate, min_learning_rate, warmup_steps, decay_steps)
        self.save_hyperparameters()
        self.network = instantiate(dict(network))
        self.has_experts = bool(network.get("experts"))
        self.num_tokens = 0

    def forward(self, tokens: Tensor) -> Any:
        """Tokens B × C to logits B × C × V and the load-balancing loss."""
        return self.network(tokens)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Cross-entropy in nats a token, and the weighted load-balancing loss."""
        loss, balance = self._losses(batch)
        self.num_tokens += batch[:, 1:].numel() * self.trainer.world_size
        self.log("loss", loss.detach(), prog_bar=True)
        self.log("perplexity", loss.detach().exp())
        self.log("tokens", float(self.num_tokens))
        if self.has_experts:
            self.log("balance", balance.detach())
        return loss + self.hparams["balance_coefficient"] * balance if self.has_experts else loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        """The same without the load-balancing loss."""
        loss, _ = self._losses(batch)
        self.log("val_loss", loss, prog_bar=True, sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        """The perplexity of the mean loss, which is not the mean of the perplexities."""
        mean = self.trainer.callback_metrics.get("val_loss")
        if mean is not None:
            self.log("val_perplexity", mean.exp(), sync_dist=True)

    def _losses(self, batch: Tensor) -> tuple[Tensor, Tensor]:
        logits, balance = self(batch[:, :-1])
        return functional.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten()), balance

    def configure_optimizers(self) -> Any:
        """AdamW in two groups, with a linear warm-up and a cosine."""
        hparams = self.hparams
        groups = decay_groups(self.network, hparams["weight_decay"])
        optimizer = torch.optim.AdamW(groups, lr=hparams["learning_rate"], betas=tuple(hparams["betas"]))
        lowest = hparams["min_learning_rate"] / hparams["learning_rate"]

        def factor(step: int) -> float:
            return schedule(step, warmup=hparams["warmup_steps"], decay=hparams["decay_steps"], lowest=lowest)

        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Tokens are counted over restarts from a checkpoint, too."""
        checkpoint["num_tokens"] = self.num_tokens

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Go on counting."""
        self.num_tokens = checkpoint["num_tokens"]


def decay_groups(network: torch.nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Parameter groups of an optimizer: matrices and embeddings decay, vectors don't; each parameter is in one."""
    parameters = [parameter for parameter in network.parameters() if parameter.requires_grad]
    return [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]


def schedule(step: int, *, warmup: int, decay: int, lowest: float) -> float:
    """Factor of the largest learning rate in a step, counted from 0.

    Args:
        step: The step.
        warmup: Steps of linear growth; the first has 1/warmup.
        decay: Step from which on the factor is `lowest`.
        lowest: Last factor.
    """
    if step < warmup:
        return (step + 1) / warmup
    done = min(1.0, (step - warmup) / max(1, decay - warmup))
    return lowest + (1.0 - lowest) * 0.5 * (1.0 + math.cos(math.pi * done))


def _check_schedule(learning_rate: float, min_learning_rate: float, warmup_steps: int, decay_steps: int) -> None:
    if not 0.0 <= min_learning_rate <= learning_rate or learning_rate <= 0.0:
        raise ValueError(
            f"module.min_learning_rate={min_learning_rate} must be between 0 and module.learning_rate={learning_rate}."
        )
    if decay_steps < 1:
        raise ValueError(
            f"module.decay_steps={decay_steps}: the schedule needs its length; set trainer.max_steps, or"
            " module.decay_steps where trainer.max_epochs ends the run."
        )
    if warmup_steps < 0:
        raise ValueError(f"module.warmup_steps={warmup_steps} must be 0 or more.")
