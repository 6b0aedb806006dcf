"""The supervisor's copy of one rank's catalogue, with duplicates of all fds: what lets a new manager take over.

It outlives managers: `configure` gives each one a connection and what its predecessor had told. Every change is
acknowledged once it is held here, before which the manager tells it to nobody. The supervisor also reads and lowers the
words through it, and reads the records, as memory of its own.
"""

import contextlib
import mmap
import os
import socket
from collections import deque
from datetime import timedelta
from typing import Any

from leto_strategy.errors import PoolError, ProtocolError
from leto_strategy.memory import wire
from leto_strategy.memory.backend import DEFAULT_SHARD, Place, Region
from leto_strategy.memory.catalogue import Change
from leto_strategy.memory.holdings import Holdings, close_fds, handles_of
from leto_strategy.memory.manager import CONTROL_LIMITS

_RECEIVES_MAX = 256  # rounds of at most 2 MiB each; a dead manager's socket holds far less


class CatalogueMirror:
    """One rank's mirror. Use: `configure`, then `process` whenever `fileno()` is readable, again after each manager.

    `process` never blocks. No method but `configure` waits for the manager.
    """

    def __init__(self) -> None:
        self._holdings = Holdings()
        self._connection: wire.FrameConnection | None = None
        self._mappings: dict[int, mmap.mmap] = {}
        self.manager_pid: int | None = None  # of a manager that listens; None before that and after its end

    @property
    def version(self) -> int:
        """Version of the catalogue (rule R17)."""
        return self._holdings.catalogue.version

    @property
    def regions(self) -> dict[tuple[str, str], Region]:
        """All regions by (name, shard); `created` is False in each."""
        entries = self._holdings.catalogue.regions.values()
        return {entry.spec.key: Region(entry.spec, entry.segment, entry.offset_bytes, False) for entry in entries}

    @property
    def wants_write(self) -> bool:
        """True while something for the manager waits for room: register for writing too, then call `process`."""
        return self._connection is not None and self._connection.wants_write

    def fileno(self) -> int:
        """The fd of the connection to the current manager, for a selector; -1 without one."""
        return -1 if self._connection is None else self._connection.fileno()

    def configure(
        self,
        sock: socket.socket,
        *,
        job: str,
        rank: int,
        address: str,
        token: str = "",
        device: dict[str, Any] | None = None,
        timeout: timedelta,
    ) -> None:
        """Begin with a manager: `sock` is this side of its control socket, which the mirror owns from now on.

        What the predecessor had sent is applied first; call it only when that one has ended.

        Args:
            sock: this end of the socketpair whose other end is the manager's ``--control-fd``.
            job: name of the job, as in LETO_JOB of its processes.
            rank: the manager's rank.
            address: abstract address to listen on.
            token: what clients that send one must send.
            device: where the rank trains, as in `memory.places`; None is the CPU.
            timeout: for the manager to take the frame, whose size is that of the catalogue.

        Raises:
            TimeoutError: the manager did not read.
            OSError: the manager has ended.
        """
        frame, fds = self.adoption()
        self._disconnect()
        self._connection = wire.FrameConnection(sock, limits=CONTROL_LIMITS)
        names = {"job": job, "rank": rank, "address": address, "token": token, "device": device or {}}
        message = {"op": "configure", **names, **frame}
        self._connection.send(message, fds, timeout=timeout)

    def adoption(self) -> tuple[dict[str, Any], list[int]]:
        """The part of a configure frame that hands everything over, ``{"catalogue": ...}``, and its fds (not copies).

        Applies what a manager that has ended had still sent.
        """
        self._drain()
        catalogue, fds = self._holdings.snapshot()
        return {"catalogue": catalogue}, fds

    def process(self) -> bool:
        """Apply and acknowledge what the manager has sent, without blocking; False once it has ended.

        Raises:
            ProtocolError: the manager sent nonsense. Nothing of it was applied: kill it and start another.
        """
        connection = self._connection
        if connection is None:
            return False
        with contextlib.suppress(OSError):  # that it has ended shows in `at_end`, after what it sent before
            connection.flush()
        frames = deque(connection.receive())
        try:
            while frames:
                self._apply(frames.popleft())
        except ProtocolError:
            for frame in frames:
                close_fds(frame.fds)
            raise
        if connection.at_end:
            self._disconnect()
            return False
        return True

    def watch(self, pids: list[int]) -> None:
        """Tell the manager whose sessions it kills if this process ends (replaces the earlier set)."""
        self._tell({"op": "watch", "pids": pids})

    def bye(self) -> None:
        """Tell the manager to exit; its memory lives on here."""
        self._tell({"op": "bye"})

    def buffer(self, name: str, *, shard: str = DEFAULT_SHARD) -> memoryview:
        """The bytes of a region of host memory, readable and writable; valid until `close`, also if it is freed.

        Raises:
            PoolError: there is no such region.
        """
        catalogue = self._holdings.catalogue
        entry = catalogue.regions.get((name, shard))
        if entry is None:
            raise PoolError(f"there is no region {name} (shard {shard})")
        mapping = self._mappings.get(entry.segment)
        if mapping is None:
            (fd,) = self._holdings.handles[entry.segment]
            mapping = self._mappings[entry.segment] = mmap.mmap(fd, catalogue.segments[entry.segment].size_bytes)
        return memoryview(mapping)[entry.offset_bytes : entry.offset_bytes + entry.spec.size_bytes]

    def close(self) -> None:
        """Let go of the manager and of all memory. May be called again."""
        self._disconnect()
        self._holdings.close()
        self._mappings.clear()  # a view that somebody still has keeps its mapping

    def _apply(self, frame: wire.Frame) -> None:
        message, fds = frame
        match message:
            case {"op": "listening", "pid": int(pid)} if not fds:
                self.manager_pid = pid
            case {"op": "change"}:
                try:
                    change = Change.from_message(message)
                except ProtocolError:
                    close_fds(fds)
                    raise
                self._hold(change, fds)
                self._tell({"op": "mirrored", "version": change.version})
            case _:
                close_fds(fds)
                raise ProtocolError(f"unknown message {message.get('op')!r:.60} from the manager")

    def _hold(self, change: Change, fds: list[int]) -> None:
        handles = handles_of(change, fds)
        try:
            # A mapping past the end of a memfd would be SIGBUS for the supervisor.
            for segment in change.segments:
                if segment.place is Place.HOST and os.fstat(handles[segment.number][0]).st_size < segment.size_bytes:
                    raise ProtocolError("a segment is smaller than the catalogue says")
            ended = self._holdings.apply(change, handles)
        except ProtocolError:
            close_fds(fds)
            raise
        for number in ended:
            self._mappings.pop(number, None)

    def _tell(self, message: dict[str, Any]) -> None:
        """Send to the manager; one that has ended needs it no more, and its end shows in `process`."""
        if self._connection is not None:
            with contextlib.suppress(OSError):
                self._connection.queue(message)

    def _drain(self) -> None:
        for _ in range(_RECEIVES_MAX):
            if not self.process():
                break

    def _disconnect(self) -> None:
        self.manager_pid = None
        if self._connection is not None:
            self._connection.close()
            self._connection = None
