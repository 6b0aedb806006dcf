"""Operating-system primitives of the daemons: signals at a parent's death, /proc, pidfds, credentials, limits.

Standard library and ctypes only, so that a daemon that needs it starts in milliseconds. It holds no state and takes no
decision: whom to kill and when belongs to the supervisor and to the state manager. Linux only.
"""

import ctypes
import errno
import itertools
import os
import re
import resource
import select
import signal
import socket
import struct
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from datetime import timedelta
from typing import NamedTuple

from leto_strategy.errors import ResourceError

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PF_EXITING = 0x4
_RESOURCE_TRACKER = re.compile(rb"from multiprocessing\.resource_tracker import main;\s*main\(\d+\)")
_libc = ctypes.CDLL(None, use_errno=True)


class ProcessStat(NamedTuple):
    """What ``/proc/<pid>/stat`` says of one process."""

    pid: int
    state: str  # one letter, "Z" for a zombie
    parent: int
    session: int
    num_threads: int
    start_time: int  # clock ticks since boot; (pid, start_time) names a process for ever, a pid alone does not

    @property
    def ended(self) -> bool:
        """True once no thread runs any more. A zombie leader whose other threads still run has not ended."""
        return self.state in "ZX" and self.num_threads <= 1


class PeerCredentials(NamedTuple):
    """Who connected a unix socket, as the kernel recorded it at connect() or socketpair()."""

    pid: int
    uid: int
    gid: int


def set_parent_death_signal(signum: int, *, expected_parent: int | None = None) -> None:
    """Ask the kernel to send `signum` to this process when the *thread* that forked it ends.

    A parent that was gone before the call sends nothing any more, so a caller that must not outlive its parent passes
    `expected_parent`, which is compared after the signal is armed.

    Args:
        signum: the signal, or 0 to disarm.
        expected_parent: pid of the parent; None skips the check.

    Raises:
        ProcessLookupError: the parent is another one already.
        OSError: the kernel refused.
    """
    _prctl(_PR_SET_PDEATHSIG, signum)
    if expected_parent is not None and not parent_is(expected_parent):
        raise ProcessLookupError(errno.ESRCH, f"the parent {expected_parent} ended before this process was set up")


def parent_is(pid: int) -> bool:
    """True while `pid` is this process's parent (an orphan gets another one: init or a subreaper)."""
    return os.getppid() == pid


def become_subreaper(enabled: bool = True) -> None:
    """Make this process the one that adopts, and can wait for, all orphans among its descendants; or no more.

    Raises:
        OSError: the kernel refused.
    """
    _prctl(_PR_SET_CHILD_SUBREAPER, int(enabled))


