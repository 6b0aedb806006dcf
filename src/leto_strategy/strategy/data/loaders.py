"""Makes a user's loader one that can be reopened at any batch.

A DataLoader keeps its identity and its type's behaviour; its class is exchanged for a subclass. Any other iterable is
wrapped. Batches over a map-style dataset are skipped in the sampler; everything else is iterated again.

Randomness in workers of a map-style loader is seeded batch by batch, so that it depends on the batch and not on what
the worker did before; what is iterated again draws from a stream of its own in the main process. These are the
documented differences to plain `ddp`.
"""

import shutil
from collections.abc import Iterator
from copy import copy
from functools import cache
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, IterDataPipe

from leto_strategy.errors import ResourceError, UnsupportedFeatureError
from leto_strategy.strategy.data import workers
from leto_strategy.strategy.data.draws import draws, generators_of
from leto_strategy.strategy.data.states import EvaluationState, LoaderState, ReplayedState, SkippingState

_SHARED_MEMORY_MINIMUM = 8 << 20


def resumable(loader: Any, index: int) -> Any:
    """A training loader that can be reopened at any batch: the user's own object where that is possible.

    Args:
        loader: A DataLoader or any iterable.
        index: Its number among the training loaders.

    Raises:
        UnsupportedFeatureError: The place of this loader can't be restored exactly.
    """
    if not isinstance(loader, DataLoader):
        return loader if isinstance(loader, _Iterable) else _wrap(loader, index)
    state = getattr(loader, "leto", None)
    if isinstance(state, (SkippingState, ReplayedState)):
        return loader
    _require_exact(loader)
    if state is not None:  # it is a validation loader, too: both need a place of their own
        loader = twin(loader)
    generators, iterable = generators_of(loader), isinstance(loader.dataset, IterableDataset)
    own_iteration = _base(type(loader)).__iter__ is not DataLoader.__iter__
    if not iterable and not own_iteration:
        return _exchange(loader, SkippingState(loader, index, generators, loader.generator))
    draws_here = own_iteration or loader.num_workers == 0
    return _exchange(loader, ReplayedState(loader, index, generators, loader.generator, draws_here=draws_here))


def evaluated(loader: Any, index: int) -> Any:
    """A validation loader whose workers' randomness does not depend on what they did before.

    Args:
        loader: A DataLoader or any iterable.
        index: Its number among the validation loaders.
    """
    if not isinstance(loader, DataLoader) or not loader.persistent_workers or loader.num_workers == 0:
        return loader
    state = getattr(loader, "leto", None)
    if isinstance(state, EvaluationState):
        return loader
    _require_exact(loader)
    if state is not None:
        loader = twin(loader)
    return _exchange(loader, EvaluationState(loader, index, generators_of(loader), loader.generator))


def state_of(loader: Any) -> LoaderState | None:
    """The state of an adopted loader, None for any other."""
    return getattr(loader, "leto", None)


def twin(loader: Any) -> Any:
    """The same loader as another object, with a place and workers of its own, to be adopted."""
    other = copy(loader)
    other.__dict__["_iterator"] = None
    del other.leto
    other.__class__ = _base(type(loader))
    return other


def _require_exact(loader: Any) -> None:
    """Raise for a DataLoader whose batches depend on what can't be repeated.

    Raises:
        UnsupportedFeatureError: See its message.
    """
    if loader.num_workers == 0:
        return
    if not getattr(loader, "in_order", True):
        raise UnsupportedFeatureError(
            "strategy='leto' does not support DataLoader(in_order=False): the order of batches depends on which"
            " worker is faster and can't be restored. Leave it out."
        )
    if loader.persistent_workers and isinstance(loader.dataset, IterDataPipe):
        raise UnsupportedFeatureError(
            f"strategy='leto' does not support persistent workers of a data pipe ({type(loader.dataset).__name__});"
            " use DataLoader(persistent_workers=False)."
        )


def _exchange(loader: Any, state: LoaderState) -> Any:
    loader.leto = state
    state._loader = loader
    loader.__class__ = _resumable_class(_base(type(loader)))
    return loader


def _base(cls: Any) -> Any:
    """The user's class of a loader; Lightning may have made a new object of an exchanged one."""
    return cls.leto_base if "leto_base" in vars(cls) else cls


