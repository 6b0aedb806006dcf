"""A loader's index sampler as its iterator sees it: batches are numbered, skipped when reopened, and watched."""

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from leto_strategy.errors import UnsupportedFeatureError
from leto_strategy.strategy.capture.rng import STREAMS, capture_rng, fingerprints, restore_rng
from leto_strategy.strategy.data.randomness import mix
from leto_strategy.strategy.data.states import LoaderState
from leto_strategy.strategy.data.workers import numbered

_DRAWS_AT_START = (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler, DistributedSampler)


class Draws:
    """Stands for the index sampler of a loader: numbers its batches, and skips some when it is reopened.

    Args:
        loader: The loader.
        sampler: Its index sampler.
    """

    def __init__(self, loader: Any, sampler: Any) -> None:
        self._loader, self.source = loader, sampler

    def __len__(self) -> int:
        return len(self.source)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["source"], name)

    def __iter__(self) -> Iterator[Any]:
        # Now, not at the first draw: a sampler may draw its order in `__iter__` itself, as it would in plain use.
        state: LoaderState = self._loader.leto
        state.about_to_draw()
        source = iter(self.source)
        if state.skips:
            return self._skip(source)
        return (_StatefulNumbers if _has_state(source) else _Numbers)(self._loader, source)

    def _skip(self, source: Iterator[Any]) -> Iterator[Any]:
        loader = self._loader
        state: LoaderState = loader.leto
        number = state.skip
        if state.reopened and state.first_rng is not None:
            keep, attributes = capture_rng(state.generators), state.attributes.changes()
            restore_rng(state.first_rng, state.generators)
            state.attributes.restore(state.first_attributes or {})
            for _ in range(number):
                next(source)
            if number and loader.num_workers == 0:  # the caller has set the state of the next fetch already
                restore_rng(keep, state.generators)
                state.attributes.restore(attributes)
        else:
            state.first_rng, state.first_attributes = capture_rng(state.generators), state.attributes.changes()
        state.reopened, state.skip = False, 0
        yield from _Numbers(loader, _Watch(self.source).follow(source), number)


class _Numbers:
    """The indices of one batch after another, with numbers where workers get them."""

    def __init__(self, loader: Any, source: Iterator[Any], number: int = 0) -> None:
        self._loader, self.source, self._number = loader, source, number

    def __iter__(self) -> "_Numbers":
        return self

    def __next__(self) -> Any:
        item, number = next(self.source), self._number
        self._number += 1
        loader = self._loader
        if loader.num_workers == 0:
            return item
        state: LoaderState = loader.leto
        return numbered(list(item) if loader._auto_collation else [item], mix(state.seed, state.base + number))


class _HasState:
    """The two methods by which torchdata recognises what has a state, on the class itself."""

    source: Any

    def state_dict(self) -> dict[str, Any]:
        return self.source.state_dict()  # type: ignore[no-any-return]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.source.load_state_dict(state)


class _StatefulNumbers(_HasState, _Numbers):
    """`_Numbers` of an iterator that has a state."""


class _StatefulDraws(_HasState, Draws):
    """`Draws` of a sampler that has a state."""


def _has_state(value: Any) -> bool:
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def draws(loader: Any, sampler: Any) -> Draws:
    """What a loader's iterator uses for its index sampler."""
    return (_StatefulDraws if _has_state(sampler) else Draws)(loader, sampler)


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


def generators_of(loader: Any) -> list[torch.Generator]:
    """The random generators that a user gave a loader, its samplers, or its dataset where this process uses it."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    owners = [loader, getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None)]
    found = [getattr(owner, "generator", None) for owner in owners]
    return list({id(g): g for g in found if isinstance(g, torch.Generator)}.values())
