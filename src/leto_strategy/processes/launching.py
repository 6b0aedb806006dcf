"""Makes generations: sockets, identity, environment and output of each trainer, and the choice of zygote or stub.

The zygote is restarted once; after that, and while it is not ready in time, trainers are new interpreters.
"""

import os
import socket
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from leto_strategy.config import JOB_VARIABLE, TRAINER_VARIABLE, TrainerIdentity
from leto_strategy.memory.wire import FrameConnection
from leto_strategy.processes.generation import Generation, TrainerEvents, TrainerProcess, connect_trainer
from leto_strategy.processes.loop import Loop
from leto_strategy.processes.messages import ExitStatus, LaunchSpec
from leto_strategy.processes.starting import ZygoteClient, command, spawn
from leto_strategy.processes.timings import Timings

GENERATION_VARIABLE = "LETO_GENERATION"
"""Environment variable by which the fence tells whose orphan a process is."""

_START_FAILED = ExitStatus(127, None)


@dataclass(frozen=True, slots=True)
class SharedFiles:
    """Descriptors of the supervisor that every trainer inherits under the same numbers; all above 2.

    Args:
        result: memfd for the result of this call.
        prior_results: memfds of the script's earlier calls.
        further: What else trainers inherit, by name.
        stdout: The user's standard output.
        stderr: The user's standard error.
        null: /dev/null, read and write.
    """

    result: int
    prior_results: tuple[int, ...]
    further: dict[str, int]
    stdout: int
    stderr: int
    null: int