@cache
def _resumable_class(base: Any) -> Any:
    """Subclass of a loader class with the same object layout, so that an object can change over to it."""

    class Resumable(base):  # type: ignore[misc]
        leto: LoaderState
        leto_base = base

        @property
        def _index_sampler(self) -> Any:
            sampler = super()._index_sampler
            return draws(self, sampler) if _numbers_batches(self) else sampler

        def __iter__(self) -> Iterator[Any]:
            return self.leto.open(super().__iter__)

        def _get_iterator(self) -> Any:
            attributes = self.__dict__
            if attributes["num_workers"] == 0:
                return super()._get_iterator()
            _require_shared_memory(attributes["num_workers"])
            kept = attributes["dataset"], attributes["worker_init_fn"]
            self.leto.start_workers()
            attributes["dataset"] = _for_workers(self)
            attributes["worker_init_fn"] = workers.WorkerStart(kept[1])
            try:
                return super()._get_iterator()
            finally:
                attributes["dataset"], attributes["worker_init_fn"] = kept
                self.leto.workers_started(drawn=_numbers_batches(self))

    Resumable.__name__, Resumable.__qualname__ = base.__name__, base.__qualname__
    Resumable.__module__ = base.__module__
    return Resumable


def _numbers_batches(loader: Any) -> bool:
    """Whether workers are seeded batch by batch, or batches are skipped."""
    if isinstance(loader.dataset, IterableDataset):
        return False
    return bool(loader.leto.skips or (loader.num_workers > 0 and loader.persistent_workers))


def _for_workers(loader: Any) -> Any:
    """A loader's dataset as its workers see it."""
    dataset = loader.dataset
    stateful = hasattr(dataset, "state_dict") and hasattr(dataset, "load_state_dict")
    if _numbers_batches(loader):
        return (workers.StatefulSeededDataset if stateful else workers.SeededDataset)(dataset)
    if not loader.persistent_workers:
        return dataset  # its workers begin anew with each iteration, and with the seed that they had
    cls = workers.StatefulReseededIterable if stateful else workers.ReseededIterable
    return cls(dataset, loader.leto.seed, loader.leto.iterations)


def _require_shared_memory(num_workers: int) -> None:
    """Workers hand batches over in /dev/shm; one that is too small kills them with SIGBUS."""
    try:
        free = shutil.disk_usage("/dev/shm").free
    except OSError:
        return
    if free < _SHARED_MEMORY_MINIMUM:
        raise ResourceError(
            f"/dev/shm has {free >> 10} KiB free; DataLoader(num_workers={num_workers}) needs at least"
            f" {_SHARED_MEMORY_MINIMUM >> 20} MiB there. Make it larger (docker run --shm-size=1g), or use"
            " num_workers=0."
        )


class _Iterable:
    """Any iterable as a training loader; everything but iteration is passed through to the user's object."""

    def __init__(self, source: Any, state: ReplayedState) -> None:
        self.__dict__.update(source=source, leto=state)

    def __iter__(self) -> Iterator[Any]:
        source, state = self.source, self.__dict__["leto"]
        opened: Iterator[Any] = state.open(lambda: iter(source))
        return opened

    def __len__(self) -> int:
        return len(self.source)

    def __bool__(self) -> bool:
        return True

    def __getattr__(self, name: str) -> Any:
        if name in ("source", "leto"):
            raise AttributeError(name)
        return getattr(self.source, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.source, name, value)


class _StatefulIterable(_Iterable):
    """One whose state Lightning puts into checkpoints: the methods must be found on the class."""

    def state_dict(self) -> dict[str, Any]:
        return self.source.state_dict()  # type: ignore[no-any-return]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.source.load_state_dict(state)


def _wrap(source: Any, index: int) -> Any:
    generators = generators_of(source)
    for value in list(getattr(source, "__dict__", {}).values()):
        if isinstance(value, DataLoader):
            _require_exact(value)
            if value.num_workers and value.persistent_workers:
                raise UnsupportedFeatureError(
                    f"strategy='leto' can't seed the persistent workers of the DataLoader inside"
                    f" {type(source).__name__}; use DataLoader(persistent_workers=False) there."
                )
            generators += generators_of(value)
        elif isinstance(value, torch.Generator):
            generators.append(value)
    generators = list({id(generator): generator for generator in generators}.values())
    once = not hasattr(source, "__dict__") and hasattr(type(source), "__next__")
    stateful = hasattr(source, "state_dict") and hasattr(source, "load_state_dict")
    state = ReplayedState(source, index, generators, None, draws_here=True, once=once)
    return (_StatefulIterable if stateful else _Iterable)(source, state)
