"""The supervisor process: starts a job's processes, watches them, answers failures, and ends them all.

``python -I -m leto_strategy.processes.supervisor --control-fd N``, started by the launcher in the user's process, in a
session of its own. Standard library only; one thread, because the parent-death signal of its children follows the
thread that forked them. This module wires the parts and routes what trainers say; the parts decide.
"""

import argparse
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

from leto_strategy.devices.nvml import Nvml, open_nvml
from leto_strategy.errors import ProtocolError, ResourceError
from leto_strategy.events import EventLog
from leto_strategy.memory.wire import FrameConnection
from leto_strategy.processes.device_watch import DeviceWatch
from leto_strategy.processes.ending import Ender
from leto_strategy.processes.exit_watch import ExitWatch
from leto_strategy.processes.generation import Generation, Link, TrainerEvents, TrainerProcess, close_all
from leto_strategy.processes.interrupts import Interrupts
from leto_strategy.processes.job import Job
from leto_strategy.processes.launching import GenerationLauncher, SharedFiles
from leto_strategy.processes.loop import Loop
from leto_strategy.processes.managers import ManagerGroup
from leto_strategy.processes.messages import (
    Delivered,
    Entered,
    ErrorReport,
    ExitStatus,
    Finished,
    LaunchSpec,
    Ready,
    Resume,
    SignalRequest,
    TrainerMessage,
    parse_launcher_message,
)
from leto_strategy.processes.operator import OperatorServer
from leto_strategy.processes.progress_watch import ProgressWatch
from leto_strategy.processes.recovering import Recoverer
from leto_strategy.processes.shadows import ShadowKeeper
from leto_strategy.processes.timings import Timings
from leto_strategy.processes.watchdog import Watchdog
from leto_strategy.recovery.classification import Ending, Reaction, classify
from leto_strategy.system import (
    allow_many_files,
    become_subreaper,
    open_pidfd,
    peer_credentials,
    raise_file_limit,
)

_LAUNCH_TIMEOUT = timedelta(seconds=30)
_FILES_BASE, _FILES_PER_RANK = 256, 256


