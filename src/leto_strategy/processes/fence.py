"""The fence: kills every process of some trainers and reaps each by its pid, until none is left (rule R3).

A forked child keeps a dead trainer's memory, and on a GPU its kernels, alive. Each trainer leads a session, and the
supervisor adopts every orphan below it, so that all that is left of a dead trainer is found among the supervisor's own
direct children: a parent's end hands its children on before it can be reaped itself. Nothing here waits: the fence goes
from reaped process to reaped process.

On a GPU the driver is asked in addition, when all are reaped, whether it still lists a context of a dead trainer.

One process is not killed but waited for: the resource tracker of `multiprocessing`, which unlinks the named semaphores
of spawned workers when all who could use them are gone.
"""

import os
from collections.abc import Callable, Iterable
from pathlib import Path

from leto_strategy.processes.launching import GENERATION_VARIABLE
from leto_strategy.processes.loop import Loop
from leto_strategy.system import (
    children_of,
    descendants,
    is_resource_tracker,
    kill_processes,
    proc_start_time,
    process_stat,
)

_LOOK_AGAIN_SECONDS = 0.02
_TRACKER_PATIENCE_SECONDS = 2.0
_DRIVER_LOOKS_SECONDS = 0.002

AwaitGone = Callable[[frozenset[int], Callable[[frozenset[int]], None]], None]
"""Looks once which of these pids a driver still lists, and gives them to the callback."""