class GenerationLauncher:
    """Starts generations, and the zygote they come from.

    Args:
        loop: The supervisor's loop.
        spec: The job.
        timings: Waits.
        files: What all trainers inherit.
        events: Who hears what the trainers do.
        manager_address: Gives the address of a rank's state manager, "" where there is none.
        on_warning: Called with a text when the zygote fails, and when logs can't be written.
        on_zygote_failed: Called with pid and reason at each failure.
    """

    def __init__(
        self,
        loop: Loop,
        spec: LaunchSpec,
        *,
        timings: Timings,
        files: SharedFiles,
        events: TrainerEvents,
        manager_address: Callable[[int], str],
        on_warning: Callable[[str], object],
        on_zygote_failed: Callable[[int, str], object],
    ) -> None:
        self._loop = loop
        self._spec = spec
        self._timings = timings
        self._files = files
        self._events = events
        self._manager_address = manager_address
        self._on_warning = on_warning
        self._on_zygote_failed = on_zygote_failed
        self._next_number = 0
        self._zygote: ZygoteClient | None = None
        self._zygote_starts_left = 2 if spec.zygote and spec.script is not None else 0
        self._waiting: list[Generation] = []
        self._logs_failed = False

    @property
    def zygote_pid(self) -> int | None:
        """Pid of the zygote that runs, None where none does."""
        return None if self._zygote is None else self._zygote.pid

    @property
    def num_forking(self) -> int:
        """Trainers that the zygote was asked for and has not named yet."""
        return 0 if self._zygote is None else self._zygote.num_pending

    def start_zygote(self) -> None:
        """Start the zygote where the job wants one; generations that are started meanwhile wait for it."""
        if self._zygote is not None or self._zygote_starts_left == 0:
            return
        self._zygote_starts_left -= 1
        try:
            self._zygote = ZygoteClient(
                self._loop,
                self._spec,
                timings=self._timings,
                env={**self._spec.env, JOB_VARIABLE: self._spec.job},
                stdio=(self._files.null, self._files.stdout, self._files.stderr),
                on_ready=self._start_waiting,
                on_failed=self._lose_zygote,
            )
        except OSError as error:
            self._on_warning(f"the zygote can't be started: {error}")
            self._zygote_starts_left = 0

    def start(self, role: str) -> Generation:
        """Start a generation; its processes appear at once or, with the zygote, a moment later."""
        start = "stub" if self._zygote is None else "zygote"
        generation = Generation(self._next_number, role, start, self._loop.now())
        self._next_number += 1
        generation.num_pending = self._spec.world
        generation.trainers = [TrainerProcess(rank, generation.number) for rank in range(self._spec.world)]
        if self._zygote is not None and not self._zygote.ready:
            self._waiting.append(generation)
        else:
            self._start_now(generation)
        return generation

    def cancel(self, generation: Generation) -> None:
        """Give up a generation whose processes are not there yet; those on their way are killed as they appear."""
        if generation in self._waiting:
            self._waiting.remove(generation)
            generation.num_pending = 0

    def close(self) -> None:
        """Let the zygote end."""
        self._zygote_starts_left = 0
        if self._zygote is not None:
            self._zygote.close()

    def _start_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        for generation in waiting:
            self._start_now(generation)

    def _lose_zygote(self, reason: str) -> None:
        assert self._zygote is not None
        if self._zygote.refused:
            self._zygote_starts_left = 0  # the next one would have to refuse, too
        pid, self._zygote = self._zygote.pid, None
        self._on_zygote_failed(pid, reason)
        # What waits for it need not wait for the next one.
        for generation in self._waiting:
            generation.start = "stub"
        self._start_waiting()
        self.start_zygote()

    def _start_now(self, generation: Generation) -> None:
        with socket.create_server(("127.0.0.1", 0)) as store:
            for trainer in generation:
                self._start_trainer(generation, trainer, store)

    def _start_trainer(self, generation: Generation, trainer: TrainerProcess, store: socket.socket) -> None:
        files = self._files
        ours, theirs = socket.socketpair()
        with ExitStack() as stack:
            stack.enter_context(theirs)
            fds = [theirs.fileno(), files.result, *files.prior_results, *files.further.values()]
            fds += [files.stdout, files.stderr]
            if trainer.rank == 0:
                fds.append(store.fileno())
            stdio = (0, files.stdout, files.stderr)
            if generation.role == "shadow":
                log = self._open_log(trainer, stack)
                stdio = (files.null, log, log)
            identity = TrainerIdentity(
                job=self._spec.job,
                rank=trainer.rank,
                world=self._spec.world,
                generation=generation.number,
                role=generation.role,
                call=self._spec.call,
                function=self._spec.function,
                control_fd=theirs.fileno(),
                result_fd=files.result,
                prior_result_fds=files.prior_results,
                manager_address=self._manager_address(trainer.rank),
                store_port=store.getsockname()[1],
                store_fd=store.fileno() if trainer.rank == 0 else -1,
                stdout_fd=files.stdout,
                stderr_fd=files.stderr,
                loggers=self._spec.loggers,
                files=files.further,
            )
            env = {
                **self._spec.env,
                JOB_VARIABLE: self._spec.job,
                GENERATION_VARIABLE: str(generation.number),
                TRAINER_VARIABLE: identity.to_json(),
            }
            connect_trainer(self._loop, trainer, FrameConnection(ours), self._events)
            if generation.start == "zygote" and self._zygote is not None:
                self._zygote.fork(
                    env=env,
                    fds=[*stdio, *fds],
                    targets=[0, 1, 2, *fds],
                    callback=lambda pid: self._appeared(generation, trainer, pid),
                )
            else:
                self._appeared(generation, trainer, self._spawn(env, fds, stdio))

    def _spawn(self, env: dict[str, str], fds: list[int], stdio: tuple[int, int, int]) -> int | None:
        try:
            return spawn(command(self._spec), env=env, cwd=self._spec.cwd, fds=fds, stdio=stdio)
        except OSError as error:
            self._on_warning(f"a trainer can't be started: {error}")
            return None

    def _appeared(self, generation: Generation, trainer: TrainerProcess, pid: int | None) -> None:
        generation.num_pending -= 1
        if pid is None:
            trainer.status = _START_FAILED
            self._loop.after(0, lambda: self._events.on_trainer_ended(trainer), always=True)
            return
        trainer.pid = pid

        def on_ended(status: ExitStatus) -> None:
            trainer.status = status
            self._events.on_trainer_ended(trainer)

        self._loop.own(pid, on_ended)
        # Later: whoever called `start` has the generation only when this returns.
        self._loop.after(0, lambda: self._events.on_trainer_started(trainer), always=True)

    def _open_log(self, trainer: TrainerProcess, stack: ExitStack) -> int:
        if self._spec.root_dir is None or self._logs_failed:
            return self._files.null
        path = Path(self._spec.root_dir) / "leto" / f"shadow-g{trainer.generation}-r{trainer.rank}.log"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except OSError as error:
            self._logs_failed = True
            self._on_warning(f"shadow trainers write no log: {error}")
            return self._files.null
        stack.callback(os.close, fd)
        trainer.log = path
        return fd
