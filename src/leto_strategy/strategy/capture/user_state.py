"""Plain attributes of module, datamodule and callbacks: what users keep between steps (`self.outputs.append(...)`).

An attribute is recorded when it differs from its value after setup. What changes and can't be pickled is named once.
Watching a large mutable attribute costs a comparison at every step and its packing at every change; that is said once.
"""

import io
import pickle
import types
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from operator import is_, itemgetter
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler

from leto_strategy.strategy.capture.packing import ModuleNames, pack, unpack
from leto_strategy.strategy.capture.sameness import CONSTANTS, Sight, is_frozen

_MODULE_INTERNALS = frozenset(vars(nn.Module())) | {
    "_trainer", "_fabric", "_fabric_optimizers", "_dtype", "_device", "_jit_is_scripting", "_log_hyperparams",
    "_automatic_optimization", "_strict_loading", "_example_input_array", "_current_fx_name", "_metric_attributes",
    "_param_requires_grad_state", "_device_mesh", "_compiler_ctx", "trainer", "prepare_data_per_node",
}  # fmt: skip
_OF_SAVED_CONFIG = frozenset({"parser", "config", "already_saved", "save_to_log_dir", "overwrite"})
_OPAQUE = (
    nn.Module, nn.Parameter, types.ModuleType, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler,
    DataLoader, Dataset, Sampler,
)  # fmt: skip
_LARGE_BYTES = 1 << 20


class _Absent:
    """Marks an attribute that was not there."""


class _Packed:
    """An attribute that was packed on its own."""

    __slots__ = ("data",)

    def __init__(self, data: bytes) -> None:
        self.data = data

    def __reduce__(self) -> Any:
        return _Packed, (self.data,)


_SAME: Any = object()
"""An attribute that is as setup left it: nothing to record."""


class _Attribute:
    """One attribute of one object: what it was after setup, and what was seen last.

    `settled`: while the very same object is there, nothing can have changed.
    """

    __slots__ = ("baseline", "change", "data", "last", "name", "settled", "sight")

    def __init__(self, name: str) -> None:
        self.name = name
        self.baseline: Any = _Absent
        self.data: bytes | None = None  # of the baseline, where it can be packed and may change
        self.last: Any = _Absent
        self.change: Any = _SAME
        self.settled = False
        self.sight: Sight | None = None


class Owner:
    """An object whose attributes are watched."""

    def __init__(self, name: str, owner: Any) -> None:
        self.name, self.owner, self.attributes = name, owner, owner.__dict__
        self.internal = _internals(owner)
        self.known: dict[str, _Attribute] = {}
        self.present: list[_Attribute] = []
        self.absent: list[_Attribute] = []
        self.size = 0
        self.recorded: dict[str, Any] | None = None  # what `changes` has said, while it holds
        self._values: Callable[[dict[str, Any]], tuple[Any, ...]] = lambda _: ()
        self._last: tuple[Any, ...] = ()
        self.unsettled: list[_Attribute] = []

    def list_attributes(self) -> None:
        """Look which attributes there are; needed only when one has come or gone."""
        self.size, self._last, self.recorded = len(self.attributes), (), None
        names = sorted(self.attributes.keys() - self.internal)
        for name in names:
            if name not in self.known:
                self.known[name] = _Attribute(name)
        self.present = [self.known[name] for name in names]
        self.absent = [a for a in self.known.values() if a.name not in self.attributes and a.baseline is not _Absent]
        self._values = itemgetter(*names) if len(names) > 1 else lambda attributes: tuple(attributes[n] for n in names)

    def exchanged(self) -> list[_Attribute]:
        """Attributes that may have changed: another object is there, or one that can change inside."""
        if len(self.attributes) != self.size:
            self.list_attributes()
        try:
            values = self._values(self.attributes)
        except KeyError:
            self.list_attributes()
            values = self._values(self.attributes)
        if len(values) == len(self._last) and all(map(is_, values, self._last)):
            return self.unsettled
        self._last = values
        return [a for a, value in zip(self.present, values, strict=True) if value is not a.last or not a.settled]

    def changes(self) -> dict[str, Any]:
        """What is to be recorded of it."""
        changes = {attribute.name: attribute.change for attribute in self.present if attribute.change is not _SAME}
        changes.update((attribute.name, _Absent) for attribute in self.absent)
        return changes

    def settle(self) -> None:
        """After all exchanged attributes were looked at: which need a look at every step."""
        self.unsettled = [a for a in self.present if not a.settled]


