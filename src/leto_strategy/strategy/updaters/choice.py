"""Which updater a fit gets: the transaction wherever it can be exact, else snapshots of the whole state."""

from typing import Any

from leto_strategy.config import LetoConfig
from leto_strategy.errors import UnsupportedFeatureError, UnsupportedOptimizerError
from leto_strategy.memory.pool import ResilientMemoryPool
from leto_strategy.strategy.updaters.base import Updater
from leto_strategy.strategy.updaters.snapshot import SnapshotUpdater
from leto_strategy.strategy.updaters.transactional import TransactionalUpdater

_WRITING_CALLBACKS = {
    "BaseFinetuning": "unfreezes layers during training",
    "WeightAveraging": "exchanges weights during validation",
}


def choose_updater(
    config: LetoConfig, trainer: Any, optimizers: list[Any], pool: ResilientMemoryPool, *, world: int
) -> tuple[Updater, str | None]:
    """Make the updater of a fit.

    Args:
        config: The user's options; `updater` decides where it is not "auto".
        trainer: The Trainer, its module and callbacks set up.
        optimizers: What `configure_optimizers` returned.
        pool: The rank's retained memory; nothing is allocated.
        world: Number of ranks.

    Returns:
        The updater, and why it is not the transactional one where "auto" decided so.

    Raises:
        UnsupportedFeatureError: "transactional" was asked for and can't be exact here.
        UnsupportedOptimizerError: Likewise, because of the optimizer.
        ValueError: Likewise, because of a parameter or an option.
    """
    module = trainer.lightning_module
    if config.updater != "sync_snapshot":
        reason = _obstacle(trainer, optimizers)
        if reason is None and config.updater == "auto":
            reason = _written_otherwise(module, optimizers[0])
        if reason is None:
            try:
                return TransactionalUpdater(config, module, optimizers[0], pool, world=world), None
            except (UnsupportedOptimizerError, ValueError) as error:
                if config.updater == "transactional":
                    raise
                reason = str(error)
        elif config.updater == "transactional":
            raise UnsupportedFeatureError(
                f"LetoStrategy(updater='transactional') is not possible: {reason}. Use 'sync_snapshot' or 'auto'."
            )
    else:
        reason = None
    if config.protection == "on":
        raise UnsupportedFeatureError(
            f"LetoStrategy(protection='on') needs the transactional updater, which is not possible here: {reason}. Use"
            " protection='off'."
        )
    return SnapshotUpdater(config, module, optimizers, pool, world=world), reason


def _written_otherwise(module: Any, optimizer: Any) -> str | None:
    """A parameter that asks for gradients and has no optimizer is usually a copy: a target network, an average."""
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    left = [
        name for name, parameter in module.named_parameters() if parameter.requires_grad and id(parameter) not in held
    ]
    if not left:
        return None
    return f"the optimizer does not hold {left[0]!r} ({len(left)} in all), so that something else may write it"


def _obstacle(trainer: Any, optimizers: list[Any]) -> str | None:
    """What the transactional updater can't follow; None where it can."""
    if not trainer.lightning_module.automatic_optimization:
        return "optimisation is manual"
    if len(optimizers) != 1:
        return f"there are {len(optimizers)} optimizers"
    (optimizer,) = optimizers
    if type(optimizer).__name__ == "_MockOptimizer":
        return "configure_optimizers returned no optimizer"
    if getattr(optimizer, "_optimizer_step_pre_hooks", None) or getattr(optimizer, "_optimizer_step_post_hooks", None):
        return f"{type(optimizer).__name__} has hooks registered with register_step_pre_hook or register_step_post_hook"
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    if scaler is not None and getattr(optimizer, "_step_supports_amp_scaling", False):
        return "a fused optimizer unscales gradients by itself"
    for callback in trainer.callbacks:
        for cls in type(callback).__mro__:
            of_lightning = cls.__module__.split(".")[0] in ("lightning", "pytorch_lightning")
            if of_lightning and cls.__name__ in _WRITING_CALLBACKS:
                return f"{type(callback).__name__} {_WRITING_CALLBACKS[cls.__name__]}"
    return None
