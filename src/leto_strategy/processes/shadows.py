"""Keeps a shadow generation ready beside the active one: starts it, restarts it after failures, hands it over.

A shadow's death never touches the active generation. After `FAILURES_MAX` failures in a row the job goes on without
shadows, and says so once.
"""

from collections.abc import Callable
from typing import Any

from leto_strategy.processes.generation import Generation, TrainerProcess, has_text
from leto_strategy.processes.launching import GenerationLauncher
from leto_strategy.processes.loop import Loop, Timer
from leto_strategy.processes.timings import Timings

FAILURES_MAX = 5


class ShadowKeeper:
    """The shadows of a job.

    Args:
        loop: The supervisor's loop.
        launcher: Starts generations.
        timings: Waits.
        enabled: The job has shadows at all.
        end: Kills a generation's processes, without touching anybody else, and calls back when they are gone.
        emit: Writes an event.
    """

    def __init__(
        self,
        loop: Loop,
        launcher: GenerationLauncher,
        *,
        timings: Timings,
        enabled: bool,
        end: Callable[[Generation, Callable[[], None]], None],
        emit: Callable[..., Any],
    ) -> None:
        self._loop = loop
        self._launcher = launcher
        self._timings = timings
        self._enabled = enabled
        self._end = end
        self._emit = emit
        self._num_failures = 0
        self._timer: Timer | None = None
        self._ending = False
        self.generation: Generation | None = None

    def want(self) -> None:
        """Have a shadow generation from now on: start one if there is none."""
        if self._enabled and self.generation is None and self._timer is None and not self._ending:
            self.generation = self._launcher.start("shadow")

    def prepare(self) -> None:
        """An active trainer has failed: let shadows do ahead of the fence what needs no content of memory."""
        if self.generation is not None:
            self.generation.say("prepare")

    def take(self) -> Generation | None:
        """Hand the shadow generation over, ready or not; None where there is none. The next one starts with `want`."""
        generation, self.generation = self.generation, None
        self._cancel_timer()
        return generation

    def on_ready(self, generation: Generation) -> None:
        """All of its trainers wait at their gate."""
        self._num_failures = 0
        generation.ready_seconds = self._loop.now() - generation.started
        seconds = round(generation.ready_seconds, 3)
        self._emit("shadow_ready", generation=generation.number, pids=generation.pids, seconds=seconds)

    def fail(self, trainer: TrainerProcess, cause: str, text: str) -> None:
        """A shadow trainer failed: end its generation, and start another one later."""
        generation = self.generation
        assert generation is not None
        assert generation.number == trainer.generation
        self.generation = None
        self._num_failures += 1
        self._ending = True
        num_failures = self._num_failures
        log = str(trainer.log) if has_text(trainer.log) else None
        trainer.keep_log = log is not None
        self._emit(
            "shadow_failed",
            rank=trainer.rank,
            pid=trainer.pid,
            generation=generation.number,
            cause=cause,
            text=text,
            log=log,
            num_failures=num_failures,
        )
        self._end(generation, self._on_gone)

    def stop(self) -> Generation | None:
        """Start no more shadows; returns those that are there."""
        self._enabled = False
        return self.take()

    def _on_gone(self) -> None:
        self._ending = False
        if not self._enabled:
            return
        if self._num_failures >= FAILURES_MAX:
            self._enabled = False
            text = f"shadow trainers failed {FAILURES_MAX} times in a row: training goes on without them"
            self._emit("shadows_off", text=f"{text}, and a failure is answered with a cold start")
            return
        wait = min(self._timings.shadow_backoff * 2 ** (self._num_failures - 1), self._timings.shadow_backoff_max)
        self._timer = self._loop.after(wait, self._restart)

    def _restart(self) -> None:
        self._timer = None
        self.want()

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
