"""Plain attributes of many modules (an annealed `dropout.p`, a counter in a layer), watched at little cost.

Nearly all of them never change. All values are read into one tuple and compared by identity with the last one, which
takes microseconds for hundreds of modules; only what differs is looked at as `UserState` does it. Numbers, strings,
tuples, lists, dictionaries, sets and small tensors are watched. Objects of other classes are not: a configuration or a
tokenizer that every layer holds would have to be packed at every step.
"""

from collections import deque
from collections.abc import Callable, Iterable
from operator import is_
from typing import Any

import numpy
from torch import Tensor, nn

from leto_strategy.strategy.capture.packing import ModuleNames
from leto_strategy.strategy.capture.sameness import is_frozen
from leto_strategy.strategy.capture.user_state import UserState

_CONTAINERS = (list, tuple, dict, set, frozenset, deque, Tensor, numpy.ndarray)
_BYTES_MAX = 64 << 10
_NEVER = frozenset(("_reversed_padding_repeated_twice", "_flat_weights", "_flat_weight_refs"))
"""Lists in torch's own layers that follow from what does not change."""
_SHAPES = _NEVER | {
    "in_channels", "out_channels", "kernel_size", "output_padding", "transposed", "groups",
    "in_features", "out_features", "num_features", "normalized_shape", "num_embeddings", "embedding_dim", "embed_dim",
}  # fmt: skip
"""Attributes of torch's own layers that can't change while their parameters stay."""


class SubmoduleState(UserState):
    """Captures and restores the plain attributes of modules.

    Args:
        modules: Name and module, in an order that every generation shares.
        skip: Types whose instances are never recorded.
        names: See `UserState`.
    """

    def __init__(self, modules: Iterable[tuple[str, nn.Module]], *, skip: tuple[type, ...], names: ModuleNames) -> None:
        super().__init__(modules, skip=skip, names=names)
        self._sizes: tuple[int, ...] = ()
        self._read: Callable[[], tuple[Any, ...]] = lambda: ()
        self._last: tuple[Any, ...] = ()
        self._places: list[tuple[int, Any]] = []
        self._unsettled: list[int] = []
        self._changes: dict[int, dict[str, Any]] = {}
        self._dicts = [owner.attributes for owner in self._owners]

    def _watched(self, value: Any) -> bool:
        return is_frozen(value) or type(value) in _CONTAINERS

    def _bytes(self, value: Any) -> bytes | None:
        data = super()._bytes(value)
        return data if data is not None and len(data) <= _BYTES_MAX else None

    def _list(self) -> None:
        """Look which attributes there are, and make the function that reads them all."""
        for owner in self._owners:
            has_shape = type(owner.owner).__module__.startswith("torch.nn.") and bool(owner.attributes["_parameters"])
            owner.internal |= _SHAPES if has_shape else _NEVER
            owner.list_attributes()
        self._sizes = tuple(map(len, self._dicts))
        self._places = [(i, attribute) for i, owner in enumerate(self._owners) for attribute in owner.present]
        reads = ",".join(f"d[{i}][{attribute.name!r}]" for i, attribute in self._places)
        self._read = eval(f"lambda: ({reads}{',' if reads else ''})", {"d": self._dicts})
        self._last = ()

    def capture(self) -> dict[int, dict[str, Any]]:  # type: ignore[override]
        """Changed attributes by the number of their module; modules without any are left out."""
        if tuple(map(len, self._dicts)) != self._sizes:
            self._list()
        try:
            values = self._read()
        except KeyError:
            self._list()
            values = self._read()
        touched: set[int] = set()
        if not self._last:
            self._look_at(range(len(values)), values, touched)
        elif not all(map(is_, values, self._last)):
            different = [i for i, (value, last) in enumerate(zip(values, self._last, strict=True)) if value is not last]
            self._look_at(different, values, touched)
        self._look_at(self._unsettled, values, touched)
        self._last = values
        if touched:
            self._unsettled = [i for i, (_, attribute) in enumerate(self._places) if not attribute.settled]
            self._changes = dict(self._changes)
            for number in touched:
                owner = self._owners[number]
                if changes := owner.changes():
                    self._changes[number] = changes
                else:
                    self._changes.pop(number, None)
        return self._changes

    def _look_at(self, places: Iterable[int], values: tuple[Any, ...], touched: set[int]) -> None:
        for i in places:
            number, attribute = self._places[i]
            change = attribute.change
            self._look(self._owners[number].name, attribute, values[i])
            if attribute.change is not change or not self._last:
                touched.add(number)

    def restore(self, captured: dict[int, dict[str, Any]]) -> None:  # type: ignore[override]
        """Give every attribute the value it had at the capture."""
        super().restore([captured.get(number, {}) for number in range(len(self._owners))])
        self._sizes, self._changes, self._unsettled = (), {}, []