class Fence:
    """Ends the processes of one or more trainers.

    Args:
        loop: The supervisor's loop; it reaps.
        pids: The trainers, all children of this process that are not reaped yet, or are reaped already.
        generation: Number of their generation, as in the environment of what they started.
        spared: Sessions (pids of trainers) of other generations that live on.
        spared_generations: Their numbers.
        unknown_too: Kill an orphan as well whose generation can't be told; else only what surely belongs to `pids`.
        is_pending: True while a process that belongs to these trainers may still appear.
        others_pending: True while a process of another generation may appear: an orphan, until it is known.
        timeout: Seconds after which what is left can't be killed.
        on_passed: Called once, with the number of processes reaped, when none is left.
        on_stuck: Called once instead, with a phrase that says what is left.
        await_gone: Asks the GPUs' driver for contexts of the trainers; None where there are none.
    """

    def __init__(
        self,
        loop: Loop,
        pids: Iterable[int],
        *,
        generation: int,
        spared: frozenset[int],
        spared_generations: frozenset[int],
        unknown_too: bool,
        is_pending: Callable[[], bool],
        others_pending: Callable[[], bool],
        timeout: float,
        on_passed: Callable[[int], None],
        on_stuck: Callable[[str], None],
        await_gone: AwaitGone | None = None,
    ) -> None:
        self._loop = loop
        self._leaders = set(pids)
        self._spared = spared
        self._own_entry = _environ_entry(generation)
        self._spared_entries = {_environ_entry(number) for number in spared_generations}
        self._unknown_too = unknown_too
        self._is_pending = is_pending
        self._others_pending = others_pending
        self._on_passed = on_passed
        self._on_stuck = on_stuck
        self._await_gone = await_gone
        self._listed: frozenset[int] | None = None  # by the driver; None until all are reaped
        self._num_reaped = 0
        self._done = False
        self._impatient = False  # resource trackers are killed, too
        self._patience = loop.after(_TRACKER_PATIENCE_SECONDS, self._lose_patience, always=True)
        self._seen: dict[int, int | None] = {}  # pid -> start time of what was below the leaders
        # The kill comes first: from here on the generation does no more work. Where a stray must be told from other
        # generations' strays, the tree is looked at before it falls apart.
        if not unknown_too:
            for pid in self._leaders & loop.known_pids:
                self._seen.update((child, proc_start_time(child)) for child in tree(pid))
        kill_processes(self._leaders & loop.known_pids)
        self._timeout = loop.after(timeout, self._stuck, always=True)
        self._again = loop.after(0, self.look, always=True)

    def add(self, pid: int) -> None:
        """One more trainer of the generation has appeared."""
        self._leaders.add(pid)
        kill_processes([pid])

    def reaped(self, pid: int) -> None:
        """A child was reaped: one of the leaders, or an orphan."""
        if not self._done:
            self._num_reaped += 1
            self.look()

    def look(self) -> None:
        """Kill what is there; pass when nothing is."""
        if self._done or self._listed is not None:
            return
        self._again.cancel()
        leaders_left = self._leaders & self._loop.known_pids
        if leaders_left or self._is_pending():
            # Their children come to us when they are gone; killing what is here already only makes it faster.
            self._kill_strays()
            self._again = self._loop.after(_LOOK_AGAIN_SECONDS, self.look, always=True)
            return
        if self._kill_strays() == 0 and not (self._unknown_too and self._others_pending()):
            self._on_listed(frozenset()) if self._await_gone is None else self._ask_driver()
        else:
            self._again = self._loop.after(_LOOK_AGAIN_SECONDS, self.look, always=True)

    def cancel(self) -> None:
        """Look no more; another fence takes over."""
        self._finish()

    def _ask_driver(self) -> None:
        assert self._await_gone is not None
        if self._listed is None:
            self._listed = frozenset(self._leaders)
        self._await_gone(frozenset(self._leaders), self._on_listed)

    def _on_listed(self, listed: frozenset[int]) -> None:
        if self._done:
            return
        self._listed = listed
        if listed:
            self._again = self._loop.after(_DRIVER_LOOKS_SECONDS, self._ask_driver, always=True)
        else:
            self._finish()
            self._on_passed(self._num_reaped)

    def _kill_strays(self) -> int:
        strays = [pid for pid in own_children() if pid not in self._loop.known_pids and self._is_ours(pid)]
        left = [pid for pid, start in self._seen.items() if start is not None and proc_start_time(pid) == start]
        below = [child for pid in strays for child in tree(pid)]
        doomed = {*strays, *left, *below}
        kill_processes(doomed if self._impatient else (pid for pid in doomed if not is_resource_tracker(pid)))
        return len(strays) + len(left)

    def _is_ours(self, pid: int) -> bool:
        stat = process_stat(pid)
        if stat is None or stat.session in self._spared:
            return False
        if stat.session in self._leaders or pid in self._seen:
            return True
        # The environment is the one of the last exec: what the zygote's children forked tells nothing there.
        entries = _environ(pid)
        return self._own_entry in entries or (
            self._unknown_too and not self._others_pending() and self._spared_entries.isdisjoint(entries)
        )

    def _lose_patience(self) -> None:
        self._impatient = True

    def _stuck(self) -> None:
        if not self._done:
            self._finish()
            if self._listed is None:
                pids = sorted(self._leaders & self._loop.known_pids) or own_children()
                self._on_stuck(f"processes {pids} can't be killed")
            else:
                self._on_stuck(f"processes {sorted(self._listed)} have ended, but keep their contexts on a GPU")

    def _finish(self) -> None:
        self._done = True
        self._timeout.cancel()
        self._again.cancel()
        self._patience.cancel()


def own_children() -> list[int]:
    """Direct children of this process, zombies included.

    The kernel's list is exact here: only this thread reaps, so nothing leaves it while it is read.
    """
    pid = os.getpid()
    children = _kernel_children(pid)
    return children_of(pid) if children is None else children


def tree(pid: int) -> list[int]:
    """Processes below `pid`, as far as they can be seen while they run."""
    found = _kernel_children(pid)
    if found is None:
        return descendants(pid)
    for child in found:  # grows while it is walked
        found.extend(_kernel_children(child) or ())
    return found


def _kernel_children(pid: int) -> list[int] | None:
    """What /proc says without a look at every process; None where this kernel does not say it."""
    children: list[int] = []
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            children += map(int, Path(f"/proc/{pid}/task/{task}/children").read_bytes().split())
    except (FileNotFoundError, ProcessLookupError):
        return children if os.path.exists(f"/proc/self/task/{os.getpid()}/children") else None
    return children


def _environ_entry(generation: int) -> bytes:
    return f"{GENERATION_VARIABLE}={generation}".encode()


def _environ(pid: int) -> set[bytes]:
    """Entries of the environment that a process was started with; none where it can't be read."""
    try:
        return set(Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))
    except OSError:
        return set()