class Supervisor(TrainerEvents):
    """One job, from its launch to its end.

    Args:
        loop: The loop; `run` returns when it stops.
        spec: The job.
        connection: To the launcher; owned.
        files: What trainers inherit; stays the caller's.
        open_nvml: Makes NVML ready, on a job with GPUs.
    """

    def __init__(
        self,
        loop: Loop,
        spec: LaunchSpec,
        connection: FrameConnection,
        files: SharedFiles,
        *,
        open_nvml: Callable[[], Nvml],
    ) -> None:
        self._loop = loop
        timings = Timings.with_overrides(spec.timings)
        self._user = Link(loop, connection, on_frame=self._on_user_frame, on_lost=lambda reason: self._ender.abort())
        events = EventLog(spec.root_dir, job=spec.job, listener=lambda line: self._tell_user("event", event=line))
        stdio = (files.null, files.stdout, files.stderr)
        managers = ManagerGroup(
            loop,
            spec,
            timings=timings,
            base_env={**spec.env},
            stdio=stdio,
            on_failed=lambda rank, pid, cause: events.emit("manager_failed", rank=rank, pid=pid, cause=cause),
            on_replaced=lambda rank, pid: events.emit("manager_replaced", rank=rank, pid=pid),
            on_hopeless=lambda reason: self._ender.give_up(reason),
        )
        launcher = GenerationLauncher(
            loop,
            spec,
            timings=timings,
            files=files,
            events=self,
            manager_address=managers.address,
            on_warning=lambda text: events.emit("warning", text=text),
            on_zygote_failed=lambda pid, text: events.emit("zygote_failed", pid=pid, text=text),
        )
        shadows = ShadowKeeper(
            loop,
            launcher,
            timings=timings,
            enabled=bool(spec.shadows and spec.needs_memory),
            end=self._end_shadows,
            emit=events.emit,
        )
        devices = None
        if spec.gpus:
            devices = DeviceWatch(
                loop, spec.gpus, spec.env, open_nvml=open_nvml, patience=timings.driver, emit=events.emit
            )
        self._job = Job(loop, spec, timings, events, managers, launcher, shadows, devices)
        watchdog = Watchdog(hang_timeout=spec.hang_timeout)
        self._recoverer = Recoverer(self._job, watchdog, give_up=lambda reason: self._ender.give_up(reason))
        self._ender = Ender(self._job, close_recoveries=self._recoverer.close, finish=self._finish)
        self._interrupts = Interrupts(
            self._job,
            self._ender,
            on_suspended=lambda: self._tell_user("suspended"),
            on_resumed=self._recoverer.on_resumed,
        )
        self._exits = ExitWatch(self._job)
        self._watch = ProgressWatch(self._job, watchdog, fail=self._recoverer.fail)
        self._operator = OperatorServer(self._job, note_fault=self._recoverer.note_fault)
        loop.on_reaped = self._on_reaped
        loop.on_signal = self._interrupts.signal

    def start(self) -> None:
        """Start the job's processes."""
        job, spec = self._job, self._job.spec
        if job.ending:
            return
        job.events.emit(
            "job_started",
            pid=os.getpid(),
            world=spec.world,
            function=spec.function,
            call=spec.call,
            shadows=spec.shadows,
            argv=list(spec.argv),
            root_dir=spec.root_dir,
        )
        job.managers.start()
        job.launcher.start_zygote()
        self._recoverer.start_first()
        if job.devices is not None:
            job.devices.start()
        self._watch.start()
        self._exits.start()
        self._operator.start()

    def run(self) -> None:
        """Run until the job is over. A bug of ours ends the job in order, with its traceback as the reason."""
        try:
            self.start()
            self._loop.run()
        except Exception:
            self._ender.give_up(f"Leto's supervisor failed, which is a bug of Leto's: {traceback.format_exc()}")
            self._loop.run()

    def abort(self) -> None:
        """The user's process is gone."""
        self._ender.abort()

    # What trainers do.

    def on_trainer_started(self, trainer: TrainerProcess) -> None:
        """A trainer's process is there."""
        job = self._job
        generation = job.generation_of(trainer)
        if generation is None:
            for dying, fence in job.dying.items():
                if dying.number == trainer.generation and trainer.pid is not None:
                    fence.add(trainer.pid)
            return
        job.watch_trainers()
        if generation.num_pending == 0 and not generation.announced:
            generation.announced = True
            job.events.emit(
                "generation_started",
                generation=generation.number,
                role=generation.role,
                pids=generation.pids,
                start=generation.start,
            )

    def on_trainer_message(self, trainer: TrainerProcess, message: TrainerMessage) -> None:
        """A trainer said something."""
        job = self._job
        generation = job.generation_of(trainer)
        if generation is None:
            return
        if generation is not job.active:
            self._on_shadow_message(generation, trainer, message)
            return
        match message:
            case Ready():
                trainer.ready = True
                self._recoverer.on_ready(generation)
            case Entered():
                self._recoverer.on_entered(trainer, message)
            case Finished():
                trainer.finished = True
                self._watch.forget(trainer.rank)
                self._recoverer.on_entered(trainer, None)
                if generation.all_finished and not self._ender.decided:
                    self._ender.farewell()
            case ErrorReport():
                self._on_report(generation, trainer, message)
            case Delivered():
                self._ender.on_delivered(trainer)

    def on_trainer_ended(self, trainer: TrainerProcess) -> None:
        """A trainer was reaped."""
        job = self._job
        generation = job.generation_of(trainer)
        if generation is not None and generation is job.active:
            if job.ending or job.stop_signum is not None:
                self._ender.on_trainer_ended(trainer)
            else:
                self._recoverer.fail(trainer, _ending_of(trainer.status))
        elif generation is not None:
            meaning = classify(_ending_of(trainer.status))
            job.shadows.fail(trainer, meaning.cause, meaning.text)

    def on_trainer_lost(self, trainer: TrainerProcess, reason: str) -> None:
        """A trainer closed its connection: it is ending, or it must be ended."""

        def check() -> None:
            leaves = trainer.finished or trainer.delivered
            if trainer.alive and not leaves and self._job.generation_of(trainer) is not None:
                self._job.events.emit(
                    "warning", text=f"rank {trainer.rank} is killed, its connection is lost: {reason}"
                )
                self._job.kill(trainer)

        self._loop.after(self._job.timings.disconnect_grace, check)

    def _on_shadow_message(self, generation: Generation, trainer: TrainerProcess, message: TrainerMessage) -> None:
        match message:
            case Ready():
                trainer.ready = True
                if generation.all_ready:
                    self._job.shadows.on_ready(generation)
            case ErrorReport():
                self._job.shadows.fail(trainer, message.kind, f"raised {message.type}: {message.message}")
            case _:
                self._job.shadows.fail(trainer, "protocol", f"said {type(message).__name__} before its promotion")

    def _on_report(self, generation: Generation, trainer: TrainerProcess, report: ErrorReport) -> None:
        job = self._job
        # A peer that died just now is the cause, and this report its echo: look before believing it.
        self._loop.reap()
        if job.active is not generation:
            return
        ending = Ending(report=report.kind)
        meaning = classify(ending, stopping=job.stop_signum is not None)
        if meaning.reaction is Reaction.RAISE:
            self._ender.raise_exception(trainer)
        elif job.ending or job.stop_signum is not None:
            self._ender.check_stopped()
        elif meaning.reaction is Reaction.WAIT:
            self._loop.after(job.timings.peer_grace, lambda: self._no_peer_died(generation, trainer))
        else:
            self._recoverer.fail(trainer, ending, meaning)

    def _no_peer_died(self, generation: Generation, trainer: TrainerProcess) -> None:
        if self._job.active is generation and not self._job.ending and self._job.stop_signum is None:
            assert trainer.report is not None
            self._recoverer.fail(trainer, Ending(report=trainer.report.kind))

    def _end_shadows(self, generation: Generation, on_gone: Any) -> None:
        self._job.end_generation(
            generation,
            unknown_too=False,
            on_gone=lambda num: on_gone(),
            on_stuck=lambda what: self._ender.give_up(f"after the failure of a shadow trainer, {what}"),
        )

    def _on_reaped(self, pid: int) -> None:
        self._job.on_reaped(pid)
        self._ender.on_reaped()

    # The user's process.

    def _on_user_frame(self, frame: dict[str, Any], fds: list[int]) -> None:
        close_all(fds)
        message = parse_launcher_message(frame)
        if isinstance(message, SignalRequest):
            self._interrupts.signal(message.signum)
        elif isinstance(message, Resume):
            self._interrupts.resume()
        else:
            self._interrupts.suspend()

    def _tell_user(self, op: str, **fields: Any) -> None:
        self._user.send({"op": op, **fields})

    def _finish(self, end: dict[str, Any] | None) -> None:
        self._operator.close()
        if self._job.devices is not None:
            self._job.devices.close()
        if end is not None and not self._user.closed:
            self._user.send_last(end, timeout=timedelta(seconds=5))
        self._user.close()
        self._loop.stop()


