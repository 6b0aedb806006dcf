"""The user's signals: SIGINT and SIGTERM ask the active trainers to end in order, SIGTSTP suspends the whole job."""

import signal
from collections.abc import Callable

from leto_strategy.processes.ending import Ender
from leto_strategy.processes.job import Job
from leto_strategy.recovery.classification import signal_name


class Interrupts:
    """Passes on what the user's process receives; trainers have sessions of their own and get nothing from a terminal.

    Args:
        job: The job.
        ender: Ends it.
        on_suspended: Called when all trainers are stopped.
        on_resumed: Called when they go on.
    """

    def __init__(
        self, job: Job, ender: Ender, *, on_suspended: Callable[[], None], on_resumed: Callable[[], None]
    ) -> None:
        self._job = job
        self._ender = ender
        self._on_suspended = on_suspended
        self._on_resumed = on_resumed

    def signal(self, signum: int) -> None:
        """The user's process received a signal."""
        job = self._job
        if signum not in (signal.SIGINT, signal.SIGTERM):
            self._note(signum, "passed on to the active trainers")
            job.signal_active(signum)
            return
        if job.stop_signum is not None:
            if signum == signal.SIGINT:
                self._note(signum, "everything is killed")
                self._ender.stopped("a second signal killed all trainers")
            return
        job.stop_signum = signum
        if job.active is None or not job.active.promoted or job.ending:
            # Nothing trains: nothing has to be shut down in order. What is being delivered goes on being delivered.
            self._note(signum, "the job ends")
            if not self._ender.decided:
                self._ender.stopped("no trainer was training")
            return
        self._note(signum, "passed on to the active trainers, which shut down")
        job.signal_active(signum)
        grace = job.spec.stop_grace
        job.loop.after(
            grace,
            lambda: self._ender.stopped(
                f"the trainers did not shut down within {grace:g} s (LetoStrategy(stop_grace=...)) and were killed"
            ),
        )

    def suspend(self) -> None:
        """Stop all trainers and all clocks."""
        job = self._job
        if not job.suspended:
            job.suspended = True
            job.loop.pause()
            job.signal_everything(signal.SIGSTOP)
            job.events.emit("suspended")
        self._on_suspended()

    def resume(self) -> None:
        """Let all trainers go on."""
        job = self._job
        if job.suspended:
            job.suspended = False
            job.signal_everything(signal.SIGCONT)
            job.loop.unpause()
            job.events.emit("resumed")
            self._on_resumed()

    def _note(self, signum: int, action: str) -> None:
        self._job.events.emit("signal", signum=signum, name=signal_name(signum), action=action)
