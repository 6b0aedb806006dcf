"""Where the iteration of one loader stands, and how it is begun and begun again."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch.utils.data import IterableDataset

from leto_strategy.errors import StateChangedError
from leto_strategy.strategy.capture.packing import pack, unpack
from leto_strategy.strategy.capture.rng import RngState, capture_rng, restore_rng
from leto_strategy.strategy.data.attributes import AttributeWatch
from leto_strategy.strategy.data.digests import add_batch
from leto_strategy.strategy.data.randomness import OwnStream, mix, seed_of

Opener = Callable[[], Iterator[Any]]


class LoaderState:
    """What Leto knows of one loader.

    Args:
        loader: The loader, or another iterable.
        index: Its number among the loaders of its kind: loaders that begin alike draw from different streams.
        generators: The user's generators that its iteration may draw from.
        seed_generator: The one that decides about its workers' seeds; None: the global one.

    Attributes:
        skips: Reopened by skipping in the sampler, not by fetching again.
        attributes: Those of the loader that have changed since it was adopted.
        beat: Called for each batch that is fetched again: this trainer lives.
    """

    skips = False

    def __init__(
        self, loader: Any, index: int, generators: list[torch.Generator], seed_generator: torch.Generator | None
    ) -> None:
        self._loader, self._index, self.generators = loader, index, generators
        self._seed_generator = seed_generator
        self._persistent = bool(getattr(loader, "persistent_workers", False))
        self.iter_rng: RngState | None = None
        self.first_rng: RngState | None = None
        self.workers_rng: RngState | None = None
        self.attributes = AttributeWatch(loader)
        self._attributes: dict[str, Any] = {}
        self._workers_attributes: dict[str, Any] = {}
        self.first_attributes: dict[str, Any] | None = None
        self.delivered = 0
        self.iterations = 0
        self.seed = 0
        self.skip = 0
        self.reopened = False
        self._pending: dict[str, Any] | None = None
        self._packed: tuple[Any, Any, bytes] | None = None
        self._redraw: tuple[RngState, dict[str, Any]] | None = None
        self._num_draws = 0
        self._stale = False
        self.beat: Callable[[], None] = lambda: None

    @property
    def base(self) -> int:
        """Number of the first batch of this iteration, over all iterations."""
        return (self.iterations - 1) << 32

    def record(self) -> dict[str, Any]:
        """What is needed to fetch the next batch in another process."""
        first = (self.first_rng, self.first_attributes)
        packed = self._packed
        if packed is None or packed[0] is not self.iter_rng or packed[1] is not first[0] or self._stale:
            start = (self.iter_rng, self._attributes, *first, self.workers_rng, self._workers_attributes)
            packed = self._packed = (self.iter_rng, first[0], pack(start))
            self._stale = False
        return {"start": packed[2], "batches": self.delivered, "iterations": self.iterations, "seed": self.seed}

    def record_ahead(self) -> dict[str, Any]:
        """What is known of batches that were fetched ahead of the step that is recorded."""
        return {}

    def reopen(self, record: dict[str, Any]) -> None:
        """Let the next `iter()` continue where `record` was taken."""
        if record["iterations"]:
            self._pending = record

    def begin(self, now: RngState) -> None:
        """A new iteration begins."""
        self.iter_rng, self.first_rng, self.skip, self.reopened = now, None, 0, False
        self._attributes, self.first_attributes = self.attributes.changes(), None
        if self.iterations == 0 or not self._persistent:
            seed = seed_of(now, self._seed_generator)
            self.seed = mix(seed, self._index) if self._index else seed
        self.iterations += 1
        self.delivered = 0

    def begin_again(self, record: dict[str, Any]) -> None:
        """The recorded iteration begins once more, in another process."""
        start = unpack(record["start"])
        self.iter_rng, self._attributes, self.first_rng, self.first_attributes = start[:4]
        self.workers_rng, self._workers_attributes = start[4:]
        assert self.iter_rng is not None
        restore_rng(self.iter_rng, self.generators)
        self.attributes.restore(self._attributes)
        self.iterations, self.seed = record["iterations"], record["seed"]

    def open(self, source: Opener) -> Iterator[Any]:
        """What `iter(loader)` returns, where `source()` is what it would be."""
        raise NotImplementedError

    # Workers that live on from one iteration to the next.

    def start_workers(self) -> None:
        """Worker processes are about to be started.

        Their seed is drawn, and the dataset copied, when they are started. Where persistent ones were started in an
        earlier iteration than the one that is begun again, both are as they were at that time; the sampler draws from
        today's random state.
        """
        now = capture_rng(self.generators)
        if not self._persistent:
            return
        if self.workers_rng is None or self.iterations <= 1:
            self.workers_rng, self._workers_attributes, self._stale = now, self.attributes.changes(), True
            return
        self._redraw, self._num_draws = (now, self.attributes.changes()), 0
        restore_rng(self.workers_rng, self.generators)
        self.attributes.restore(self._workers_attributes)

    def about_to_draw(self) -> None:
        """The sampler's order is about to be asked for: twice while workers are started, the second one counts."""
        if self._redraw is not None:
            self._num_draws += 1
            if self._num_draws == 2:
                rng, attributes = self._redraw
                restore_rng(rng, self.generators)
                self.attributes.restore(attributes)

    def workers_started(self, drawn: bool) -> None:
        """Workers run.

        Args:
            drawn: The sampler was asked for its order.
        """
        redraw, self._redraw = self._redraw, None
        if redraw is not None and not drawn:
            rng, attributes = redraw
            restore_rng(rng, self.generators)
            self.attributes.restore(attributes)


