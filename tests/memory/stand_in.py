"""A stand-in for the supervisor, in a thread: it starts managers, keeps their mirror, and replaces those that die."""

import contextlib
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from leto_strategy.memory.mirror import CatalogueMirror
from leto_strategy.memory.pool import ResilientMemoryPool

SECONDS = timedelta(seconds=1)

# Runs a manager after a prelude. It SIGKILLs itself at a step of its next change ("created"), or when it has sent half
# of the first message after that step ("half of created").
ODD_MANAGER = """
import os, signal, sys
from datetime import timedelta
from leto_strategy.memory import clients, manager, memfd, wire

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

fd, step, prelude = sys.argv[1:]
exec(prelude)
half = step.removeprefix("half of ")

def flush_half(self):
    data, fds = self._pending[0]
    self.socket.sendmsg([data[: len(data) // 2]], wire._rights(fds))
    die()

def reach(name):
    if name != half:
        return
    if half == step:
        die()
    wire.FrameConnection.flush = flush_half

sys.exit(manager.main(["--control-fd", fd], reach=reach))
"""


def eventually(condition: Callable[[], bool], *, seconds: float = 5.0) -> bool:
    """Whether `condition` becomes true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.002)
    return True


class Rank:
    """One rank's manager, its replacements, and the mirror."""

    def __init__(self, *, prelude: str = "", device: dict[str, Any] | None = None) -> None:
        self.prelude, self.device = prelude, device
        self.job = secrets.token_hex(8)
        self.address = f"leto-test/{self.job}"
        self.mirror = CatalogueMirror()
        self.num_managers = 0
        self.replace = True
        self.dies_at = ""  # for the next manager to be started
        self.acknowledging = threading.Event()
        self.acknowledging.set()
        self.lock = threading.RLock()
        self.process: subprocess.Popen[bytes] | None = None
        self._stop_reader, self._stop_writer = os.pipe()
        self._pools: list[ResilientMemoryPool] = []
        self._thread = threading.Thread(target=self._pump)

    def start(self) -> "Rank":
        self._start_manager()
        self._thread.start()
        assert eventually(lambda: self.mirror.manager_pid is not None), "the manager does not listen"
        return self

    def pool(
        self, *, writable: bool = True, timeout: timedelta = 10 * SECONDS, **options: object
    ) -> ResilientMemoryPool:
        pool = ResilientMemoryPool.connect(self.address, timeout=timeout, writable=writable, **options)  # type: ignore[arg-type]
        self._pools.append(pool)
        return pool

    def kill_manager(self, *, dies_at: str = "") -> None:
        """SIGKILL it and wait for its successor."""
        assert self.process is not None
        self.dies_at = dies_at
        count, pid = self.num_managers, self.process.pid
        os.kill(pid, signal.SIGKILL)
        assert eventually(lambda: self.num_managers > count and self.mirror.manager_pid not in (None, pid))

    def close(self) -> None:
        self.replace = False
        for pool in self._pools:
            pool.close()
        with self.lock:
            self.mirror.bye()
        os.write(self._stop_writer, b"x")
        self._thread.join(5)
        if self.process is not None and self.process.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(2)
            self.process.kill()
            self.process.wait()
        self.mirror.close()
        os.close(self._stop_reader)
        os.close(self._stop_writer)

    def _start_manager(self) -> None:
        ours, theirs = socket.socketpair()
        fd = str(theirs.fileno())
        command = [sys.executable, "-I"]
        if not self.dies_at and not self.prelude:
            command += ["-m", "leto_strategy.memory.manager", "--control-fd", fd]
        else:
            command += ["-c", ODD_MANAGER, fd, self.dies_at, self.prelude]
        self.dies_at = ""
        with theirs:
            self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        names = {"job": self.job, "address": self.address, "token": "secret"}
        self.mirror.configure(ours, rank=0, device=self.device, timeout=5 * SECONDS, **names)
        self.num_managers += 1

    def _pump(self) -> None:
        while True:
            poller = select.poll()
            poller.register(self._stop_reader, select.POLLIN)
            with self.lock:
                fd = self.mirror.fileno()
            if fd >= 0:
                poller.register(fd, select.POLLIN)
            ready = [ready_fd for ready_fd, _ in poller.poll(1000)]
            if self._stop_reader in ready:
                return
            if fd in ready:
                self.acknowledging.wait(30)
                with self.lock:
                    if not self.mirror.process() and self.replace:
                        assert self.process is not None
                        self.process.wait()
                        self._start_manager()


def open_fds(pid: int | str = "self") -> set[str]:
    found = set()
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            found.add(f"{fd} {os.readlink(f'/proc/{pid}/fd/{fd}')}")
    return {item for item in found if "/proc/" not in item}
