"""Hang detection: a pure rule over what the trainers' progress pages say, with the time handed in.

Each activity has a limit of its own: ten times the longest time seen between two heartbeats in it, at least 30 s, and
30 min before it was seen once. A user's `hang_timeout` replaces it. The caller's clock stands still while the job is
suspended.
"""

from dataclasses import dataclass

from leto_strategy.progress import Activity

LIMIT_SECONDS_MIN = 30.0
LIMIT_SECONDS_FIRST = 30 * 60.0
LIMIT_FACTOR = 10.0


@dataclass(frozen=True, slots=True)
class Hang:
    """A trainer without progress.

    Args:
        rank: Its rank: the one that stopped first, where all have stopped because one did.
        activity: What it was busy with.
        seconds: Since its last heartbeat.
        limit_seconds: What was allowed.
    """

    rank: int
    activity: Activity
    seconds: float
    limit_seconds: float


@dataclass(slots=True)
class _Seen:
    heartbeat: int
    activity: Activity
    since: float


class Watchdog:
    """Remembers the longest times of a whole job, and where each rank of the present generation is.

    Args:
        hang_timeout: Limit in seconds for all activities of a promoted trainer; None: the rule above.
    """

    def __init__(self, *, hang_timeout: float | None = None) -> None:
        self._hang_timeout = hang_timeout
        self._longest: dict[Activity, float] = {}
        self._longest_start: float | None = None
        self._ranks: dict[int, _Seen] = {}

    def limit(self, activity: Activity) -> float:
        """Seconds without a heartbeat after which this activity counts as a hang."""
        if self._hang_timeout is not None:
            return self._hang_timeout
        return self._limit(self._longest.get(activity))

    def start_limit(self) -> float:
        """Seconds from a generation's start after which its trainers must be at their gate."""
        return self._limit(self._longest_start)

    @staticmethod
    def _limit(longest: float | None) -> float:
        if longest is None:
            return LIMIT_SECONDS_FIRST
        return max(LIMIT_SECONDS_MIN, LIMIT_FACTOR * longest)

    def restart(self) -> None:
        """A new generation begins: forget where the ranks were, keep how long things took."""
        self._ranks.clear()

    def note_start(self, seconds: float) -> None:
        """A generation took so long from its start to its gate."""
        self._longest_start = max(seconds, self._longest_start or 0.0)

    def observe(self, rank: int, *, heartbeat: int, activity: Activity, debugged: bool, now: float) -> None:
        """Take in one look at a rank.

        Args:
            rank: The rank.
            heartbeat: Its counter.
            activity: What it is busy with.
            debugged: A debugger holds it: its time does not count.
            now: Seconds on the caller's clock.
        """
        seen = self._ranks.get(rank)
        if seen is None or debugged:
            self._ranks[rank] = _Seen(heartbeat, activity, now)
            return
        if seen.heartbeat != heartbeat or seen.activity is not activity:
            self._longest[seen.activity] = max(now - seen.since, self._longest.get(seen.activity, 0.0))
            self._ranks[rank] = _Seen(heartbeat, activity, now)

    def hang(self, now: float) -> Hang | None:
        """Return the trainer that hangs, None while none does."""
        worst: Hang | None = None
        for rank, seen in sorted(self._ranks.items()):
            seconds, limit = now - seen.since, self.limit(seen.activity)
            if seconds > limit and (worst is None or seconds > worst.seconds):
                worst = Hang(rank, seen.activity, seconds, limit)
        return worst

    def forget(self, rank: int) -> None:
        """A rank has ended its call: it owes no more progress."""
        self._ranks.pop(rank, None)
