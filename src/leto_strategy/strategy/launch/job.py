"""The user's process while a job runs: starts the supervisor, forwards signals, waits for the end.

It trains nothing and, when the job is over, is as it was: signal handlers restored, no thread, no descriptor, no child.
"""

import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import FrameType
from typing import Any, Self

from leto_strategy.config import scratch_directory
from leto_strategy.errors import UnrecoverableError
from leto_strategy.memory.wire import FrameConnection
from leto_strategy.processes.messages import LaunchSpec

_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
_SEND_TIMEOUT = timedelta(seconds=30)
_SUSPEND_SECONDS_MAX = 1.0
_EXIT_SECONDS_MAX = 10.0


class SupervisorProcess:
    """A running supervisor.

    Args:
        spec: The job.
        fds: Result file of this call, then those of earlier calls.
    """

    def __init__(self, spec: LaunchSpec, fds: Sequence[int]) -> None:
        self._spec, self._fds = spec, list(fds)
        self._old_handlers: dict[int, Any] = {}

    def __enter__(self) -> Self:
        ours, theirs = socket.socketpair()
        command = [
            sys.executable,
            "-I",
            "-m",
            "leto_strategy.processes.supervisor",
            "--control-fd",
            str(theirs.fileno()),
        ]
        with theirs:
            self._process = subprocess.Popen(command, pass_fds=(theirs.fileno(),), start_new_session=True)
        self._connection = FrameConnection(ours)
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        if threading.current_thread() is threading.main_thread():
            for signum in (*_FORWARDED, signal.SIGTSTP):
                if signal.getsignal(signum) is signal.SIG_IGN:
                    continue  # as in a job that a shell runs in the background
                self._old_handlers[signum] = signal.signal(signum, self._on_signal)
        self._connection.send(self._spec.to_json(), self._fds, timeout=_SEND_TIMEOUT)
        return self

    def __exit__(self, *exception: object) -> None:
        for signum, handler in self._old_handlers.items():
            signal.signal(signum, handler if handler is not None else signal.SIG_DFL)
        self._connection.close()  # the supervisor ends everything when this end is gone
        os.close(self._wake_read)
        os.close(self._wake_write)
        try:
            self._process.wait(_EXIT_SECONDS_MAX)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        shutil.rmtree(scratch_directory(self._spec.job), ignore_errors=True)

    def wait(self, on_event: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
        """Wait for the job's end.

        Args:
            on_event: Called with every event of the job.

        Returns:
            The supervisor's last message: outcome, reason, recoveries.

        Raises:
            UnrecoverableError: The supervisor is gone without one.
        """
        poller = select.poll()
        poller.register(self._connection, select.POLLIN)
        poller.register(self._wake_read, select.POLLIN)
        while True:
            poller.poll()
            self._forward_signals()
            for frame in self._connection.receive():
                for fd in frame.fds:
                    os.close(fd)
                if frame.message["op"] == "event":
                    on_event(frame.message["event"])
                elif frame.message["op"] == "end":
                    return frame.message
                elif frame.message["op"] == "suspended":
                    self._stop_here()
            if self._connection.at_end:
                status = self._process.wait(_EXIT_SECONDS_MAX)
                raise UnrecoverableError(
                    f"Leto's supervisor process ended without a result (status {status}); all trainers were ended."
                    " Start the script again, from your last checkpoint."
                )

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        try:
            os.write(self._wake_write, bytes([signum]))
        except BlockingIOError:
            pass

    def _forward_signals(self) -> None:
        try:
            signums = os.read(self._wake_read, 64)
        except BlockingIOError:
            return
        for signum in signums:
            if signum == signal.SIGTSTP:
                self._say({"op": "suspend"})
                poller = select.poll()
                poller.register(self._connection, select.POLLIN)
                poller.poll(_SUSPEND_SECONDS_MAX * 1000)
            else:
                self._say({"op": "signal", "signum": signum})

    def _stop_here(self) -> None:
        """All trainers are stopped: stop this process, too; it goes on here after SIGCONT."""
        os.kill(os.getpid(), signal.SIGSTOP)
        self._say({"op": "resume"})

    def _say(self, message: dict[str, Any]) -> None:
        try:
            self._connection.send(message, timeout=_SEND_TIMEOUT)
        except OSError:
            pass  # the supervisor is gone: `wait` says so
