"""The supervisor's event loop: sockets, timers, ends of children. One thread, and nothing in it ever sleeps.

Timers run on a clock that can be paused, so that a suspended job meets no timeout; the fence's own run on (`always`).
Children are reaped one by one, by pid, as SIGCHLD announces them: a child that is known goes to its owner, one that was
adopted from a dead trainer only to `on_reaped`.
"""

import heapq
import itertools
import os
import selectors
import signal
import time
from collections.abc import Callable
from typing import Protocol

from leto_strategy.processes.messages import ExitStatus


class HasFileno(Protocol):
    """Anything a selector takes."""

    def fileno(self) -> int:
        """The descriptor to watch."""
        ...


class Timer:
    """One pending call; `cancel` may be called at any time, also after it ran."""

    __slots__ = ("always", "callback", "due")

    def __init__(self, due: float, callback: Callable[[], object], always: bool) -> None:
        self.due = due
        self.callback: Callable[[], object] | None = callback
        self.always = always

    def cancel(self) -> None:
        """Make sure that it does not run any more."""
        self.callback = None


class Loop:
    """Waits for everything the supervisor waits for. Create it in the main thread; close it there."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._timers: list[tuple[float, int, Timer]] = []
        self._order = itertools.count()
        self._known: dict[int, Callable[[ExitStatus], None]] = {}
        self._early: dict[int, ExitStatus] = {}
        self._running = True
        self._paused_at: float | None = None
        self._paused_seconds = 0.0
        self.on_reaped: Callable[[int], None] = lambda pid: None
        """Called with every child that was reaped, known or adopted, after its owner."""
        self.keep_early = False
        """Remember orphans that were reaped: one of them may be a child whose pid is still on its way to us."""
        self.on_signal: Callable[[int], None] = lambda signum: None
        """Called with a signal this process received."""
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._signals: list[int] = []
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda signum, frame: None)
        self.watch(self._wake_read, self._on_wake)

    def handle_signals(self, *signums: int) -> None:
        """Report these signals through `on_signal` from now on."""
        for signum in signums:
            signal.signal(signum, lambda number, frame: self._signals.append(number))

    # Descriptors

    def watch(self, source: HasFileno | int, callback: Callable[[], None], *, write: bool = False) -> None:
        """Call `callback` while `source` is readable, or, with `write`, readable or writable."""
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if write else 0)
        try:
            self._selector.modify(source, events, callback)
        except KeyError:
            self._selector.register(source, events, callback)

    def forget(self, source: HasFileno | int) -> None:
        """Watch `source` no more; call it before the source is closed."""
        try:
            self._selector.unregister(source)
        except (KeyError, ValueError):
            pass

    # Timers

    def now(self) -> float:
        """Seconds on a monotonic clock that stands still while the loop is paused."""
        return (self._paused_at or time.monotonic()) - self._paused_seconds

    def after(self, seconds: float, callback: Callable[[], object], *, always: bool = False) -> Timer:
        """Call `callback` once, `seconds` from now; with `always` also while the clock is paused."""
        timer = Timer((time.monotonic() if always else self.now()) + seconds, callback, always)
        heapq.heappush(self._timers, (timer.due, next(self._order), timer))
        return timer

    def pause(self) -> None:
        """Stop the clock."""
        if self._paused_at is None:
            self._paused_at = time.monotonic()

    def unpause(self) -> None:
        """Let the clock go on where it stopped."""
        if self._paused_at is not None:
            self._paused_seconds += time.monotonic() - self._paused_at
            self._paused_at = None

    # Children

    @property
    def known_pids(self) -> set[int]:
        """Children that have an owner and are not reaped yet."""
        return set(self._known)

    def own(self, pid: int, callback: Callable[[ExitStatus], None]) -> None:
        """Call `callback` when the child `pid` has ended and is reaped; soon, if it was reaped before."""
        if (status := self._early.pop(pid, None)) is not None:
            self.after(0, lambda: callback(status), always=True)
        else:
            self._known[pid] = callback

    def reap(self) -> None:
        """Reap every child that has ended, each by its pid, and tell its owner."""
        while True:
            try:
                found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if found is None:
                return
            pid = found.si_pid
            os.waitpid(pid, 0)
            status = ExitStatus.of(found)
            owner = self._known.pop(pid, None)
            if owner is not None:
                owner(status)
            elif self.keep_early:
                self._early[pid] = status
            else:
                self._early.clear()
            self.on_reaped(pid)

    # Running

    def run(self) -> None:
        """Dispatch until `stop` is called."""
        while self._running:
            self.turn()

    def turn(self) -> None:
        """Wait for the next thing, then handle everything that is due."""
        for key, _ in self._selector.select(self._timeout()):
            # A callback before this one may have closed it, and its number may already be another's.
            if self._selector.get_map().get(key.fd) is key:
                key.data()
        self._run_timers()

    def stop(self) -> None:
        """End `run` after this turn."""
        self._running = False

    def close(self) -> None:
        """Give back the loop's own descriptors and the signal handling."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._selector.close()
        os.close(self._wake_read)
        os.close(self._wake_write)

    def _timeout(self) -> float | None:
        while self._timers and self._timers[0][2].callback is None:
            heapq.heappop(self._timers)
        lefts = [self._left(timer) for _, _, timer in self._timers if timer.callback is not None]
        left = min((left for left in lefts if left is not None), default=None)
        return None if left is None else max(0.0, left)

    def _left(self, timer: Timer) -> float | None:
        if timer.always:
            return timer.due - time.monotonic()
        return None if self._paused_at is not None else timer.due - self.now()

    def _run_timers(self) -> None:
        due = [entry for entry in self._timers if (left := self._left(entry[2])) is not None and left <= 0]
        for entry in sorted(due):
            callback, entry[2].callback = entry[2].callback, None
            if callback is not None:
                callback()

    def _on_wake(self) -> None:
        try:
            os.read(self._wake_read, 4096)
        except BlockingIOError:
            pass
        self.reap()
        while self._signals:
            self.on_signal(self._signals.pop(0))
