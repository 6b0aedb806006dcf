"""How many failures are too many: the pure rule that ends a job which recovery can't help."""

from collections import Counter
from dataclasses import dataclass

SAME_CAUSE_MAX = 3
"""A step that fails this often from the same internal cause, with no READY between, is poison."""


@dataclass(frozen=True, slots=True)
class Failure:
    """One failure as the budget sees it.

    Args:
        rank: The rank that failed first.
        step: Step it worked on, None where that is unknown (before it entered a step).
        cause: Stable name of the cause.
        internal: The cause may lie in the job itself, so that it may come back at the same step.
        text: A phrase for people, fit to follow "rank 1".
    """

    rank: int
    step: int | None
    cause: str
    internal: bool
    text: str


class Budget:
    """Counts failures; each new READY on all ranks refills it.

    Args:
        max_restarts: Failures in a row, of any cause, with no READY between, after which the job ends.
    """

    def __init__(self, *, max_restarts: int) -> None:
        assert max_restarts >= 1, max_restarts
        self._max_restarts = max_restarts
        self._ready_step = -1
        self._num_failures = 0
        self._same_cause: Counter[tuple[int | None, str]] = Counter()

    @property
    def num_failures(self) -> int:
        """Failures since the last READY."""
        return self._num_failures

    def spend(self, failure: Failure, *, ready_step: int = -1) -> str | None:
        """Count one failure.

        Args:
            failure: What happened.
            ready_step: Last step that is READY on all ranks, read behind the fence; -1 for none.

        Returns:
            None while the job may go on; else the reason to give up, a text for the user.
        """
        if ready_step > self._ready_step:
            self._ready_step = ready_step
            self._num_failures = 0
            self._same_cause.clear()
        self._num_failures += 1
        where = "before it entered a step" if failure.step is None else f"at step {failure.step}"
        if failure.internal:
            key = (failure.step, failure.cause)
            self._same_cause[key] += 1
            if self._same_cause[key] >= SAME_CAUSE_MAX:
                remedy = (
                    "Recovery can't help: look at the output of the trainers, or run the script with strategy='ddp'"
                    if failure.step is None
                    else "Recovery can't help: the cause lies in this step. Run its batch by itself without Leto "
                    "(strategy='ddp') to find it, or leave the batch out"
                )
                return (
                    f"training failed {self._same_cause[key]} times {where} from the same cause: rank {failure.rank} "
                    f"{failure.text}. {remedy}"
                )
        if self._num_failures > self._max_restarts:
            return (
                f"{self._num_failures} failures in a row without one finished gradient computation, the last one "
                f"{where}: rank {failure.rank} {failure.text}. Remove the cause, or allow more with "
                f"LetoStrategy(max_restarts=...)"
            )
        return None
