"""Everything of a fit, apart from retained tensors, that a promoted trainer needs to go on exactly.

One snapshot serves both records of a step: START takes it before the batch of the step was fetched, MID when the
gradients are final.
"""

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from leto_strategy.strategy.capture.kept import KeptState
from leto_strategy.strategy.capture.loggers import LoggerState
from leto_strategy.strategy.capture.loops import FitPosition
from leto_strategy.strategy.capture.metrics import MetricState
from leto_strategy.strategy.capture.rng import capture_rng, restore_rng
from leto_strategy.strategy.capture.tensors import freeze, thaw
from leto_strategy.strategy.flavour import Flavour
from leto_strategy.strategy.scaling import capture_precision, restore_precision


class FitSnapshot:
    """Captures and restores the state of one trainer's fit.

    Args:
        trainer: The Trainer, set up, before its start hooks.
        flavour: Its distribution.
        loggers: Its loggers.
        generators: Returns the `torch.Generator` objects of the loaders that are known, training loaders first.
    """

    def __init__(
        self, trainer: Any, flavour: Flavour, loggers: LoggerState, generators: Callable[[], list[torch.Generator]]
    ) -> None:
        self._loggers, self._generators = loggers, generators
        self._strategy, self._precision = trainer.strategy, trainer.precision_plugin
        module: nn.Module = trainer.lightning_module
        loop_class = flavour.pytorch("loops.loop")._Loop
        self.position = FitPosition(trainer, loop_class, flavour.pytorch("loops.progress")._BaseProgress)
        result = flavour.pytorch("trainer.connectors.logger_connector.result")
        self._metrics = MetricState(trainer, result, result.Metric, trainer.strategy.reduce)
        self.user = KeptState(trainer, flavour)
        self._modules = list(module.modules())
        self._parameters = list(module.parameters())
        self._module = module
        self._buffer_dicts: list[dict[str, Any]] = [part._buffers for part in self._modules]
        self._buffers: list[tuple[str, nn.Module, str]] = []
        self._buffer_keys: list[tuple[str, ...]] = []

    def capture(self) -> dict[str, Any]:
        """The state now."""
        strategy = self._strategy
        return {
            "position": self.position.capture(),
            "schedulers": [config.scheduler.state_dict() for config in strategy.lr_scheduler_configs],
            "groups": [hyper_parameters(optimizer) for optimizer in strategy.optimizers],
            "syncs_buffers": strategy.syncs_buffers,
            "precision": capture_precision(self._precision),
            "user": self.user.capture(),
            "rng": capture_rng(self._generators()),
            "buffers": [
                (name, freeze(module._buffers[leaf]), leaf not in module._non_persistent_buffers_set)
                for name, module, leaf in self._named_buffers()
            ],
            "metrics": self._metrics.capture(),
            "modes": bytes(map(attrgetter("training"), self._modules)),
            "trained": bytes(map(attrgetter("requires_grad"), self._parameters)),
            "loggers": self._loggers.capture(),
        }

    def restore(self, state: dict[str, Any], *, before_fetch: bool, logs: bool) -> None:
        """Set everything but the loop counters' place in the fit loop.

        Args:
            state: What `capture` returned.
            before_fetch: The state is that before a batch is fetched.
            logs: Return the loggers to their positions and let them write.
        """
        strategy = self._strategy
        if before_fetch:
            self.position.restore_for_fetch(state["position"])
        else:
            self.position.restore(state["position"])
        for config, values in zip(strategy.lr_scheduler_configs, state["schedulers"], strict=True):
            config.scheduler.load_state_dict(values)
        for optimizer, groups in zip(strategy.optimizers, state["groups"], strict=True):
            for group, values in zip(getattr(optimizer, "param_groups", []), groups, strict=True):
                group.update(values)
        strategy.syncs_buffers = state["syncs_buffers"]
        restore_precision(self._precision, state["precision"])
        self.user.restore(state["user"])
        self._restore_buffers(state["buffers"])
        self._metrics.restore(state["metrics"])
        for module, training in zip(self._modules, state["modes"], strict=True):
            module.training = bool(training)
        for parameter, trained in zip(self._parameters, state["trained"], strict=True):
            parameter.requires_grad_(bool(trained))
        if logs:
            self._loggers.restore(state["loggers"])
        restore_rng(state["rng"], self._generators())

    def _named_buffers(self) -> list[tuple[str, nn.Module, str]]:
        """Name, owner and key of every buffer; looked for again when a module has others."""
        keys = list(map(tuple, self._buffer_dicts))
        if keys != self._buffer_keys:
            self._buffer_keys = keys
            self._buffers = [
                (f"{prefix}.{leaf}" if prefix else leaf, module, leaf)
                for prefix, module in self._module.named_modules()
                for leaf in module._buffers
            ]
        return self._buffers

    def _restore_buffers(self, buffers: list[tuple[str, Any, bool]]) -> None:
        recorded = {name for name, _, _ in buffers}
        for name, owner, leaf in self._named_buffers():
            if name not in recorded:
                delattr(owner, leaf)
        with torch.no_grad():
            for name, frozen, persistent in buffers:
                value = thaw(frozen)
                owner_name, _, leaf = name.rpartition(".")
                owner = self._module.get_submodule(owner_name)
                current = owner._buffers.get(leaf)
                if (
                    current is not None
                    and value is not None
                    and current.shape == value.shape
                    and current.dtype == value.dtype
                ):
                    current.copy_(value)
                elif leaf in owner._buffers:
                    owner._buffers[leaf] = value
                else:
                    owner.register_buffer(leaf, value, persistent=persistent)


def hyper_parameters(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The parameter groups without their parameters."""
    groups = getattr(optimizer, "param_groups", [])  # Lightning's stand-in for "no optimizer" has none
    copies = list(map(dict, groups))
    for copy in copies:
        copy.pop("params", None)
    return copies