def _ending_of(status: ExitStatus | None) -> Ending:
    assert status is not None, "the trainer was reaped"
    return Ending(exit_code=status.exit_code, signum=status.signum)


def main(arguments: Sequence[str] | None = None, *, open_nvml: Callable[[], Nvml] = open_nvml) -> int:
    """Run one job; returns when nothing of it is left."""
    parser = argparse.ArgumentParser(prog="leto_strategy.processes.supervisor")
    parser.add_argument("--control-fd", type=int, required=True)
    control = socket.socket(fileno=parser.parse_args(arguments).control_fd)
    become_subreaper()
    _open_standard_files()
    connection = FrameConnection(control)
    try:
        frame = connection.receive_one(timeout=_LAUNCH_TIMEOUT)
        spec = LaunchSpec.from_json(frame.message)
        if len(frame.fds) <= len(spec.files):
            raise ProtocolError("a launch needs a result file, and a descriptor for each further one")
        raise_file_limit(_FILES_BASE + _FILES_PER_RANK * spec.world)
        if spec.gpus:
            allow_many_files()
    except (ProtocolError, ResourceError, EOFError, OSError) as error:
        with suppress(OSError, ProtocolError, TimeoutError):
            end = {"op": "end", "outcome": "failed", "reason": str(error), "recoveries": []}
            connection.send(end, timeout=timedelta(seconds=5))
        return 1
    num_results = len(frame.fds) - len(spec.files)
    files = SharedFiles(
        result=frame.fds[0],
        prior_results=tuple(frame.fds[1:num_results]),
        further=dict(zip(spec.files, frame.fds[num_results:], strict=True)),
        stdout=os.dup(1),
        stderr=os.dup(2),
        null=os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC),
    )
    loop = Loop()
    loop.handle_signals(signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    supervisor = Supervisor(loop, spec, connection, files, open_nvml=open_nvml)
    # The socket tells of the user's process's end unless a child of it holds a copy; its pidfd always does.
    user_pidfd = open_pidfd(peer_credentials(control).pid)
    if user_pidfd is not None:

        def on_user_gone() -> None:
            loop.forget(user_pidfd)
            supervisor.abort()

        loop.watch(user_pidfd, on_user_gone)
    else:
        supervisor.abort()
    supervisor.run()
    loop.close()
    return 0


def _open_standard_files() -> None:
    """Make sure that no descriptor of ours gets the number of a standard file."""
    while (fd := os.open(os.devnull, os.O_RDWR)) < 3:
        os.set_inheritable(fd, True)
    os.close(fd)


if __name__ == "__main__":
    sys.exit(main())
