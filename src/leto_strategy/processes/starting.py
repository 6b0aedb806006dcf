"""Starts processes: trainers through the stub or the zygote, and the zygote itself.

Everything is started by the supervisor's main thread, because the parent-death signal follows the thread that forked. A
start through the zygote is answered later, through the loop.
"""

import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from leto_strategy.config import split_command
from leto_strategy.errors import ProtocolError
from leto_strategy.memory.wire import FrameConnection
from leto_strategy.processes.generation import Link, close_all
from leto_strategy.processes.loop import Loop
from leto_strategy.processes.messages import ExitStatus, LaunchSpec, get
from leto_strategy.processes.timings import Timings

_RERUN = "from leto_strategy.processes.zygote import rerun; rerun()"
_STUB = str(Path(__file__).with_name("stub.py"))
# What this process handles or ignores must not be inherited as ignored.
_DEFAULT_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGPIPE, signal.SIGXFSZ, signal.SIGCHLD)


def spawn(
    argv: Sequence[str],
    *,
    env: dict[str, str],
    cwd: str,
    fds: Sequence[int] = (),
    stdio: tuple[int, int, int] | None = None,
    outlives: bool = False,
) -> int:
    """Start a program in a session of its own, through the stub, so that it ends with this process; return its pid.

    Args:
        argv: The program and its arguments.
        env: Its environment.
        cwd: Its working directory.
        fds: Descriptors it inherits under the same numbers, all above 2.
        stdio: Its standard input, output and error; None: those of this process.
        outlives: It is not killed with this process: a state manager has to end others first. Then `cwd` is not used.

    Raises:
        OSError: no process could be made.
    """
    actions: list[tuple[int, ...]] = [(os.POSIX_SPAWN_DUP2, fd, fd) for fd in fds]
    if stdio is not None:
        actions += [(os.POSIX_SPAWN_DUP2, fd, target) for target, fd in enumerate(stdio)]
    command = list(argv) if outlives else [sys.executable, "-I", "-S", _STUB, str(os.getpid()), cwd, *argv]
    return os.posix_spawn(
        command[0], command, env, file_actions=actions, setsid=True, setsigdef=_DEFAULT_SIGNALS, setsigmask=[]
    )


class ZygoteClient:
    """The supervisor's end of the zygote.

    Args:
        loop: The supervisor's loop.
        spec: The job; its script must be set.
        timings: Waits.
        on_ready: Called once when trainers can be forked.
        on_failed: Called once with the reason when they can't (any more). Requests are answered with None before.
    """

    def __init__(
        self,
        loop: Loop,
        spec: LaunchSpec,
        *,
        timings: Timings,
        env: dict[str, str],
        stdio: tuple[int, int, int],
        on_ready: Callable[[], None],
        on_failed: Callable[[str], None],
    ) -> None:
        assert spec.script is not None
        self._loop = loop
        self._timings = timings
        self._on_ready = on_ready
        self._on_failed = on_failed
        self._pending: dict[int, Callable[[int | None], None]] = {}
        self._next_id = 0
        self._failed = False
        self.ready = False
        self.refused = False
        self.ended = False
        ours, theirs = socket.socketpair()
        code = f"from leto_strategy.processes.zygote import main; main({theirs.fileno()}, {os.getpid()})"
        argv = [spec.argv[0], *split_command(spec.argv)[0], "-c", code]
        with theirs:
            self.pid = spawn(argv, env=env, cwd=spec.cwd, fds=[theirs.fileno()], stdio=stdio)
        loop.own(self.pid, self._on_ended)
        self._link = Link(loop, FrameConnection(ours), on_frame=self._on_frame, on_lost=self._fail)
        script = {"path": spec.script.path, "module": spec.script.module, "path0": spec.script.path0}
        script["argv"] = list(spec.script.argv)  # type: ignore[assignment]
        configure = {"op": "configure", "script": script, "argv": list(spec.argv), "cwd": spec.cwd}
        self._link.send({**configure, "modules": list(spec.zygote_modules)})
        self._timer = loop.after(timings.zygote, lambda: self._fail("its imports took too long"))

    @property
    def num_pending(self) -> int:
        """Requests without an answer."""
        return len(self._pending)

    def fork(
        self, *, env: dict[str, str], fds: Sequence[int], targets: Sequence[int], callback: Callable[[int | None], None]
    ) -> None:
        """Ask for a trainer; `callback` gets its pid, or None where the zygote has failed.

        Args:
            env: Environment of the trainer.
            fds: Descriptors it gets; the caller may close its own at once.
            targets: Their numbers in the trainer.
            callback: Called once, from the loop.
        """
        if self._failed:
            self._loop.after(0, lambda: callback(None), always=True)
            return
        number = self._next_id
        self._next_id += 1
        self._pending[number] = callback
        self._loop.keep_early = True
        self._link.send({"op": "fork", "id": number, "env": env, "fds": list(targets)}, tuple(fds))
        self._loop.after(self._timings.fork, lambda: self._overdue(number))

    def close(self) -> None:
        """Kill it: it has nothing to end in order and may be busy importing. Requests are answered with None."""
        self._failed = True
        self._end()

    def _on_frame(self, frame: dict[str, Any], fds: list[int]) -> None:
        close_all(fds)
        match frame.get("op"):
            case "ready":
                self.ready = True
                self._timer.cancel()
                self._on_ready()
            case "refused":
                self.refused = True
                self._fail(get(frame, "reason", str))
            case "forked":
                callback = self._pending.pop(get(frame, "id", int), None)
                self._loop.keep_early = bool(self._pending)
                if callback is not None:
                    callback(get(frame, "pid", int))
            case other:
                raise ProtocolError(f"the zygote says {str(other)[:40]!r}")

    def _overdue(self, number: int) -> None:
        if number in self._pending:
            self._fail("it did not answer in time")

    def _on_ended(self, status: ExitStatus) -> None:
        self.ended = True
        self._fail(f"it ended ({status})")

    def _fail(self, reason: str) -> None:
        if self._failed:
            return
        self._failed = True
        self.ready = False
        self._end()
        self._on_failed(reason)

    def _end(self) -> None:
        self._timer.cancel()
        self._link.close()
        if not self.ended:
            os.kill(self.pid, signal.SIGKILL)  # our child, not reaped: the pid is still its own
        pending, self._pending = list(self._pending.values()), {}
        self._loop.keep_early = False
        for callback in pending:
            callback(None)


def command(spec: LaunchSpec) -> list[str]:
    """Return the command of a trainer that is a new interpreter."""
    if not spec.rerun_first:
        return list(spec.argv)
    assert spec.script is not None
    value = json.dumps({"script": asdict(spec.script), "argv": spec.argv})
    return [spec.argv[0], *split_command(spec.argv)[0], "-c", _RERUN, value]
