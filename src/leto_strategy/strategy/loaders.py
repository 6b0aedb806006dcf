"""Training loaders that can be reopened at any batch, exactly.

A user's DataLoader keeps its identity and its type's behaviour; its class is exchanged for a subclass that
(1) remembers the random state at `iter()` and at the sampler's first draw, (2) captures it before each batch is
fetched, (3) can reopen an epoch behind its first k batches without loading them, and (4) seeds workers batch by batch,
so that random augmentation in a worker depends on the batch and not on what the worker did before. (4) is the one
documented difference to plain `ddp`; it concerns loaders with workers only.
"""

import random
import shutil
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)

from leto_strategy.errors import ResourceError, UnsupportedFeatureError
from leto_strategy.strategy.capture.packing import pack, unpack
from leto_strategy.strategy.capture.rng import STREAMS, RngState, capture_rng, fingerprints, restore_rng

_DRAWS_AT_START = (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler, DistributedSampler)
_SHARED_MEMORY_MINIMUM = 8 << 20
_MASK = (1 << 64) - 1


class _Numbered(list[Any]):
    """The indices of one batch with the batch's seed; a list to everybody else."""

    seed: int = 0

    def __reduce__(self) -> Any:
        return _numbered, (list(self), self.seed)


def _numbered(indices: list[Any], seed: int) -> _Numbered:
    batch = _Numbered(indices)
    batch.seed = seed
    return batch