def process_stat(pid: int) -> ProcessStat | None:
    """Read ``/proc/<pid>/stat``; None when there is no such process (any more)."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    # The command stands in parentheses and may itself hold spaces and parentheses: the last one ends it.
    fields = text[text.rindex(b")") + 2 :].split()
    return ProcessStat(
        pid=pid,
        state=fields[0].decode(),
        parent=int(fields[1]),
        session=int(fields[3]),
        num_threads=int(fields[17]),
        start_time=int(fields[19]),
    )


def is_exiting(pid: int) -> bool:
    """Whether the main thread of a process has begun to exit, long before the process can be reaped.

    Giving back a GPU's memory takes a tenth of a second and more. False where there is no such process.
    """
    try:
        with open(f"/proc/{pid}/task/{pid}/stat", "rb") as file:
            text = file.read()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return False
    return bool(int(text[text.rindex(b")") + 2 :].split()[6]) & _PF_EXITING)


def all_processes() -> Iterator[ProcessStat]:
    """Every process that /proc shows, in one pass. One that is forked meanwhile may be missed: repeat until empty."""
    for name in os.listdir("/proc"):
        if name.isdecimal() and (stat := process_stat(int(name))) is not None:
            yield stat


def session_members(sid: int, *, include_ended: bool = True) -> list[int]:
    """Pids of the processes in session `sid`.

    Args:
        sid: session id, which is the pid of its leader.
        include_ended: also those that have ended and wait to be reaped (the fence counts them as there).
    """
    return [stat.pid for stat in all_processes() if stat.session == sid and (include_ended or not stat.ended)]


def children_of(pid: int) -> list[int]:
    """Pids of the direct children of `pid`, zombies included."""
    return [stat.pid for stat in all_processes() if stat.parent == pid]


def descendants(pid: int) -> list[int]:
    """Pids of all processes below `pid`, parents before children, zombies included, `pid` not.

    A child whose parent has ended hangs below its adopter and is found there only.
    """
    children: dict[int, list[int]] = {}
    for stat in all_processes():
        children.setdefault(stat.parent, []).append(stat.pid)
    found = list(children.get(pid, ()))
    for parent in found:  # grows while it is walked: breadth first
        found.extend(children.get(parent, ()))
    return found


def process_environ_has(pid: int, entry: bytes) -> bool:
    """True if the environment `pid` was exec'ed with holds exactly `entry`, ``b"KEY=VALUE"``.

    False as well where it can't be read: gone, a zombie, or another user's.
    """
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return entry in file.read().split(b"\0")
    except OSError:
        return False


def is_resource_tracker(pid: int) -> bool:
    """True if `pid` is the helper of `multiprocessing` that unlinks what killed processes left in /dev/shm.

    It was exec'ed with nothing but a pipe and standard error, so it holds no memory of whom it serves, and it ends by
    itself when the last of these is gone. Killed along with them, it leaves named semaphores behind for ever.
    """
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            arguments = file.read().split(b"\0")
    except OSError:
        return False
    return any(before == b"-c" and _RESOURCE_TRACKER.fullmatch(code) for before, code in itertools.pairwise(arguments))


def proc_start_time(pid: int) -> int | None:
    """Start of `pid` in clock ticks since boot, None if it is gone. Compare it to know that a pid was not reused."""
    stat = process_stat(pid)
    return None if stat is None else stat.start_time


def tracer_pid(pid: int) -> int:
    """Pid of the debugger or tracer attached to `pid`; 0 if none, or if `pid` is gone."""
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            for line in file:
                if line.startswith(b"TracerPid:"):
                    return int(line.split()[1])
    except OSError:
        pass
    return 0


def kill_processes(pids: Iterable[int], signum: int = signal.SIGKILL) -> list[int]:
    """Send `signum` to each of `pids` and go on past those that are gone or that this user may not signal.

    Returns:
        The pids that were signalled.
    """
    signalled = []
    for pid in pids:
        assert pid > 1, f"pid {pid} would address a process group or init"
        try:
            os.kill(pid, signum)
        except (ProcessLookupError, PermissionError):
            continue
        signalled.append(pid)
    return signalled


def open_pidfd(pid: int) -> int | None:
    """A pidfd of `pid` (close-on-exec), None when it is gone. Readable once the whole process has ended."""
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return None


def signal_pidfd(pidfd: int, signum: int) -> bool:
    """Send `signum` through a pidfd, which never hits another process by a reused pid; False if it has ended."""
    try:
        signal.pidfd_send_signal(pidfd, signum)
    except ProcessLookupError:
        return False
    return True


def pidfd_ended(pidfd: int) -> bool:
    """True once the process behind the pidfd has ended (reaped or not)."""
    return not wait_pidfds([pidfd], timeout=timedelta(0))


def wait_pidfds(pidfds: Iterable[int], *, timeout: timedelta) -> list[int]:
    """Wait until every process has ended or `timeout` is over; the pidfds of those that still run."""
    running = set(pidfds)
    poller = select.poll()
    for pidfd in running:
        poller.register(pidfd, select.POLLIN)
    deadline = time.monotonic() + timeout.total_seconds()
    while running:
        left_ms = max(0.0, deadline - time.monotonic()) * 1000
        ready = poller.poll(left_ms)
        for pidfd, _ in ready:
            poller.unregister(pidfd)
            running.discard(pidfd)
        if not ready and left_ms == 0:
            break
    return sorted(running)


def peer_credentials(sock: socket.socket) -> PeerCredentials:
    """Credentials of the other end of a connected unix socket (SO_PEERCRED), which the other end can't forge.

    Raises:
        OSError: not a connected unix socket.
    """
    size = struct.calcsize("3i")
    return PeerCredentials(*struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)))


def raise_file_limit(minimum: int) -> int:
    """Raise the soft limit of open files to at least `minimum`, and the hard limit too where that is allowed.

    Args:
        minimum: number of file descriptors this process must be able to hold.

    Returns:
        The soft limit that holds now.

    Raises:
        ResourceError: the hard limit is lower and may not be raised; names ``ulimit -n``.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    if soft == unlimited or soft >= minimum:
        return soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (minimum, hard if hard == unlimited else max(hard, minimum)))
    except (ValueError, OSError):
        raise ResourceError(
            errno.EMFILE,
            f"this job needs {minimum} open files a process, but the hard limit is {hard}: raise it with "
            f"`ulimit -Hn {minimum}` (as root, or `nofile` in /etc/security/limits.conf) and check with `ulimit -n`",
        ) from None
    return minimum


def allow_many_files() -> None:
    """Raise the soft limit of open files to the hard limit: memory of a GPU may come in thousands of descriptors."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # "unlimited" where the kernel has a lower maximum
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, ctypes.c_ulong(value), ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0)) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl({option}, {value}): {os.strerror(code)}")
