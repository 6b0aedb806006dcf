"""Ends a job: with a result, with the user's exception, by giving up, or because the user's process is gone.

Whatever the way, at the end no process of the job is left: trainers and all they started, managers, zygote. Only then
is the launcher told.
"""

import time
from collections.abc import Callable
from typing import Any

from leto_strategy.processes.fence import own_children, tree
from leto_strategy.processes.generation import TrainerProcess
from leto_strategy.processes.job import Job
from leto_strategy.processes.loop import Timer
from leto_strategy.recovery.classification import Ending, Reaction, classify, signal_name
from leto_strategy.system import kill_processes

_LOOK_AGAIN_SECONDS = 0.02


class Ender:
    """The last part of a job.

    Args:
        job: The job.
        close_recoveries: Called before the last events are written.
        finish: Called once, when nothing is left, with the launcher's last frame (None: the launcher is gone).
    """

    def __init__(
        self, job: Job, *, close_recoveries: Callable[[], None], finish: Callable[[dict[str, Any] | None], None]
    ) -> None:
        self._job = job
        self._close_recoveries = close_recoveries
        self._finish = finish
        self._started = time.monotonic()
        self._raising: TrainerProcess | None = None
        self._candidate: TrainerProcess | None = None
        self._leaving = False
        self._over: tuple[str, str] | None = None
        self._launcher_gone = False
        self._told = False
        self._timers: list[Timer] = []

    @property
    def decided(self) -> bool:
        """The outcome is certain; what trainers do from now on can't change it."""
        return self._over is not None or self._leaving or self._raising is not None

    # With the user's exception.

    def raise_exception(self, trainer: TrainerProcess) -> None:
        """A trainer reported an exception of the user's: let one trainer run its hooks and deliver it.

        A bug that hits all ranks at once is reported by each: rank 0, which owns loggers and checkpoints, is preferred.
        """
        if self.decided:
            return
        if self._candidate is None or trainer.rank < self._candidate.rank:
            first = self._candidate is None
            self._candidate = trainer
            self._job.ending = True  # nothing that follows from it is a failure of its own
            if trainer.rank == 0:
                self._raise_candidate()
            elif first:
                self._after(self._job.timings.lower_rank, self._raise_candidate)

    def _raise_candidate(self) -> None:
        trainer = self._candidate
        if self.decided or trainer is None:
            return
        report = trainer.report
        assert report is not None
        self._raising = trainer
        self._job.events.emit(
            "user_exception",
            rank=trainer.rank,
            pid=trainer.pid,
            kind=report.kind,
            type=report.type,
            message=report.message,
            step=report.step,
        )
        trainer.say("raise")
        if not trainer.alive:
            self._undelivered("it ended before")
            return
        self._after(self._job.timings.raise_grace, self._kill_others)
        self._after(self._job.timings.delivery, lambda: self._undelivered("its exception hooks took too long"))

    def on_delivered(self, trainer: TrainerProcess) -> None:
        """The exception is written."""
        if trainer is self._raising:
            trainer.delivered = True
            self._after(self._job.timings.raise_grace, self._end_raised)

    def _end_raised(self) -> None:
        assert self._raising is not None
        report = self._raising.report
        self.end("raise", "" if report is None else f"{report.type}: {report.message}")

    def _kill_others(self) -> None:
        for trainer in self._job.active or ():
            if trainer is not self._raising:
                self._job.kill(trainer)

    def _undelivered(self, why: str) -> None:
        trainer = self._raising
        assert trainer is not None
        if trainer.delivered:
            self._end_raised()
            return
        report = trainer.report
        assert report is not None
        text = (
            f"rank {trainer.rank} raised {report.type}: {report.message}. The exception itself could not be passed on"
        )
        self.end("failed", f"{text} ({why}). {report.traceback}")

    # With a result.

    def farewell(self) -> None:
        """Every rank has finished: results hold from here on, and the trainers may end."""
        assert self._job.active is not None
        self._leaving = True
        self._job.ending = True
        self._job.active.say("bye")
        self._after(self._job.timings.farewell, lambda: self.end("finished", ""))

    # By the user's signal.

    def check_stopped(self) -> None:
        """After a forwarded SIGINT or SIGTERM: end once no trainer is left that could still shut down in order."""
        job = self._job
        if job.stop_signum is None or self.decided or self._candidate is not None:
            return
        if job.active is None or all(map(_is_through, job.active)):
            self.stopped("every trainer has ended")

    def stopped(self, how: str) -> None:
        """End after the user's signal without an exception of theirs; what was delivered before still holds."""
        signum = self._job.stop_signum
        assert signum is not None
        if self._leaving:
            self.end("finished", "")
        elif self._raising is not None and self._raising.delivered:
            self._end_raised()
        self.end("failed", f"stopped by {signal_name(signum)}: {how}")

    # By any of these.

    def on_trainer_ended(self, trainer: TrainerProcess) -> None:
        """An active trainer was reaped while the job ends."""
        active = self._job.active
        if self._leaving:
            if active is None or active.all_ended:
                self.end("finished", "")
        elif self._raising is not None:
            if trainer is self._raising:
                self._undelivered(f"it ended: {trainer.status}")
        elif self._candidate is not None:
            if trainer is self._candidate:
                self._raise_candidate()
        else:
            self.check_stopped()

    def give_up(self, reason: str) -> None:
        """End as "failed"."""
        self.end("failed", reason)

    def abort(self) -> None:
        """The user's process is gone: kill everything at once."""
        self._launcher_gone = True
        self.end("failed", "the user's process ended")
        kill_processes(self._job.loop.known_pids)

    def end(self, outcome: str, reason: str) -> None:
        """Kill what is left of the job; tell the launcher when nothing is."""
        if self._over is not None:
            return
        self._over = (outcome, reason)
        job = self._job
        job.ending = True
        for timer in self._timers:
            timer.cancel()
        generations = [g for g in (job.active, job.shadows.stop()) if g is not None]
        job.active = None
        job.launcher.close()
        job.managers.stop()
        for generation in generations:
            job.end_generation(
                generation, unknown_too=True, on_gone=lambda num: self.on_reaped(), on_stuck=lambda what: self._tell()
            )
        self._after(job.timings.farewell, lambda: kill_processes(job.loop.known_pids), always=True)
        self._after(job.spec.reap_timeout + job.timings.farewell, self._tell, always=True)
        self._after(0, self.on_reaped, always=True)

    def on_reaped(self) -> None:
        """A child was reaped: tell the launcher if it was the last one."""
        job = self._job
        if self._over is None or job.dying or job.loop.known_pids:
            return
        if strays := own_children():
            kill_processes({*strays, *(child for pid in strays for child in tree(pid))})
            self._after(_LOOK_AGAIN_SECONDS, self.on_reaped, always=True)
            return
        self._tell()

    def _tell(self) -> None:
        if self._over is None or self._told:
            return
        self._told = True
        outcome, reason = self._over
        job = self._job
        for timer in self._timers:
            timer.cancel()
        self._close_recoveries()
        job.managers.close()
        recoveries = [record.to_json() for record in job.recoveries]
        seconds = round(time.monotonic() - self._started, 3)
        job.events.emit("job_finished", outcome=outcome, reason=reason, recoveries=len(recoveries), seconds=seconds)
        job.events.close()
        end = {"op": "end", "outcome": outcome, "reason": reason, "recoveries": recoveries, "signum": job.stop_signum}
        self._finish(None if self._launcher_gone else end)

    def _after(self, seconds: float, callback: Callable[[], object], *, always: bool = False) -> None:
        self._timers.append(self._job.loop.after(seconds, callback, always=always))


def _is_through(trainer: TrainerProcess) -> bool:
    """While stopping: nothing more comes from it. It has ended or finished, or reported only that others did."""
    report = trainer.report
    if not trainer.alive or trainer.finished:
        return True
    return report is not None and classify(Ending(report=report.kind), stopping=True).reaction is not Reaction.RAISE