def _internals(owner: Any) -> frozenset[str]:
    """Attributes that are not the user's."""
    if isinstance(owner, nn.Module):
        return _MODULE_INTERNALS
    if any(cls.__name__ == "SaveConfigCallback" for cls in type(owner).__mro__):
        return _OF_SAVED_CONFIG
    return frozenset()


class UserState:
    """Captures and restores the attributes of a set of objects.

    Args:
        objects: Name and object, in an order that every generation shares.
        skip: More types whose instances are held by reference only and never recorded (Trainer, loggers ...).
        names: Modules that every trainer has: an attribute may be one, or hold one.
        quiet: Say nothing of attributes that can't be recorded.
    """

    def __init__(
        self,
        objects: Iterable[tuple[str, Any]],
        *,
        skip: tuple[type, ...],
        names: ModuleNames | None = None,
        quiet: bool = False,
    ) -> None:
        self._names = ModuleNames() if names is None else names
        self._quiet = quiet
        self._forbidden = skip + _OPAQUE  # neither as an attribute nor inside one
        self._forbidden_in_modules = skip + _OPAQUE[2:]
        self._skip = (*self._forbidden, types.FunctionType, types.MethodType)
        self._said: set[tuple[str, str]] = set()
        self._owners = [Owner(name, owner) for name, owner in objects]
        for owner in self._owners:
            owner.list_attributes()
            for attribute in owner.present:
                self._freeze(attribute, owner.attributes[attribute.name])

    def _watched(self, value: Any) -> bool:
        return not isinstance(value, self._skip) and not type(value).__module__.startswith("fsspec")

    def _freeze(self, attribute: _Attribute, value: Any) -> None:
        """Take a value as what setup or the start hooks give this attribute in every trainer."""
        attribute.baseline = attribute.last = value
        attribute.change = _SAME
        attribute.data = None
        if self._watched(value) and not is_frozen(value):
            attribute.data = self._bytes(value)
        attribute.settled = attribute.data is None
        attribute.sight = None

    def _bytes(self, value: Any) -> bytes | None:
        try:
            return pack(value, forbidden=self._forbidden, names=self._names)
        except Exception:  # a user's object may raise anything
            return None

    def accept_start_hooks(self) -> None:
        """Take what the start hooks made and can't be packed (open files, clients) as given: they make it anew."""
        for owner in self._owners:
            owner.list_attributes()
            for attribute in owner.present:
                value = owner.attributes[attribute.name]
                if value is attribute.last or is_frozen(value):
                    continue
                if not self._watched(value) or self._bytes(value) is None:
                    self._freeze(attribute, value)
                    if isinstance(value, Iterator) and not isinstance(value, io.IOBase):
                        self._say(
                            (owner.name, attribute.name),
                            f"The attribute {attribute.name!r} of {owner.name} is an iterator, whose place Leto can't"
                            " carry over a failure: after a recovery it begins anew. Keep how far you have come in a"
                            " number beside it.",
                        )

    def capture(self) -> list[dict[str, Any]]:
        """Changed attributes of each object: constants as they are, others packed; removed ones as `_Absent`."""
        captured = []
        for owner in self._owners:
            exchanged = owner.exchanged()
            if exchanged:
                attributes = owner.attributes
                looked = [self._look(owner.name, attribute, attributes[attribute.name]) for attribute in exchanged]
                if True in looked:
                    owner.recorded = None
                    owner.settle()
            if owner.recorded is None:
                owner.recorded = owner.changes()
            captured.append(owner.recorded)
        return captured

    def _look(self, owner: str, attribute: _Attribute, value: Any) -> bool:
        """Find out what is to be recorded of an attribute that may have changed; False: what was recorded before."""
        sight = attribute.sight
        if sight is not None and value is attribute.last and sight.same(value):
            return False
        attribute.last, attribute.sight = value, None
        attribute.settled = True
        before = attribute.baseline
        if value is before and attribute.data is None:
            attribute.change = _SAME
        elif type(value) in CONSTANTS:
            same = type(value) is type(before) and repr(value) == repr(before)  # repr tells 0.0 from -0.0
            attribute.change = _SAME if same else value
        elif isinstance(value, nn.Module):
            self._look_at_module(owner, attribute, value)
        elif isinstance(value, (types.FunctionType, types.MethodType)):
            data = None if value == before else self._pack(owner, attribute.name, value)
            attribute.change = _SAME if data is None else _Packed(data)
        elif not self._watched(value):
            attribute.change = _SAME
        else:
            data = self._pack(owner, attribute.name, value)
            attribute.change = _SAME if data is None or data == attribute.data else _Packed(data)
            if data is not None and not is_frozen(value):
                attribute.settled, attribute.sight = False, Sight(value)
        return True

    def _look_at_module(self, owner: str, attribute: _Attribute, value: nn.Module) -> None:
        """Another module than after setup: one that every trainer has, or one that was made meanwhile."""
        known = self._names.name_of(value) is not None
        if known and value is attribute.baseline:
            attribute.change = _SAME
            return
        data = self._pack(owner, attribute.name, value, forbidden=self._forbidden_in_modules)
        attribute.change = _SAME if data is None else _Packed(data)
        attribute.settled = known or data is None

    def _pack(
        self, owner_name: str, name: str, value: Any, *, forbidden: tuple[type, ...] | None = None
    ) -> bytes | None:
        try:
            data = pack(value, forbidden=self._forbidden if forbidden is None else forbidden, names=self._names)
        except Exception as error:
            self._say(
                (owner_name, name),
                f"Leto can't carry the attribute {name!r} of {owner_name} over a failure ({error}); after a recovery it"
                " has the value that setup gives it.",
            )
            return None
        if len(data) > _LARGE_BYTES:
            self._say(
                (owner_name, name),
                f"The attribute {name!r} of {owner_name} has {len(data) >> 10} KiB, which Leto compares at every step"
                " and packs when it changes. Keep it in a Dataset, a buffer or a tuple to avoid that.",
            )
        return data

    def _say(self, key: tuple[str, str], message: str) -> None:
        if key not in self._said and not self._quiet:
            self._said.add(key)
            warnings.warn(message, stacklevel=2)

    def restore(self, captured: list[dict[str, Any]]) -> None:
        """Give every attribute the value it had at the capture."""
        for owner, changes in zip(self._owners, captured, strict=True):
            attributes = owner.attributes
            _assign(attributes, changes, self._names)
            owner.list_attributes()
            for attribute in owner.known.values():
                name, before = attribute.name, attribute.baseline
                if name in changes:
                    continue
                if before is _Absent:
                    if name in attributes and self._watched(attributes[name]):
                        del attributes[name]
                elif attribute.data is not None:
                    # What has not changed is left alone: another object may hold it, too.
                    if name not in attributes or self._bytes(attributes[name]) != attribute.data:
                        attributes[name] = unpack(attribute.data, self._names)
                elif is_frozen(before) and self._watched(attributes.get(name)):
                    attributes[name] = before
            owner.list_attributes()


