"""The record of one recovery: what failed, how it was answered, and how long each phase took."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(eq=False)
class RecoveryRecord:
    """Filled in as a recovery goes on. All times are CLOCK_MONOTONIC ns, 0 while unknown.

    Args:
        number: Counts the recoveries of a job, from 1.
        cause: Stable name of the cause.
        rank: The rank that failed first.
        step: Step the rank was in, None where unknown.
        fault_ns: Just before the fault happened, where the injector said so; else the time it was noticed.
        detected_ns: The supervisor noticed.
    """

    number: int
    cause: str
    rank: int
    step: int | None
    fault_ns: int
    detected_ns: int
    level: str = "cold"
    mode: str = "fresh"
    generation: int = -1
    steps_repeated: int = 0
    fenced_ns: int = 0
    decided_ns: int = 0
    promoted_ns: int = 0
    entered_ns: int = 0
    ready_ns: int = 0
    completed: bool = False
    pages_rebuilt: int = 0
    localise_us: int = 0
    rebuild_us: int = 0
    health: dict[str, Any] | None = None
    reported: bool = field(default=False, repr=False)

    def to_json(self) -> dict[str, Any]:
        """The record for events, for the user's process and for `leto status`.

        ``phases_ms``: detect = fault to notice; reap = the fence; localise = reading words and records, and the
        decision; rebuild = lowering the words and waiting for trainers at their gate; restore = promotion until the
        last rank entered its first new forward; first_step = from there to its READY on all ranks. A phase that was
        not reached, or not seen, is None. ``total_ms`` = fault to the last rank's new forward. ``health``: of each GPU
        before and after the failure, by name; None on the CPU. ``pages``: lost memory pages that were rebuilt on all
        ranks, and the longest time that one rank took to find and to rebuild them, within "restore".
        """
        phases = {
            "detect": _ms(self.fault_ns, self.detected_ns),
            "reap": _ms(self.detected_ns, self.fenced_ns),
            "localise": _ms(self.fenced_ns, self.decided_ns),
            "rebuild": _ms(self.decided_ns, self.promoted_ns),
            "restore": _ms(self.promoted_ns, self.entered_ns),
            "first_step": _ms(self.entered_ns, self.ready_ns),
        }
        return {
            "number": self.number,
            "cause": self.cause,
            "rank": self.rank,
            "step": self.step,
            "level": self.level,
            "mode": self.mode,
            "generation": self.generation,
            "phases_ms": phases,
            "total_ms": _ms(self.fault_ns, self.entered_ns),
            "steps_repeated": self.steps_repeated,
            "completed": self.completed,
            "pages": {
                "rebuilt": self.pages_rebuilt,
                "localise_ms": self.localise_us / 1000,
                "rebuild_ms": self.rebuild_us / 1000,
            },
            "health": self.health,
        }


def _ms(begin_ns: int, end_ns: int) -> float | None:
    return round((end_ns - begin_ns) / 1e6, 3) if begin_ns and end_ns else None
