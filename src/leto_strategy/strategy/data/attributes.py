"""Plain attributes of what a user iterates over: the epoch that a dataset was told, a sampler's own counter.

They are read when an iteration begins and set before it is begun again in another process. Looked at are the loader,
its dataset and samplers, and what these hold of the same kind; small plain values only, so that it costs little. What
is as it was when the loader was set up is left to the new process: a descriptor or a pid means something else there.
Looking again costs microseconds while nothing has changed.
"""

import random
from collections import deque
from collections.abc import Iterator
from copy import copy
from itertools import chain
from operator import is_
from typing import Any

import numpy
import torch
from torch.utils.data import Dataset, IterDataPipe, Sampler

from leto_strategy.strategy.capture.packing import pack, unpack

_SCALARS = (bool, int, float, complex, str, bytes, type(None))
_CONTAINERS = (list, tuple, dict, set, deque)
_NUM_ITEMS_MAX = 256
_NUM_OBJECTS_MAX = 64
_NUM_CHILDREN_MAX = 16
_DEPTH_MAX = 5
_OTHERS = {
    "leto", "generator", "_iterator", "_DataLoader__multiprocessing_context", "next_iter_state",
    "_initial_iter_for_state_dict",
}  # fmt: skip
_FOREIGN = ("torch.", "numpy", "pandas", "pyarrow", "multiprocessing", "_io", "builtins")


class AttributeWatch:
    """The attributes below one object that are not as they were when this was made.

    Args:
        root: The object.
    """

    def __init__(self, root: Any) -> None:
        self._root = root
        self._baseline = capture_attributes(root)
        self._changes: dict[str, Any] = {}
        self._owners: list[dict[str, Any]] = []
        self._lengths: list[int] = []
        self._values: list[Any] = []
        self._mutable: list[tuple[Any, str]] = []
        self._look()

    def changes(self) -> dict[str, Any]:
        """What differs now."""
        if not self._as_before():
            self._look()
        return self._changes

    def restore(self, changes: dict[str, Any]) -> None:
        """Set everything to what it was where `changes` was returned, in this process or another one."""
        _restore(self._root, self._baseline, changes)

    def _as_before(self) -> bool:
        if list(map(len, self._owners)) != self._lengths:
            return False
        if not all(map(is_, chain.from_iterable(map(dict.values, self._owners)), self._values)):
            return False
        return all(repr(_plain(value)) == seen for value, seen in self._mutable)

    def _look(self) -> None:
        now = capture_attributes(self._root)
        self._changes = {path: plain for path, plain in now.items() if not _same(self._baseline.get(path), plain)}
        self._owners = [owner for _, owner in objects_below(self._root)]
        self._lengths = list(map(len, self._owners))
        self._values = list(chain.from_iterable(map(dict.values, self._owners)))
        flat = [(n, v) for owner in self._owners for n, v in owner.items() if n not in _OTHERS]
        seen = [(value, _plain(value)) for _, value in flat if type(value) not in (*_SCALARS, tuple)]
        self._mutable = [(value, repr(plain)) for value, plain in seen if plain is not None]


def capture_attributes(root: Any) -> dict[str, Any]:
    """Values of all plain attributes below `root`, by their path."""
    values = {}
    for path, owner in objects_below(root):
        for name, value in owner.items():
            if name not in _OTHERS:
                plain = _plain(value)
                if plain is not None:
                    values[f"{path}.{name}"] = plain
    return values


def _restore(root: Any, baseline: dict[str, Any], changes: dict[str, Any]) -> None:
    """Set what was changed, and set back what was not; but for what has become something that isn't plain."""
    places = [(key.rpartition("."), plain) for key, plain in changes.items()]
    for path, owner in objects_below(root):
        for (place, _, name), (kind, state) in places:
            if place == path and name not in owner and kind == "value":  # iteration or a hook has made it
                owner[name] = copy(state)
        for name, value in list(owner.items()):
            if name in _OTHERS:
                continue
            key, plain = f"{path}.{name}", _plain(value)
            wanted = changes.get(key, baseline.get(key) if plain is not None else None)
            if wanted is not None and not _same(plain, wanted):
                _assign(owner, name, value, wanted)


def objects_below(root: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Path and attributes of `root` and of what it is made of, in an order that every process shares."""
    waiting = [("", root, 0)]
    seen: set[int] = set()
    while waiting and len(seen) < _NUM_OBJECTS_MAX:
        path, owner, depth = waiting.pop(0)
        attributes = getattr(owner, "__dict__", None)
        if type(attributes) is not dict or id(owner) in seen or isinstance(owner, IterDataPipe):  # counts its iterators
            continue
        seen.add(id(owner))
        yield path, attributes
        if depth == _DEPTH_MAX:
            continue
        for name, value in list(attributes.items()):
            if name in _OTHERS:
                continue
            children = value if type(value) in (list, tuple) and len(value) <= _NUM_CHILDREN_MAX else (value,)
            for number, child in enumerate(children):
                if _is_part(child):
                    waiting.append((f"{path}.{name}[{number}]", child, depth + 1))


def _is_part(value: Any) -> bool:
    if isinstance(value, (Dataset, Sampler)):
        return True
    cls = type(value)
    iterable = hasattr(cls, "__iter__") or hasattr(cls, "__getitem__")
    return iterable and hasattr(value, "__dict__") and not cls.__module__.startswith(_FOREIGN)


def _plain(value: Any) -> tuple[str, Any] | None:
    """A plain value as something that can be packed and compared, None for any other."""
    cls = type(value)
    if cls in _SCALARS:
        return ("value", value)
    if cls in _CONTAINERS:
        items = value.items() if cls is dict else value
        if len(value) <= _NUM_ITEMS_MAX and all(_is_scalar(item, cls is dict) for item in items):
            return ("value", copy(value))
    elif cls is torch.Generator:
        return ("generator", value.get_state().numpy().tobytes())
    elif cls is torch.Tensor:
        if value.numel() <= _NUM_ITEMS_MAX and value.device.type == "cpu" and not value.requires_grad:
            return ("tensor", value.tolist())
    elif cls is random.Random:
        return ("random", value.getstate())
    elif cls is numpy.random.Generator:
        return ("numpy", pack(value.bit_generator.state))
    elif cls is numpy.random.RandomState:
        return ("legacy numpy", pack(value.get_state(legacy=False)))
    return None


def _is_scalar(item: Any, pair: bool) -> bool:
    return type(item[0]) in _SCALARS and type(item[1]) in _SCALARS if pair else type(item) in _SCALARS


def _same(one: tuple[str, Any] | None, other: tuple[str, Any]) -> bool:
    return one is not None and repr(one) == repr(other)  # repr tells 1 from 1.0 and from True


def _assign(owner: dict[str, Any], name: str, value: Any, wanted: tuple[str, Any]) -> None:
    kind, state = wanted
    if kind == "value":
        owner[name] = copy(state)
    elif kind == "generator" and type(value) is torch.Generator:
        value.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    elif kind == "tensor" and type(value) is torch.Tensor:
        value.copy_(torch.tensor(state, dtype=value.dtype))  # in place: workers may share it
    elif kind == "random" and type(value) is random.Random:
        value.setstate(state)
    elif kind == "numpy" and type(value) is numpy.random.Generator:
        value.bit_generator.state = unpack(state)
    elif kind == "legacy numpy" and type(value) is numpy.random.RandomState:
        value.set_state(unpack(state))
