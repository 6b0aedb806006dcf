"""The state managers of a job and the supervisor's mirrors of what they hold.

A manager that dies ends nothing: the next one adopts everything from the mirror, under the same address. Behind the
fence the words are read, and lowered, through the mirrors as well.
"""

import os
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

from leto_strategy.config import JOB_VARIABLE
from leto_strategy.errors import PoolError, ProtocolError
from leto_strategy.faults import LOSSES, Fault, FaultSlots
from leto_strategy.marks import WORDS_REGION
from leto_strategy.memory.mirror import CatalogueMirror
from leto_strategy.memory.places import device_of
from leto_strategy.processes.loop import Loop, Timer
from leto_strategy.processes.messages import ExitStatus, LaunchSpec
from leto_strategy.processes.starting import spawn
from leto_strategy.processes.timings import Timings
from leto_strategy.progress import Activity, ProgressPage
from leto_strategy.recovery.decision import Decision, RankView, lowered
from leto_strategy.recovery.losses import losses_of
from leto_strategy.recovery.records import RecordKind, complete_steps

REPLACEMENTS_MAX = 10
"""Replacements of one rank's manager within one job; more means that managers can't run here."""

_CONFIGURE_TIMEOUT = timedelta(seconds=5)


class RankMemory:
    """One rank's manager and mirror.

    Args:
        group: Whose it is.
        rank: The rank.
    """

    def __init__(self, group: "ManagerGroup", rank: int) -> None:
        self._group = group
        self.rank = rank
        self.device = group.spec.devices[rank] if group.spec.devices else "cpu"
        self.mirror = CatalogueMirror()
        self.pid: int | None = None
        self.num_starts = 0
        self._fd = -1
        self._timer: Timer | None = None

    @property
    def address(self) -> str:
        """Abstract address of the manager; the same for all that follow each other."""
        return f"leto-memory/{os.getuid()}/{self._group.spec.job}/{self.rank}"

    @property
    def page(self) -> ProgressPage | None:
        """The rank's progress page, None before any trainer asked for it."""
        try:
            return ProgressPage(self.mirror.buffer("progress"))
        except PoolError:
            return None

    def start(self) -> None:
        """Start a manager, with what its predecessor held."""
        group = self._group
        self.num_starts += 1
        ours, theirs = socket.socketpair()
        with theirs:
            argv = [sys.executable, "-I", "-m", "leto_strategy.memory.manager", "--control-fd", str(theirs.fileno())]
            env = {**group.base_env, JOB_VARIABLE: group.spec.job}
            self.pid = spawn(argv, env=env, cwd="/", fds=[theirs.fileno()], stdio=group.stdio, outlives=True)
        group.loop.own(self.pid, self._on_ended)
        try:
            self.mirror.configure(
                ours,
                job=group.spec.job,
                rank=self.rank,
                address=self.address,
                device=device_of(self.device, handle_bytes=group.spec.handle_bytes),
                timeout=_CONFIGURE_TIMEOUT,
            )
        except OSError:
            self._kill()
            return
        self._fd = self.mirror.fileno()
        group.loop.watch(self._fd, self._on_event)
        self._timer = group.loop.after(group.timings.manager, self._kill)

    def stop(self) -> None:
        """Ask the manager to end; one that does not listen yet has nothing to end in order."""
        self._forget()
        if self.mirror.manager_pid is None:
            self._kill()
        else:
            self.mirror.bye()

    def _on_event(self) -> None:
        was_listening = self.mirror.manager_pid is not None
        try:
            alive = self.mirror.process()
        except ProtocolError:
            alive = False
        if not alive:
            self._forget()
            self._kill()
            return
        self._group.loop.watch(self._fd, self._on_event, write=self.mirror.wants_write)
        if self.mirror.manager_pid is not None and not was_listening:
            if self._timer is not None:
                self._timer.cancel()
            self._group.on_listening(self)

    def _on_ended(self, status: ExitStatus) -> None:
        pid, self.pid = self.pid, None
        self._forget()
        if self._timer is not None:
            self._timer.cancel()
        self._group.on_ended(self, pid or 0, status)

    def _forget(self) -> None:
        if self._fd >= 0:
            self._group.loop.forget(self._fd)
            self._fd = -1

    def _kill(self) -> None:
        if self.pid is not None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


