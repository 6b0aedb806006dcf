"""Looks at the active trainers' progress pages now and then, and reports the one that hangs."""

from collections.abc import Callable

from leto_strategy.processes.generation import Generation, TrainerProcess
from leto_strategy.processes.job import Job
from leto_strategy.processes.watchdog import LIMIT_FACTOR, Watchdog
from leto_strategy.progress import Activity
from leto_strategy.recovery.classification import Ending
from leto_strategy.system import process_stat, tracer_pid

_STOPPED = "Tt"
_LOOKS_PER_TIMEOUT = 4


class ProgressWatch:
    """Feeds the watchdog.

    Args:
        job: The job.
        watchdog: The rule.
        fail: Called with the trainer that hangs.
    """

    def __init__(self, job: Job, watchdog: Watchdog, *, fail: Callable[[TrainerProcess, Ending], None]) -> None:
        self._job = job
        self._watchdog = watchdog
        self._fail = fail
        hang_timeout = job.spec.hang_timeout
        self._seconds = min(job.timings.watch, (hang_timeout or LIMIT_FACTOR) / _LOOKS_PER_TIMEOUT)

    def start(self) -> None:
        """Look from now on."""
        self._job.loop.after(self._seconds, self._look)

    def forget(self, rank: int) -> None:
        """A rank has finished: it only waits for the others."""
        self._watchdog.forget(rank)

    def _look(self) -> None:
        self._job.loop.after(self._seconds, self._look)
        generation = self._job.active
        if generation is None or self._job.ending or self._job.stop_signum is not None:
            return
        if generation.promoted:
            self._look_at_work(generation)
        else:
            self._look_at_start(generation)

    def _look_at_start(self, generation: Generation) -> None:
        seconds, limit = self._job.loop.now() - generation.started, self._watchdog.start_limit()
        late = next((trainer for trainer in generation if not trainer.ready), None)
        if seconds > limit and late is not None and not _debugged(late):
            self._report(late, Activity.STARTING, seconds, limit)

    def _look_at_work(self, generation: Generation) -> None:
        if not self._job.spec.needs_memory:
            return
        now = self._job.loop.now()
        pages = [self._job.managers.page(trainer.rank) for trainer in generation]
        # A debugger on one rank makes all others wait.
        debugged = any(page.debugger for page in pages if page) or any(map(_debugged, generation))
        for trainer, page in zip(generation, pages, strict=True):
            if not trainer.finished and page is not None:
                self._watchdog.observe(
                    trainer.rank, heartbeat=page.heartbeat, activity=page.activity, debugged=debugged, now=now
                )
        hang = self._watchdog.hang(now)
        if hang is not None:
            # Ranks wait for each other: a stopped process is the culprit, whoever's heartbeat ended first.
            trainer = next(filter(_stopped, generation), generation.trainers[hang.rank])
            self._report(trainer, hang.activity, hang.seconds, hang.limit_seconds)

    def _report(self, trainer: TrainerProcess, activity: Activity, seconds: float, limit: float) -> None:
        self._fail(trainer, Ending(hang=True))
        self._job.events.emit(
            "hang",
            rank=trainer.rank,
            pid=trainer.pid,
            generation=trainer.generation,
            activity=activity.name.lower(),
            seconds=round(seconds, 1),
            limit_seconds=round(limit, 1),
        )


def _debugged(trainer: TrainerProcess) -> bool:
    return trainer.alive and trainer.pid is not None and tracer_pid(trainer.pid) != 0


def _stopped(trainer: TrainerProcess) -> bool:
    stat = process_stat(trainer.pid) if trainer.alive and trainer.pid is not None else None
    return stat is not None and stat.state in _STOPPED
