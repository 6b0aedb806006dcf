"""What a state manager does when the supervisor is gone: end every process of the job, then itself.

PR_SET_PDEATHSIG ends the trainers too, but not what they forked. Trainers lead sessions of their own, and their
environment names the job, so that nothing of a trainer escapes unless it left both behind.
"""

import os
import signal
import time
from collections.abc import Iterable
from datetime import timedelta

from leto_strategy.system import (
    all_processes,
    is_resource_tracker,
    kill_processes,
    proc_start_time,
    process_environ_has,
)

_MANAGER = b"leto_strategy.memory.manager"


class SessionGuard:
    """The session leaders to kill, each with its start time, so that a reused pid is left alone."""

    def __init__(self, job: str) -> None:
        self._job_entry = b"LETO_JOB=" + job.encode()
        self._start_times: dict[int, int] = {}

    def watch(self, pids: Iterable[int]) -> None:
        """Replace the set of watched session leaders."""
        # A leader that has ended is watched with start time 0: its session may live on.
        known = self._start_times
        self._start_times = {pid: known.get(pid) or proc_start_time(pid) or 0 for pid in pids}

    def end_all(self, *, timeout: timedelta) -> bool:
        """SIGKILL everything of the job until nothing of it runs; False if something still does after `timeout`."""
        deadline = time.monotonic() + timeout.total_seconds()
        # First they are stopped: what is stopped neither forks nor leaves children behind, who would hang below init
        # and be found no more. When nothing new turns up, all are killed.
        stopped: set[int] = set()
        while (new := set(self._targets()) - stopped) and time.monotonic() < deadline:
            kill_processes(new, signal.SIGSTOP)
            stopped |= new
        kill_processes(stopped)
        while targets := self._targets():
            kill_processes(targets)
            if time.monotonic() > deadline:
                return False
            time.sleep(0.002)
        return True

    def _targets(self) -> list[int]:
        """Running processes of the watched sessions or with the job in their environment, and all below these."""
        stats = list(all_processes())
        reused = {s.pid for s in stats if s.pid in self._start_times and s.start_time != self._start_times[s.pid]}
        sessions = self._start_times.keys() - reused
        spared = {stat.pid for stat in stats if stat.pid in (1, os.getpid()) or _is_manager(stat.pid)}
        children: dict[int, list[int]] = {}
        for stat in stats:
            children.setdefault(stat.parent, []).append(stat.pid)
        found = [s.pid for s in stats if s.session in sessions or process_environ_has(s.pid, self._job_entry)]
        found = [pid for pid in found if pid not in spared]
        # Ends by itself as soon as those it serves are gone, and unlinks what they left in /dev/shm.
        spared |= {s.pid for s in stats if is_resource_tracker(s.pid)}
        found = [pid for pid in found if pid not in spared]
        ours = set(found)
        for pid in found:  # grows while it is walked
            new = [child for child in children.get(pid, ()) if child not in ours and child not in spared]
            found += new
            ours.update(new)
        return [stat.pid for stat in stats if stat.pid in ours and not stat.ended]


def _is_manager(pid: int) -> bool:
    """Another rank's manager has its own trainers to kill."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return _MANAGER in file.read().split(b"\0")
    except OSError:
        return False
