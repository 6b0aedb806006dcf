"""One training run: builds what the configuration says, trains, prints one line."""

import json
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from hydra.core.hydra_config import HydraConfig
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from lightning.fabric.utilities.exceptions import MisconfigurationException
from omegaconf import DictConfig, OmegaConf

from leto_strategy.errors import ConfigurationError, LetoError


def train(config: DictConfig) -> dict[str, Any] | None:
    """Build and fit; prints and writes the summary on rank 0, returns None on the others.

    Args:
        config: As `conf/train.yaml` composes it.

    Raises:
        LetoError: The configuration can't be trained, or Leto gave up.
    """
    pl.seed_everything(config.seed, workers=True, verbose=False)
    data = _build(config.data)
    module = _build(config.module)
    trainer = _build(config.trainer)
    began = time.monotonic()
    trainer.fit(module, datamodule=data)
    if not trainer.is_global_zero:
        return None
    summary = summarise(trainer, module, seconds=time.monotonic() - began)
    print(_line(summary))
    directory = Path(HydraConfig.get().runtime.output_dir)
    (directory / "summary.json").write_text(json.dumps(summary) + "\n")
    return summary


def _build(node: DictConfig) -> Any:
    """The object that a node describes; what the user got wrong is said without Hydra's frame around it.

    Raises:
        ConfigurationError: The object refused its arguments.
    """
    try:
        return instantiate(OmegaConf.to_container(node, resolve=True), _convert_="all")
    except InstantiationException as error:
        if isinstance(error.__cause__, LetoError):
            raise error.__cause__ from None
        if isinstance(error.__cause__, (ValueError, TypeError, MisconfigurationException)):
            raise ConfigurationError(f"{node._target_}: {error.__cause__}") from error
        raise


def summarise(trainer: pl.Trainer, module: Any, *, seconds: float) -> dict[str, Any]:
    """What the run came to: steps, tokens, last losses, seconds of `fit`, recoveries.

    Args:
        trainer: After `fit`.
        module: After `fit`.
        seconds: How long it took, with the start of the ranks.
    """
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return {
        "steps": trainer.global_step,
        "tokens": module.num_tokens,
        "parameters": sum(parameter.numel() for parameter in module.parameters()),
        "loss": metrics["loss"],
        "val_loss": metrics.get("val_loss"),
        "ranks": trainer.world_size,
        "seconds": round(seconds, 3),
        "recoveries": len(getattr(trainer.strategy, "recoveries", [])),
        "directory": str(trainer.default_root_dir),
    }


def _line(summary: dict[str, Any]) -> str:
    validated = "" if summary["val_loss"] is None else f", validation {summary['val_loss']:.4f}"
    recovered = f", {_count(summary['recoveries'], 'recovery', 'recoveries')}" if summary["recoveries"] else ""
    ranks = _count(summary["ranks"], "rank", "ranks")
    return (
        f"{summary['steps']:,} steps, {summary['tokens']:,} tokens, {summary['parameters']:,} parameters:"
        f" loss {summary['loss']:.4f}{validated}; {summary['seconds']:.1f} s on {ranks}{recovered};"
        f" {summary['directory']}"
    )


def _count(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"
