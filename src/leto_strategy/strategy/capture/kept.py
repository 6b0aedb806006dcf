"""All that users keep between steps, in one place: attributes, submodules' attributes, and modules held elsewhere."""

from typing import Any

from torch import nn

from leto_strategy.strategy.capture.held_modules import HeldModules
from leto_strategy.strategy.capture.metrics import metric_state, restore_metric
from leto_strategy.strategy.capture.packing import pack, unpack
from leto_strategy.strategy.capture.sharing import attributes_of, share_again
from leto_strategy.strategy.capture.submodules import SubmoduleState
from leto_strategy.strategy.capture.user_state import UserState, assign_all, user_objects
from leto_strategy.strategy.flavour import Flavour


class KeptState:
    """Captures and restores what module, datamodule and callbacks keep.

    Args:
        trainer: The Trainer.
        flavour: Its distribution.
        quiet: Say nothing of what can't be carried.
    """

    def __init__(self, trainer: Any, flavour: Flavour, *, quiet: bool = False) -> None:
        module: nn.Module = trainer.lightning_module
        skip = (type(trainer), flavour.pytorch("loggers.logger").Logger, type(trainer.strategy))
        metric_class = flavour.pytorch("trainer.connectors.logger_connector.result").Metric
        self._trainer, self._owners = trainer, user_objects(trainer)
        self._held = HeldModules(self._owners, module, metric_class, skip=skip, quiet=quiet)
        self._user = UserState(self._owners, skip=skip, names=self._held.names, quiet=quiet)
        submodules, self._metrics = _submodules(module, metric_class)
        self._submodules = SubmoduleState(submodules, skip=skip, names=self._held.names)

    def accept_start_hooks(self) -> None:
        """See `UserState.accept_start_hooks`."""
        self._held.find()
        self._user.accept_start_hooks()

    def capture(self) -> dict[str, Any]:
        """What they keep, ready to pack."""
        return {
            "user": self._user.capture(),
            "submodules": self._submodules.capture(),
            "held": self._held.capture(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Give it back.

        Raises:
            StateChangedError: Training data and two other places hold one object that has changed.
        """
        before = attributes_of(self._owners)
        self._user.restore(state["user"])
        share_again(self._trainer, before, attributes_of(self._owners))
        self._submodules.restore(state["submodules"])
        self._held.restore(state["held"])

    def result(self) -> bytes:
        """For the user's process, see `give_to`."""
        self._held.find()
        metrics = [metric_state(metric) for metric in self._metrics]
        return pack({**self.capture(), "whole": self._held.whole(), "metrics": metrics})


def give_to(trainer: Any, flavour: Flavour, result: bytes) -> None:
    """Set what trainers have kept on the objects of the user's process, which has not run their hooks."""
    kept, owners = unpack(result), user_objects(trainer)
    module: nn.Module = trainer.lightning_module
    skip = (type(trainer), flavour.pytorch("loggers.logger").Logger, type(trainer.strategy))
    metric_class = flavour.pytorch("trainer.connectors.logger_connector.result").Metric
    held = HeldModules(owners, module, metric_class, skip=skip)
    held.set_missing(kept["whole"])
    assign_all(owners, kept["user"], held.names)
    held.restore(kept["held"], all_there=False)
    submodules, metrics = _submodules(module, metric_class)
    for number, changes in kept["submodules"].items():
        if number < len(submodules):
            assign_all([submodules[number]], [changes], held.names)
    for metric, state in zip(metrics, kept["metrics"], strict=False):
        restore_metric(metric, state)


def _submodules(module: nn.Module, metric_class: type) -> tuple[list[tuple[str, nn.Module]], list[Any]]:
    """The parts of a module with plain attributes of their own, and its metrics."""
    parts = [(name, part) for name, part in module.named_modules() if part is not module]
    plain = [(f"the submodule {name!r}", part) for name, part in parts if not isinstance(part, metric_class)]
    return plain, [part for _, part in parts if isinstance(part, metric_class)]