def _mix(seed: int, number: int) -> int:
    """A well spread 64-bit seed (the finaliser of SplitMix64)."""
    value = (seed + (number + 1) * 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def _seed_worker(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    try:
        import numpy.random
    except ImportError:
        return
    numpy.random.seed(seed & 0xFFFFFFFF)


class _SeededDataset:
    """The user's dataset as a worker sees it: seeds before each batch, passes everything else through."""

    def __init__(self, dataset: Any) -> None:
        self.__dict__["_dataset"] = dataset

    def __getitems__(self, batch: _Numbered) -> Any:
        self._enter(batch.seed)
        dataset = self._dataset
        if getattr(dataset, "__getitems__", None):
            return dataset.__getitems__(list(batch))
        return [dataset[index] for index in batch]

    def __getitem__(self, item: Any) -> Any:
        if isinstance(item, _Numbered):  # a loader without automatic batching
            self._enter(item.seed)
            return self._dataset[item[0]]
        return self._dataset[item]

    def _enter(self, seed: int) -> None:
        info = get_worker_info()
        if info is not None:
            object.__setattr__(info, "dataset", self._dataset)  # what a worker sees is the user's own
        _seed_worker(seed)

    def __len__(self) -> int:
        return len(self._dataset)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.__dict__["_dataset"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._dataset, name, value)

    def __reduce__(self) -> Any:
        return _SeededDataset, (self._dataset,)


class _Draws:
    """The loader's index sampler: numbers batches, notes the random state at the first draw, skips when reopened."""

    def __init__(self, loader: Any, sampler: Any) -> None:
        self._loader, self._sampler = loader, sampler

    def __len__(self) -> int:
        return len(self._sampler)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_sampler"], name)

    def __iter__(self) -> Iterator[Any]:
        # Now, not at the first draw: a sampler may draw its order in `__iter__` itself, as it would in plain use.
        return self._draw(iter(self._sampler), _Watch(self._sampler))

    def _draw(self, source: Iterator[Any], watch: "_Watch") -> Iterator[Any]:
        loader = self._loader
        state: LoaderState = loader.leto
        number = state.skip
        if state.reopened and state.first_rng is not None:
            keep = capture_rng(state.generators)
            restore_rng(state.first_rng, state.generators)
            for _ in range(number):
                next(source)
            if number and loader.num_workers == 0:  # the caller has set the random state of the next fetch already
                restore_rng(keep, state.generators)
        else:
            state.first_rng = capture_rng(state.generators)
        state.reopened, state.skip = False, 0
        epoch_base = (state.iterations - 1) << 32
        for item in watch.follow(source):
            if loader.num_workers == 0:
                yield item
            else:
                yield _numbered(list(item) if loader._auto_collation else [item], _mix(state.seed, epoch_base + number))
            number += 1


class _Watch:
    """Refuses the one kind of sampler that can't be replayed: one that draws from a random stream while an epoch runs
    and shares that stream with somebody else.
    """

    def __init__(self, sampler: Any) -> None:
        inner = sampler
        while type(inner) is BatchSampler:
            inner = inner.sampler
        self._name = type(inner).__name__
        self._trusted = type(inner) in _DRAWS_AT_START or type(inner).__module__.startswith("lightning.")
        self._trusted = self._trusted or type(inner).__module__.startswith("pytorch_lightning.")

    def follow(self, source: Iterator[Any]) -> Iterator[Any]:
        if self._trusted:
            yield from source
            return
        after: tuple[Any, ...] | None = None
        while True:
            before = fingerprints()
            try:
                item = next(source)
            except StopIteration:
                return
            now = fingerprints()
            if after is not None:
                for stream, was, start, end in zip(STREAMS, after, before, now, strict=True):
                    if start != end and was != start:
                        raise UnsupportedFeatureError(
                            f"{self._name} draws from the global {stream} generator while the epoch runs, and so does"
                            " something else. Such an order can't be restored after a failure. Draw the whole order"
                            " at the start of __iter__, or give the sampler a generator of its own."
                        )
            after = now
            yield item


class LoaderState:
    """What Leto knows of one training loader."""

    def __init__(self, generators: list[torch.Generator]) -> None:
        self.generators = generators
        self.iter_rng: RngState | None = None
        self.first_rng: RngState | None = None
        self.before_fetch: Callable[[], None] = lambda: None
        self.delivered = 0
        self.iterations = 0
        self.seed = 0
        self.skip = 0
        self.reopened = False
        self.pending: dict[str, Any] | None = None
        self.packed: tuple[Any, bytes] | None = None

    def record(self) -> dict[str, Any]:
        """What is needed to fetch the batch that was delivered last once more."""
        if self.packed is None or self.packed[0] is not self.first_rng:
            self.packed = (self.first_rng, pack((self.iter_rng, self.first_rng)))
        return {
            "rng": self.packed[1],
            "batches": self.delivered - 1,
            "iterations": self.iterations,
            "seed": self.seed,
        }

    def reopen(self, record: dict[str, Any]) -> None:
        """Let the next `iter()` continue where `record` was taken."""
        self.pending = record


class _Fetcher:
    """Iterator over batches that says when one is about to be fetched."""

    def __init__(self, source: Iterator[Any], state: LoaderState) -> None:
        self._source, self._state = source, state

    def __iter__(self) -> "_Fetcher":
        return self

    def __next__(self) -> Any:
        self._state.before_fetch()
        batch = next(self._source)
        self._state.delivered += 1
        return batch

    def __len__(self) -> int:
        return len(self._source)  # type: ignore[arg-type]


@cache
def _resumable(base: Any) -> Any:
    """Subclass of a loader class with the same object layout, so that an object can change over to it."""

    class Resumable(base):  # type: ignore[misc]
        leto: LoaderState

        @property
        def _index_sampler(self) -> Any:
            return _Draws(self, super()._index_sampler)

        def __iter__(self) -> Iterator[Any]:
            state, loader = self.leto, self
            record, state.pending = state.pending, None
            now = capture_rng(state.generators)
            state.iter_rng, state.first_rng, state.skip, state.reopened = now, None, 0, False
            if record is None:
                if state.iterations == 0 or not getattr(loader, "persistent_workers", False):
                    state.seed = _seed_of(now)
                state.iterations += 1
                state.delivered = 0
            else:
                state.iter_rng, state.first_rng = unpack(record["rng"])
                restore_rng(state.iter_rng, state.generators)
                state.iterations, state.seed = record["iterations"], record["seed"]
                state.skip, state.delivered, state.reopened = record["batches"], record["batches"], True
            iterator = self._open()
            if record is not None:
                restore_rng(now, state.generators)
            return _Fetcher(iterator, state)

        def _open(self) -> Iterator[Any]:
            attributes = self.__dict__
            dataset = attributes["dataset"]
            if attributes["num_workers"] == 0:
                return super().__iter__()  # type: ignore[no-any-return]
            _require_shared_memory(attributes["num_workers"])
            attributes["dataset"] = _SeededDataset(dataset)
            try:
                return super().__iter__()  # type: ignore[no-any-return]
            finally:
                attributes["dataset"] = dataset

    Resumable.__name__, Resumable.__qualname__ = base.__name__, base.__qualname__
    Resumable.__module__ = base.__module__
    return Resumable


def _seed_of(rng: RngState) -> int:
    """A seed that follows from the random state without drawing from it."""
    words = rng[0][:64] + rng[0][-64:]
    seed = 0
    for k in range(0, len(words), 8):
        seed = _mix(seed ^ int.from_bytes(words[k : k + 8], "little"), k)
    return seed


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


def make_resumable(loader: Any) -> None:
    """Exchange the class of a user's training loader, once.

    Raises:
        UnsupportedFeatureError: The loader is of a kind whose position can't be restored exactly yet.
    """
    if hasattr(loader, "leto"):
        return
    cls = type(loader)
    if not isinstance(loader, DataLoader):
        raise UnsupportedFeatureError(
            f"strategy='leto' can't reopen a training loader of type {cls.__name__} yet;"
            " use torch.utils.data.DataLoader."
        )
    if cls.__module__.startswith("torchdata"):
        raise UnsupportedFeatureError(f"strategy='leto' does not support torchdata's {cls.__name__} for training yet.")
    if isinstance(loader.dataset, IterableDataset):
        raise UnsupportedFeatureError(
            f"strategy='leto' does not support an IterableDataset ({type(loader.dataset).__name__}) for training yet;"
            " use a map-style dataset."
        )
    if cls.__iter__ is not DataLoader.__iter__:
        raise UnsupportedFeatureError(
            f"{cls.__name__} overrides DataLoader.__iter__, so strategy='leto' can't reopen it at a batch."
        )
    loader.leto = LoaderState(generators_of(loader))
    loader.__class__ = _resumable(cls)  # type: ignore[arg-type]  # a type is hashable


def generators_of(loader: Any) -> list[torch.Generator]:
    """The random generators that a user gave a loader or its samplers."""
    sampler, batch_sampler = getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)
    found = [getattr(loader, "generator", None), getattr(sampler, "generator", None)]
    found += [
        getattr(batch_sampler, "generator", None),
        getattr(getattr(batch_sampler, "sampler", None), "generator", None),
    ]
    return list({id(g): g for g in found if isinstance(g, torch.Generator)}.values())