def user_objects(trainer: Any) -> list[tuple[str, Any]]:
    """Module, datamodule and callbacks with their names, in an order that every process shares."""
    objects: list[tuple[str, Any]] = [("the LightningModule", trainer.lightning_module)]
    if trainer.datamodule is not None:
        objects.append(("the LightningDataModule", trainer.datamodule))
    bar = trainer.progress_bar_callback  # draws only: it starts anew in every process
    return objects + [(type(callback).__name__, callback) for callback in trainer.callbacks if callback is not bar]


def is_internal(owner: Any, name: str) -> bool:
    """Whether an attribute is torch's or Lightning's, not the user's."""
    return isinstance(owner, nn.Module) and name in _MODULE_INTERNALS


def assign_all(objects: Iterable[tuple[str, Any]], captured: list[dict[str, Any]], names: ModuleNames) -> None:
    """Set captured attributes on objects of another process and leave all others as they are."""
    for (_, owner), changes in zip(objects, captured, strict=False):  # a callback may have come in a trainer's setup
        for name, value in changes.items():
            with suppress(pickle.UnpicklingError):  # holds a module that only trainers have made
                _assign(owner.__dict__, {name: value}, names)


def _assign(attributes: dict[str, Any], changes: dict[str, Any], names: ModuleNames) -> None:
    for name, value in changes.items():
        if value is _Absent:
            attributes.pop(name, None)
        else:
            attributes[name] = unpack(value.data, names) if isinstance(value, _Packed) else value
