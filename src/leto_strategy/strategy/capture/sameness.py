"""Tells cheaply whether a mutable value is still what it was: never "same" for one that changed.

Packing every attribute at every step to see whether it changed costs far more than comparing it with a shallow copy.
What is not understood here is never called the same.
"""

import re
from collections import deque
from datetime import date, timedelta
from enum import Enum
from operator import is_
from pathlib import PurePath
from typing import Any

import torch
from torch import Tensor

CONSTANTS = frozenset((int, float, complex, bool, str, bytes, type(None)))
"""Types whose values never change."""

_IMMUTABLE = (Enum, PurePath, range, type, date, timedelta, re.Pattern, torch.dtype, torch.device, torch.Size)
_SMALL_ELEMENTS = 4096
_LISTS = (list, tuple, deque)


def is_frozen(value: Any) -> bool:
    """Whether a value can't change: a constant, or a tuple or frozenset of such."""
    if type(value) in CONSTANTS or isinstance(value, _IMMUTABLE):
        return True
    return type(value) in (tuple, frozenset) and all(is_frozen(item) for item in value)


class Sight:
    """What a value looked like when it was seen; `same` compares."""

    __slots__ = ("_kind", "_parts", "_value")

    def __init__(self, value: Any) -> None:
        self._value = value
        kind = type(value)
        self._kind = kind
        self._parts: Any = None
        if kind in CONSTANTS:
            return
        if kind is Tensor:
            if value.numel() <= _SMALL_ELEMENTS and not value.is_inference():
                self._parts = (value._version, value.detach().clone() if value.ndim else value.item())
        elif kind in _LISTS:
            self._parts = list(value) if CONSTANTS.issuperset(map(type, value)) else [Sight(v) for v in value]
        elif isinstance(value, dict) and not getattr(value, "__dict__", None):
            self._parts = (list(value), [Sight(v) for v in value.values()])

    def same(self, value: Any) -> bool:
        """Whether `value` has not changed since."""
        kind = self._kind
        if type(value) is not kind:
            return False
        if kind in CONSTANTS:
            return value is self._value or bool(value == self._value and repr(value) == repr(self._value))
        if value is not self._value or self._parts is None:
            return False
        if kind is Tensor:
            version, copy = self._parts
            if value._version != version:
                return False
            # A NaN is never equal: then the value is packed again, which is right, too.
            return bool(value.item() == copy if not value.ndim else torch.equal(value.detach(), copy))
        if kind in _LISTS:
            return self._same_list(value)
        keys, sights = self._parts
        return len(value) == len(keys) and all(
            key is old and sight.same(item) for (key, item), old, sight in zip(value.items(), keys, sights, strict=True)
        )

    def _same_list(self, value: Any) -> bool:
        parts = self._parts
        if len(value) != len(parts):
            return False
        if not parts:
            return True
        if isinstance(parts[0], Sight):
            return all(sight.same(item) for sight, item in zip(parts, value, strict=True))
        return all(map(is_, value, parts))  # constants: the same object is the same value
