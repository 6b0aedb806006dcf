"""Modules that are no part of the LightningModule: those that callbacks, the datamodule or a list or dictionary hold.

An average of the weights, a metric of a callback, metrics in a plain list. Their tensors, modes, metric states and
plain attributes are carried in place, so that whoever holds them goes on holding them.
"""

import pickle
import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from leto_strategy.strategy.capture.metrics import metric_state, restore_metric
from leto_strategy.strategy.capture.packing import ModuleNames
from leto_strategy.strategy.capture.submodules import SubmoduleState
from leto_strategy.strategy.capture.tensors import freeze, thaw
from leto_strategy.strategy.capture.user_state import is_internal

_DEPTH_MAX = 4
_LARGE_BYTES = 1 << 20


class HeldModules:
    """Captures and restores modules that are held by objects of the user.

    Args:
        owners: Name and object, in an order that every process shares.
        module: The LightningModule, whose own parts are no business of this class.
        metric_class: `torchmetrics.Metric`.
        skip: Types whose instances are never recorded.
        quiet: Say nothing of large ones.
    """

    def __init__(
        self,
        owners: list[tuple[str, Any]],
        module: nn.Module,
        metric_class: type,
        *,
        skip: tuple[type, ...],
        quiet: bool = False,
    ) -> None:
        self._quiet = quiet
        self._owners, self._metric_class, self._skip = owners, metric_class, skip
        self.names = ModuleNames()
        for name, part in module.named_modules():
            self.names.add(f"module:{name}", part)
        self._held: dict[str, _Held] = {}
        self.find()

    def find(self) -> None:
        """Look for modules that are not known yet; what start hooks have made, they make in every trainer."""
        for number, (_, owner) in enumerate(self._owners):
            for name, value in sorted(vars(owner).items()):
                if not is_internal(owner, name):
                    self._walk(f"{number}.{name}", value, 0)

    def _walk(self, path: str, value: Any, depth: int) -> None:
        if isinstance(value, self._skip) or depth > _DEPTH_MAX:
            return
        if isinstance(value, nn.Module):
            if self.names.name_of(value) is None:
                for name, part in value.named_modules():
                    self.names.add(f"{path}:{name}", part)
                self._held[path] = _Held(path, value, self._metric_class, skip=self._skip, names=self.names)
                self._say_if_large(path, value)
        elif type(value) in (list, tuple):
            for i, item in enumerate(value):
                self._walk(f"{path}[{i}]", item, depth + 1)
        elif isinstance(value, dict):
            for key, item in value.items():
                self._walk(f"{path}[{key!r}]", item, depth + 1)

    def _say_if_large(self, path: str, root: nn.Module) -> None:
        size_bytes = sum(t.numel() * t.element_size() for t in _tensors(root))
        if size_bytes > _LARGE_BYTES and not self._quiet:
            number, _, attribute = path.partition(".")
            warnings.warn(
                f"The module {attribute!r} of {self._owners[int(number)][0]} has {size_bytes >> 20} MiB, which Leto"
                " copies at every step. Make it a part of the LightningModule to avoid that.",
                stacklevel=2,
            )

    def capture(self) -> dict[str, Any]:
        """Their state, ready to pack."""
        return {path: held.capture() for path, held in self._held.items()}

    def restore(self, state: dict[str, Any], *, all_there: bool = True) -> None:
        """Put the state back.

        Args:
            state: What `capture` has returned.
            all_there: This process has run the same hooks, so that it must have the same modules.
        """
        for path, values in state.items():
            if path in self._held:
                self._held[path].restore(values)
            elif all_there:
                warnings.warn(
                    f"Leto can't give the module {path.partition('.')[2]!r} its state back: it was made by another hook"
                    " in the trainer that failed. Make it in setup or on_train_start.",
                    stacklevel=2,
                )

    def whole(self) -> dict[str, bytes]:
        """Each module as a whole, where it can be pickled: for a process whose hooks have not made it."""
        found = {}
        for path, held in self._held.items():
            try:
                found[path] = pickle.dumps(held.root)
            except Exception:  # a user's object may raise anything
                continue
        return found

    def set_missing(self, whole: dict[str, bytes]) -> None:
        """Set modules that are plain attributes of an owner and are not there."""
        for path, data in whole.items():
            number, _, name = path.partition(".")
            owner = vars(self._owners[int(number)][1]) if int(number) < len(self._owners) else {}
            if path not in self._held and "[" not in name and not isinstance(owner.get(name), nn.Module):
                owner[name] = pickle.loads(data)
        self.find()


class _Held:
    """One module and all its parts."""

    def __init__(
        self, path: str, root: nn.Module, metric_class: type, *, skip: tuple[type, ...], names: ModuleNames
    ) -> None:
        self.root, self._parts = root, list(root.modules())
        self._metrics = [part for part in self._parts if isinstance(part, metric_class)]
        named = [(f"the module {path} {name}", part) for name, part in root.named_modules()]
        plain = [(name, part) for name, part in named if not isinstance(part, metric_class)]
        self._plain = SubmoduleState(plain, skip=skip, names=names)

    def capture(self) -> tuple[Any, ...]:
        tensors = [_frozen(tensor) for tensor in _tensors(self.root)]
        modes = bytes([part.training for part in self._parts])
        return tensors, modes, [metric_state(metric) for metric in self._metrics], self._plain.capture()

    def restore(self, state: tuple[Any, ...]) -> None:
        tensors, modes, metrics, plain = state
        with torch.no_grad():
            for tensor, value in zip(_tensors(self.root), tensors, strict=True):
                _give(tensor, thaw(value))
        for part, training in zip(self._parts, modes, strict=True):
            part.training = bool(training)
        for metric, values in zip(self._metrics, metrics, strict=True):
            restore_metric(metric, values)
        self._plain.restore(plain)


def _tensors(root: nn.Module) -> Iterable[Tensor]:
    yield from root.parameters()
    yield from root.buffers()


def _frozen(tensor: Tensor) -> Any:
    plain = tensor.detach()
    frozen = freeze(plain)
    return frozen.clone() if frozen is plain else frozen


def _give(tensor: Tensor, value: Tensor) -> None:
    if tensor.shape == value.shape and tensor.dtype == value.dtype:
        tensor.copy_(value)
    else:
        tensor.data = value