class SkippingState(LoaderState):
    """Of a loader over a map-style dataset: batches are skipped in its sampler, without loading them."""

    skips = True

    def open(self, source: Opener) -> Iterator[Any]:
        """See `LoaderState.open`."""
        record, self._pending = self._pending, None
        now = capture_rng(self.generators)
        if record is None:
            self.begin(now)
            return _Counter(source(), self)
        self.begin_again(record)
        self.skip, self.delivered, self.reopened = record["batches"], record["batches"], True
        iterator = source()
        restore_rng(now, self.generators)
        return _Counter(iterator, self)


class ReplayedState(LoaderState):
    """Of an iterable whose place can't be set: it is iterated again from the beginning of the iteration.

    So that this leads to the same place, each fetch draws from a stream of its own, which follows from the random state
    at the iteration's beginning and the number of the batch.

    Args:
        loader: See `LoaderState`.
        index: See `LoaderState`.
        generators: See `LoaderState`.
        seed_generator: See `LoaderState`.
        draws_here: Code of the user's may draw in this process while a batch is fetched.
        once: It is an iterator: what was consumed never comes again, in no iteration.
    """

    def __init__(
        self,
        loader: Any,
        index: int,
        generators: list[torch.Generator],
        seed_generator: torch.Generator | None,
        *,
        draws_here: bool,
        once: bool = False,
    ) -> None:
        super().__init__(loader, index, generators, seed_generator)
        self._draws_here, self._once = draws_here, once
        self._digest = 0
        self._expected: tuple[int, int] | None = None

    def record(self) -> dict[str, Any]:
        """See `LoaderState.record`; with a digest of the batches of this iteration."""
        return {**super().record(), "digest": self._digest}

    def record_ahead(self) -> dict[str, Any]:
        """See `LoaderState.record_ahead`."""
        return {"ahead": (self.delivered, self._digest)}

    def begin(self, now: RngState) -> None:
        """A new iteration begins."""
        delivered, seed, iterations = self.delivered, self.seed, self.iterations
        super().begin(now)
        if self._once and iterations:
            self.delivered, self.seed, self.iterations = delivered, seed, iterations
        else:
            self._digest = 0

    def open(self, source: Opener) -> Iterator[Any]:
        """See `LoaderState.open`."""
        record, self._pending = self._pending, None
        now = capture_rng(self.generators)
        if record is None:
            self.begin(now)
            return _Replayer(source(), self)
        first_attributes = unpack(record["start"])[3]
        self.begin_again(record)
        self.delivered = self._digest = 0
        iterator = _Replayer(source(), self)
        if first_attributes is not None:
            self.attributes.restore(first_attributes)
        for number in range(record["batches"]):
            self.beat()
            if next(iterator, _END) is _END:
                raise StateChangedError(
                    f"A training loader ({type(self._loader).__name__}) gave {record['batches']} batches before a"
                    f" failure and only {number} when it was iterated again. With strategy='leto' data must come out"
                    " the same each time the script runs: seed what is random, and keep no state in files."
                )
        self._require(record["digest"])
        self._expected = record.get("ahead")
        restore_rng(now, self.generators)
        return iterator

    def _require(self, digest: int) -> None:
        """The batches of this iteration must be those of before the failure."""
        if self._digest != digest:
            raise StateChangedError(
                f"A training loader ({type(self._loader).__name__}) gave other batches when it was iterated again after"
                " a failure than before. With strategy='leto' data must not follow from weights or other objects that"
                " training changes, as experience in reinforcement learning does. Use a map-style dataset that does"
                " not change during an epoch, and seed what is random."
            )

    def price(self) -> str:
        """What the user should know."""
        dataset = getattr(self._loader, "dataset", None)
        what = dataset if isinstance(dataset, IterableDataset) else self._loader
        return (
            f"strategy='leto' can't set the place of {type(what).__name__}: after a failure it is iterated again from"
            " the beginning of its epoch, which takes as long as loading these batches did. A DataLoader over a"
            " map-style dataset skips them."
        )

    def fetch(self, source: Iterator[Any]) -> Any:
        """The next batch."""
        if self.delivered == 0 and self.first_attributes is None:
            # A generator function runs its first lines now: it sees what was set after `iter()`.
            self.first_attributes, self._stale = self.attributes.changes(), True
        with OwnStream(mix(self.seed, self.base + self.delivered)) if self._draws_here else nullcontext():
            batch = next(source)
        self.delivered += 1
        self._digest = add_batch(self._digest, batch)
        if self._expected is not None and self.delivered >= self._expected[0]:
            (_, digest), self._expected = self._expected, None
            self._require(digest)
        return batch


class EvaluationState(LoaderState):
    """Of a validation loader with persistent workers: a validation always begins at its first batch."""

    def open(self, source: Opener) -> Iterator[Any]:
        """See `LoaderState.open`."""
        record, self._pending = self._pending, None
        if record is not None:
            self.workers_rng, self._workers_attributes = unpack(record["start"])[4:]
            self.iterations, self.seed = record["iterations"], record["seed"]
        self.begin(capture_rng(self.generators))
        return source()


_END = object()


class _Counter:
    """Iterator that counts batches."""

    def __init__(self, source: Iterator[Any], state: LoaderState) -> None:
        self._source, self._state = source, state

    def __iter__(self) -> "_Counter":
        return self

    def __next__(self) -> Any:
        batch = next(self._source)
        self._state.delivered += 1
        return batch


class _Replayer:
    """Iterator whose fetches can be repeated in another process."""

    def __init__(self, source: Iterator[Any], state: ReplayedState) -> None:
        self._source, self._state = source, state

    def __iter__(self) -> "_Replayer":
        return self

    def __next__(self) -> Any:
        return self._state.fetch(self._source)
