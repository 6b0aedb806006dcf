"""Times what Leto does at each step for its records and words, by wrapping its functions in a running trainer.

Each part has its own time only: while a part that is called by another runs, the other's clock stands still. Nothing of
the product is replaced; the two readings of the clock that a wrapped call costs (about 0.3 µs) are part of what is
reported.
"""

import functools
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from leto_strategy.recovery.records import RecordRing
from leto_strategy.strategy import session
from leto_strategy.strategy.capture import snapshot
from leto_strategy.strategy.capture.checkpoints import CheckpointJournal
from leto_strategy.strategy.capture.kept import KeptState
from leto_strategy.strategy.capture.loggers import LoggerState
from leto_strategy.strategy.capture.loops import FitPosition
from leto_strategy.strategy.capture.metrics import MetricState
from leto_strategy.strategy.data.fit import FitData
from leto_strategy.strategy.session import FitSession
from leto_strategy.strategy.updaters.transactional import TransactionalUpdater
from leto_strategy.update.words import HostWords, StreamWords

RECORD_PARTS = ("start", "mid", "words")
"""start, mid: everything around the two records, START's capture before the fetch too. words: progress words. These
are all parts of a run with `parts=False`, and their sum is what records cost."""

OTHER_PARTS = ("update", "synchronise", "room")
"""What runs in between and is no record: the update but for its words; waiting for other ranks, and for a GPU to leave
the slot of a record."""


class RecordTimers:
    """Wraps the functions of this process.

    Args:
        parts: Time what the records are made of too, at the price of more readings of the clock.
    """

    def __init__(self, *, parts: bool) -> None:
        self._ns: dict[str, int] = defaultdict(int)
        self._bytes: dict[str, int] = {}
        self._stack: list[str] = []
        self._since = 0
        self._wrap(FitSession, "before_batch", "start")
        self._wrap(FitSession, "batch_fetched", "start")
        self._wrap(FitSession, "end_step", "mid")
        self._wrap(FitSession, "_finish", "update")
        self._wrap(HostWords, "publish", "words")
        self._wrap(StreamWords, "publish", "words")
        self._wrap(FitSession, "_synchronise", "synchronise")
        self._wrap(FitSession, "_make_room", "room")
        if parts:
            self._wrap_parts()

    def take(self) -> dict[str, int]:
        """Nanoseconds by part since the last call, and bytes of the records."""
        taken = dict(self._ns) | self._bytes
        self._ns.clear()
        return taken

    def _wrap_parts(self) -> None:
        self._wrap(snapshot.FitSnapshot, "capture", "{}.capture")
        self._wrap(FitPosition, "capture", "{}.capture.position")
        self._wrap(KeptState, "capture", "{}.capture.kept")
        self._wrap(MetricState, "capture", "{}.capture.metrics")
        self._wrap(LoggerState, "capture", "{}.capture.loggers")
        self._wrap(snapshot, "capture_rng", "{}.capture.rng")
        self._wrap(snapshot, "hyper_parameters", "{}.capture.groups")
        self._wrap(session, "pack_record", "{}.pack")
        self._wrap(FitData, "record", "{}.data")
        self._wrap(RecordRing, "write", "{}.write")
        self._wrap(CheckpointJournal, "enter_step", "{}.journal")
        self._wrap(TransactionalUpdater, "check_start", "{}.check")
        self._wrap(TransactionalUpdater, "start_part", "{}.updater")
        self._wrap(TransactionalUpdater, "mid_part", "{}.updater")
        write = RecordRing.write
        sizes = self._bytes

        def noting(ring: RecordRing, kind: Any, step: int, payload: bytes, stream: Any = None) -> None:
            sizes[f"bytes.{kind.name.lower()}"] = len(payload) + (0 if stream is None else stream.size_bytes)
            write(ring, kind, step, payload, stream)

        RecordRing.write = noting  # type: ignore[method-assign, assignment]

    def _wrap(self, owner: Any, name: str, part: str) -> None:
        """Time `owner.name` as `part`, in which {} stands for the record it is called for."""
        inner: Callable[..., Any] = getattr(owner, name)

        @functools.wraps(inner)
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._enter(part.format(self._record()) if "{" in part else part)
            try:
                return inner(*args, **kwargs)
            finally:
                self._leave()

        setattr(owner, name, timed)

    def _record(self) -> str:
        return next((part for part in reversed(self._stack) if part in ("start", "mid")), "other")

    def _enter(self, part: str) -> None:
        now = time.perf_counter_ns()
        if self._stack:
            self._ns[self._stack[-1]] += now - self._since
        self._stack.append(part)
        self._since = time.perf_counter_ns()

    def _leave(self) -> None:
        now = time.perf_counter_ns()
        self._ns[self._stack.pop()] += now - self._since
        self._since = time.perf_counter_ns()
