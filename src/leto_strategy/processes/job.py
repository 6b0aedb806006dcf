"""The parts of a job's supervisor and the state they share; what several of them do to generations.

Who decides what: `recovering` answers failures, `ending` ends the job, `interrupts` passes the user's signals on.
"""

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from leto_strategy.events import EventLog
from leto_strategy.processes.device_watch import DeviceWatch
from leto_strategy.processes.fence import AwaitGone, Fence, tree
from leto_strategy.processes.generation import Generation, TrainerProcess
from leto_strategy.processes.launching import GenerationLauncher
from leto_strategy.processes.loop import Loop
from leto_strategy.processes.managers import ManagerGroup
from leto_strategy.processes.messages import LaunchSpec
from leto_strategy.processes.record import RecoveryRecord
from leto_strategy.processes.shadows import ShadowKeeper
from leto_strategy.processes.timings import Timings
from leto_strategy.system import kill_processes


@dataclass(eq=False)
class Job:
    """Everything the supervisor of one job has.

    Args:
        loop: Its loop.
        spec: What the launcher asked for.
        timings: Waits.
        events: Where events go.
        managers: State managers and mirrors.
        launcher: Starts generations.
        shadows: Keeps shadows.
        devices: Watches the GPUs; None on the CPU.
    """

    loop: Loop
    spec: LaunchSpec
    timings: Timings
    events: EventLog
    managers: ManagerGroup
    launcher: GenerationLauncher
    shadows: ShadowKeeper
    devices: DeviceWatch | None = None
    active: Generation | None = None
    """The generation that trains, or will as soon as it is ready; None behind a fence."""
    dying: dict[Generation, Fence] = field(default_factory=dict)
    recoveries: list[RecoveryRecord] = field(default_factory=list)
    suspended: bool = False
    stop_signum: int | None = None
    """The SIGINT or SIGTERM that asked the trainers to end; endings are no failures from then on."""
    ending: bool = False
    """The job ends: nothing is started, promoted or recovered any more."""

    def living(self) -> list[Generation]:
        """Generations that are not being ended."""
        return [generation for generation in (self.active, self.shadows.generation) if generation is not None]

    def generation_of(self, trainer: TrainerProcess) -> Generation | None:
        """The living generation of a trainer; None where it is being ended, or has been."""
        return next((g for g in self.living() if g.number == trainer.generation), None)

    def end_generation(
        self,
        generation: Generation,
        *,
        unknown_too: bool,
        on_gone: Callable[[int], None],
        on_stuck: Callable[[str], None],
        await_gone: AwaitGone | None = None,
    ) -> None:
        """Kill a generation at once and call back when every process of it is reaped.

        Args:
            generation: It must not be among the living any more.
            unknown_too: See `Fence`.
            on_gone: Gets the number of processes reaped.
            on_stuck: Gets a phrase about what is left after the timeout.
            await_gone: See `Fence`.
        """
        assert generation not in self.living(), "the fence would spare it"

        def passed(num_processes: int) -> None:
            self._forget(generation)
            on_gone(num_processes)

        def stuck(what: str) -> None:
            self._forget(generation)
            on_stuck(what)

        self.dying[generation] = Fence(
            self.loop,
            [trainer.pid for trainer in generation if trainer.pid is not None],
            generation=generation.number,
            spared=frozenset(pid for other in self.living() for pid in other.pids),
            spared_generations=frozenset(other.number for other in self.living()),
            unknown_too=unknown_too,
            is_pending=lambda: generation.num_pending > 0,
            others_pending=lambda: self.launcher.num_forking > generation.num_pending,
            timeout=self.spec.reap_timeout,
            on_passed=passed,
            on_stuck=stuck,
            await_gone=await_gone,
        )
        generation.disconnect()
        self.launcher.cancel(generation)

    def on_reaped(self, pid: int) -> None:
        """A child was reaped, trainer or orphan: fences go on."""
        for fence in list(self.dying.values()):
            fence.reaped(pid)

    def watch_trainers(self) -> None:
        """Tell the managers whose sessions end with the supervisor."""
        self.managers.watch([pid for generation in self.living() for pid in generation.pids])

    def signal_active(self, signum: int) -> None:
        """Send a signal to the active trainers' main processes."""
        if self.active is not None:
            kill_processes(self.active.pids, signum)

    def signal_everything(self, signum: int) -> None:
        """Send a signal to every process of every trainer, its children after it."""
        for generation in self.living():
            for pid in generation.pids:
                kill_processes([pid, *tree(pid)], signum)

    def kill(self, trainer: TrainerProcess) -> None:
        """Kill one trainer's main process."""
        if trainer.alive and trainer.pid is not None:
            kill_processes([trainer.pid], signal.SIGKILL)

    def remove_logs(self, generation: Generation) -> None:
        """Remove the shadow logs of a generation, but for those that say why it failed."""
        for trainer in generation:
            if trainer.log is not None and not trainer.keep_log:
                with suppress(OSError):
                    os.unlink(trainer.log)
                trainer.log = None

    def _forget(self, generation: Generation) -> None:
        self.dying.pop(generation, None)
        self.remove_logs(generation)
