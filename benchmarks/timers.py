"""Times what Leto does at each step for its records and words, by wrapping its functions in a running trainer.

Each part has its own time only: while a part that is called by another runs, the other's clock stands still, and the
user's forward and backward, which run in the middle, stand for themselves. Nothing of the product is replaced; the two
readings of the clock that a wrapped call costs (about 0.3 µs) are part of what is reported.
"""

import functools
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from leto_strategy.progress import ProgressPage
from leto_strategy.recovery.records import RecordRing
from leto_strategy.strategy import session
from leto_strategy.strategy.capture import snapshot
from leto_strategy.strategy.capture.checkpoints import CheckpointJournal
from leto_strategy.strategy.capture.loggers import LoggerState
from leto_strategy.strategy.capture.loops import FitPosition
from leto_strategy.strategy.capture.metrics import MetricState
from leto_strategy.strategy.capture.user_state import UserState
from leto_strategy.strategy.session import FitSession
from leto_strategy.update.transaction import ResumableModelUpdater

RECORD_PARTS = ("start", "mid", "words")
"""start, mid: everything around the two records, START's capture before the fetch too. words: progress words. These
are all parts of a run with `parts=False`, and their sum is what records cost."""

OTHER_PARTS = ("user", "update", "synchronise")
"""What runs in between and is no record: forward and backward; the update but for its words; waiting for ranks."""


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
        self._wrap(FitSession, "before_fetch", "start")
        self._wrap(FitSession, "batch_fetched", "start")
        self._wrap_gradients()
        self._wrap(ProgressPage, "publish", "words")
        self._wrap(FitSession, "_synchronise", "synchronise")
        self._wrap(ResumableModelUpdater, "run", "update")
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
        self._wrap(UserState, "capture", "{}.capture.user")
        self._wrap(MetricState, "capture", "{}.capture.metrics")
        self._wrap(LoggerState, "capture", "{}.capture.loggers")
        self._wrap(snapshot, "capture_rng", "{}.capture.rng")
        self._wrap(snapshot, "hyper_parameters", "{}.capture.groups")
        self._wrap(session, "pack", "{}.pack")
        self._wrap(session, "pack_steps", "{}.pack_steps")
        self._wrap(RecordRing, "write", "{}.write")
        self._wrap(CheckpointJournal, "enter_step", "{}.journal")
        self._wrap(snapshot.FitSnapshot, "require_untouched_parameters", "{}.check_versions")
        self._wrap(session, "require_same_groups", "{}.check_groups")
        self._wrap(FitSession, "_adopt_gradients", "{}.adopt_gradients")
        write = RecordRing.write
        sizes = self._bytes

        def noting(ring: RecordRing, kind: Any, step: int, payload: bytes) -> None:
            sizes[f"bytes.{kind.name.lower()}"] = len(payload)
            write(ring, kind, step, payload)

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

    def _wrap_gradients(self) -> None:
        inner = FitSession._compute_gradients

        def timed(this: FitSession, run_closure: Callable[[], Any], closure: Any) -> Any:
            def user() -> Any:
                self._enter("user")
                try:
                    return run_closure()
                finally:
                    self._leave()

            self._enter("mid")
            try:
                return inner(this, user, closure)
            finally:
                self._leave()

        FitSession._compute_gradients = timed  # type: ignore[method-assign, assignment]

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