class ManagerGroup:
    """All managers of a job.

    Args:
        loop: The supervisor's loop.
        spec: The job.
        timings: Waits.
        base_env: Environment of the managers.
        stdio: Their standard input, output and error.
        on_failed: Called with rank, pid and cause when a manager has ended; a new one is on its way.
        on_replaced: Called with rank and pid when a new one listens.
        on_hopeless: Called with a text when managers can't be kept running.
    """

    def __init__(
        self,
        loop: Loop,
        spec: LaunchSpec,
        *,
        timings: Timings,
        base_env: dict[str, str],
        stdio: tuple[int, int, int],
        on_failed: Callable[[int, int, str], object],
        on_replaced: Callable[[int, int], object],
        on_hopeless: Callable[[str], object],
    ) -> None:
        self.loop = loop
        self.spec = spec
        self.timings = timings
        self.base_env = base_env
        self.stdio = stdio
        self.watched_pids: list[int] = []
        self.ranks = [RankMemory(self, rank) for rank in range(spec.world)] if spec.needs_memory else []
        self._on_failed = on_failed
        self._on_replaced = on_replaced
        self._on_hopeless = on_hopeless
        self._stopping = False

    @property
    def pids(self) -> list[int]:
        """Pids of the managers that run."""
        return [memory.pid for memory in self.ranks if memory.pid is not None]

    def start(self) -> None:
        """Start one manager for each rank."""
        for memory in self.ranks:
            memory.start()

    def address(self, rank: int) -> str:
        """Address of a rank's manager, "" where memory is not retained."""
        return self.ranks[rank].address if self.ranks else ""

    def watch(self, pids: list[int]) -> None:
        """Tell all managers which sessions end with the supervisor."""
        self.watched_pids = pids
        for memory in self.ranks:
            if memory.mirror.manager_pid is not None:  # else as soon as it listens
                memory.mirror.watch(pids)

    def stop(self) -> None:
        """Ask all managers to end; none is replaced any more."""
        self._stopping = True
        for memory in self.ranks:
            memory.stop()

    def close(self) -> None:
        """Let go of all memory; only when no process of the job is left."""
        for memory in self.ranks:
            memory.mirror.close()

    # Words and records. Reading to decide, and every write, only behind the fence (R3).

    def views(self) -> list[RankView]:
        """Return what each rank's words and records say."""
        return [_view(memory) for memory in self.ranks]

    def lower(self, decision: Decision) -> None:
        """Lower each word to what the decision leaves of it (R5)."""
        for memory in self.ranks:
            page = memory.page
            marker = page.marker if page is not None else None
            if page is not None and (lower := lowered(marker, decision)) != marker:
                page.rewrite(lower)

    def prepare_pages(self, generation: int) -> None:
        """Set the telemetry for the trainers that are about to be promoted."""
        for memory in self.ranks:
            if (page := memory.page) is not None:
                page.entered_ns = 0
                page.pages_rebuilt = page.localise_us = page.rebuild_us = 0
                page.activity = Activity.STARTING
                page.generation = generation

    def page(self, rank: int) -> ProgressPage | None:
        """A rank's progress page; its telemetry may be read at any time."""
        return self.ranks[rank].page if self.ranks else None

    def arm(self, fault: Fault) -> None:
        """Arm a fault in a rank's page.

        Raises:
            ValueError: the rank has no page, or no free slot.
        """
        try:
            buffer = self.ranks[fault.rank].mirror.buffer("progress")
        except (IndexError, PoolError):
            raise ValueError(f"rank {fault.rank} has no retained memory to arm a fault in (yet)") from None
        if fault.fault in LOSSES and not self._is_protected(fault.rank):
            raise ValueError(f"the state of rank {fault.rank} is not protected: use LetoStrategy(protection='on')")
        FaultSlots(buffer).arm(fault)

    def _is_protected(self, rank: int) -> bool:
        try:
            self.ranks[rank].mirror.buffer(WORDS_REGION)
        except PoolError:
            return False
        return True

    def fired_ns(self, rank: int) -> int:
        """CLOCK_MONOTONIC time in ns of the last armed fault that happened on a rank, 0 for none."""
        try:
            return FaultSlots(self.ranks[rank].mirror.buffer("progress")).fired_ns if self.ranks else 0
        except PoolError:
            return 0

    # What happens to them.

    def on_listening(self, memory: RankMemory) -> None:
        """A manager listens."""
        memory.mirror.watch(self.watched_pids)
        if memory.num_starts > 1:
            self._on_replaced(memory.rank, memory.pid or 0)

    def on_ended(self, memory: RankMemory, pid: int, status: ExitStatus) -> None:
        """A manager has ended: start the next one, unless the job ends."""
        if self._stopping:
            return
        self._on_failed(memory.rank, pid, str(status))
        if memory.num_starts > REPLACEMENTS_MAX:
            self._on_hopeless(f"the state manager of rank {memory.rank} ended {memory.num_starts} times ({status})")
        else:
            memory.start()


def _view(memory: RankMemory) -> RankView:
    def buffer_of(name: str) -> memoryview:
        try:
            return memory.mirror.buffer(name)
        except PoolError as error:
            raise KeyError(name) from error

    page = memory.page
    if page is None:
        return RankView(None, frozenset(), frozenset())
    steps = complete_steps(buffer_of)
    state_lost, gradients_lost = losses_of(buffer_of, page.marker)
    return RankView(
        page.marker,
        steps[RecordKind.START],
        steps[RecordKind.MID],
        word_lost=page.lost,
        gradients_lost=gradients_lost,
        state_lost=state_lost,
    )
