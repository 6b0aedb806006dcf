"""Loggers of a trainer that may not log yet: a shadow before its promotion, and every trainer on its way to its call.

In a trainer each logger is born waiting: an instance of a subclass of its class that drops what it is given, creates
nothing and keeps hyper-parameters in memory. `release` gives it its own class back. A stand-in for its experiment that
somebody has kept (`self.writer = self.logger.experiment`) forwards to the real experiment from then on.

Standard library only: it is installed while Lightning is being imported.
"""

import inspect
import os
import pickle
from collections.abc import Callable, Iterator
from functools import cache
from types import FunctionType, ModuleType
from typing import Any

from leto_strategy.config import trainer_identity

_LOGGING = ("log_metrics", "log_graph", "save", "finalize", "after_save_checkpoint", "_create_experiment")
_PACKAGES = ("lightning.pytorch.loggers", "pytorch_lightning.loggers")
_EXACT = {"csv_logs": "CSVLogger", "tensorboard": "TensorBoardLogger"}
_PENDING = "_leto_pending"


class StandIn:
    """Stands for a waiting logger's experiment or a part of it: takes everything, does nothing.

    Args:
        resolve: Returns the real object, None while the logger waits.
    """

    def __init__(self, resolve: Callable[[], Any]) -> None:
        object.__setattr__(self, "_leto_resolve", resolve)
        object.__setattr__(self, "_leto_hparams", {})

    def __getattr__(self, name: str) -> Any:
        real = self._leto_resolve()
        if real is not None:
            return getattr(real, name)
        if name.startswith("__"):
            raise AttributeError(name)

        def resolve() -> Any:
            owner = self._leto_resolve()
            return None if owner is None else getattr(owner, name)

        return StandIn(resolve)

    def __setattr__(self, name: str, value: Any) -> None:
        real = self._leto_resolve()
        if real is not None:
            setattr(real, name, value)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the real one, if there is one."""
        real = self._leto_resolve()
        return StandIn(lambda: None) if real is None else real(*args, **kwargs)

    def __getitem__(self, key: Any) -> Any:
        real = self._leto_resolve()
        return StandIn(lambda: None) if real is None else real[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        real = self._leto_resolve()
        if real is not None:
            real[key] = value

    def __len__(self) -> int:
        real = self._leto_resolve()
        return 0 if real is None else len(real)

    def __bool__(self) -> bool:
        return True

    def __iter__(self) -> Iterator[Any]:
        real = self._leto_resolve()
        return iter(()) if real is None else iter(real)

    def __enter__(self) -> Any:
        real = self._leto_resolve()
        return self if real is None else real.__enter__()

    def __exit__(self, *exception: Any) -> Any:
        real = self._leto_resolve()
        return None if real is None else real.__exit__(*exception)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise pickle.PicklingError("a logger's experiment can't be pickled")

    def log_hparams(self, params: dict[str, Any]) -> None:
        """What CSVLogger's experiment calls hyper-parameters; they are kept."""
        real = self._leto_resolve()
        if real is not None:
            real.log_hparams(params)
        else:
            self._leto_hparams.update(params)


def live_class(logger: Any) -> type:
    """The class of a logger once it no longer waits."""
    cls: type = type(logger)
    return getattr(cls, "_leto_live", cls)


def is_waiting(logger: Any) -> bool:
    """Whether a logger drops what it is given."""
    return live_class(logger) is not type(logger)


def exact_kind(cls: type) -> str | None:
    """Return "csv_logs" or "tensorboard" for these loggers of Lightning themselves, None for any other class."""
    package, _, module = cls.__module__.rpartition(".")
    return module if package in _PACKAGES and _EXACT.get(module) == cls.__name__ else None


def inherited_kind(cls: type) -> str | None:
    """Return the `exact_kind` of the class from which a logger's class has its `experiment`."""
    experiment = inspect.getattr_static(cls, "experiment", None)
    for base in cls.__mro__:
        if exact_kind(base) is not None and inspect.getattr_static(base, "experiment") is experiment:
            return exact_kind(base)
    return None


def hold(logger: Any) -> None:
    """Let a logger wait from now on."""
    if not is_waiting(logger):
        cls: Any = type(logger)
        logger.__class__ = _waiting_class(cls)


def release(logger: Any) -> dict[str, Any]:
    """Let a logger be what it is; returns the hyper-parameters that CSVLogger's experiment was given meanwhile."""
    logger.__class__ = live_class(logger)
    pending = logger.__dict__.pop(_PENDING, None)
    return {} if pending is None else dict(pending._leto_hparams)


def pending_hparams(logger: Any) -> dict[str, Any]:
    """Where a waiting CSVLogger keeps hyper-parameters."""
    hparams: dict[str, Any] = _experiment(logger)._leto_hparams
    return hparams


def install(module: ModuleType) -> None:
    """Let every logger of this process be born waiting.

    Args:
        module: `lightning.fabric.loggers.logger`, or that of the other distribution.
    """

    def __new__(cls: type, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
        return object.__new__(_newborn_class(cls) if _holding and cls.__name__ != "DummyLogger" else cls)

    module.Logger.__new__ = __new__


_holding = True


def stop_holding() -> None:
    """From its promotion on, a trainer's new loggers log."""
    global _holding
    _holding = False


def _experiment(logger: Any) -> Any:
    pending = logger.__dict__.get(_PENDING)
    if pending is None:
        pending = logger.__dict__[_PENDING] = StandIn(lambda: None if is_waiting(logger) else logger.experiment)
    return pending


def _dropping(name: str) -> Callable[..., Any]:
    def drop(self: Any, *args: Any, **kwargs: Any) -> Any:
        return None if is_waiting(self) else getattr(self, name)(*args, **kwargs)  # somebody kept the bound method

    return drop


def _fixed_version(logger: Any) -> Any:
    """The next free version as the user's process has found it: by now this job has made that directory."""
    identity, root = trainer_identity(), os.path.abspath(logger.root_dir)
    for start in identity.loggers if identity is not None else ():
        if start.get("root") == root:
            return start["version"]
    return live_class(logger)._get_next_version(logger)  # type: ignore[attr-defined]


@cache
def _waiting_class(cls: Any) -> type:
    members = _members(cls)
    if exact_kind(cls) is None:
        for name in dir(cls):
            if not name.startswith("_") and isinstance(inspect.getattr_static(cls, name), FunctionType):
                members[name] = _dropping(name)
    return type(cls.__name__, (cls,), members)


@cache
def _newborn_class(cls: Any) -> Any:
    """Waits too, but its constructor may call any method of its own that does not log."""
    if hasattr(cls, "_leto_live"):
        return cls

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        cls.__init__(self, *args, **kwargs)
        if type(self) is newborn:
            self.__class__ = _waiting_class(cls)

    newborn = type(cls.__name__, (cls,), {**_members(cls), "__init__": __init__})
    return newborn


def _members(cls: type) -> dict[str, Any]:
    members: dict[str, Any] = {
        "__slots__": (),
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        "_leto_live": cls,
        "experiment": property(_experiment),
    }
    members.update((name, _dropping(name)) for name in _LOGGING if hasattr(cls, name))
    if exact_kind(cls) is None:
        members["log_hyperparams"] = _dropping("log_hyperparams")
    if hasattr(cls, "_get_next_version"):
        members["_get_next_version"] = _fixed_version
    return members
