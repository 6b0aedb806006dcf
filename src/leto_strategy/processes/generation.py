"""A generation: one trainer process per rank that share their process groups, and what each has said so far.

These objects hold state and carry frames; when a generation starts, is promoted or ends is decided by the supervisor.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from leto_strategy.errors import ProtocolError
from leto_strategy.memory.wire import FrameConnection
from leto_strategy.processes.loop import Loop
from leto_strategy.processes.messages import ErrorReport, ExitStatus, TrainerMessage, parse_trainer_message


class Link:
    """A frame connection in the loop: sends without blocking, and tells once when it is of no use any more.

    Args:
        loop: The supervisor's loop.
        connection: The connection; owned.
        on_frame: Called with each frame's message and descriptors, which it owns.
        on_lost: Called once when the other end has closed, did not read, or broke the protocol; with the reason.
    """

    def __init__(
        self,
        loop: Loop,
        connection: FrameConnection,
        *,
        on_frame: Callable[[dict[str, Any], list[int]], None],
        on_lost: Callable[[str], None],
    ) -> None:
        self._loop = loop
        self._connection = connection
        self._on_frame = on_frame
        self._on_lost = on_lost
        self._told = False
        loop.watch(connection, self._on_event)

    @property
    def closed(self) -> bool:
        """True once nothing can be sent any more."""
        return self._connection.closed

    def send(self, message: dict[str, Any], fds: tuple[int, ...] = ()) -> None:
        """Send a message; where the other end is gone, that is told through `on_lost`, soon."""
        if self._connection.closed:
            return
        try:
            self._connection.queue(message, fds)
        except (OSError, ProtocolError) as error:
            reason = str(error)
            self._loop.after(0, lambda: self._lose(reason), always=True)
            return
        self._watch()

    def send_last(self, message: dict[str, Any], *, timeout: timedelta) -> None:
        """Send a message, wait until it is on its way with all before it, and close."""
        with suppress(OSError, ProtocolError):
            self._connection.send(message, timeout=timeout)
        self.close()

    def close(self) -> None:
        """Close it; nothing is told any more."""
        self._told = True
        self._loop.forget(self._connection)
        self._connection.close()

    def _watch(self) -> None:
        if not self._connection.closed:
            self._loop.watch(self._connection, self._on_event, write=self._connection.wants_write)

    def _on_event(self) -> None:
        if self._connection.closed:
            return
        try:
            with suppress(OSError):  # what the other end has sent before it ended still counts
                self._connection.flush()
            frames = self._connection.receive()
            for frame in frames:
                if self._told:  # closed by what an earlier frame led to
                    close_all(frame.fds)
                else:
                    self._on_frame(frame.message, frame.fds)
        except (OSError, ProtocolError) as error:
            self._lose(str(error) or type(error).__name__)
            return
        if self._connection.at_end and not self._connection.closed:
            self._lose("closed by the other end")
        else:
            self._watch()

    def _lose(self, reason: str) -> None:
        if not self._told:
            self.close()
            self._on_lost(reason)


def close_all(fds: Iterable[int]) -> None:
    """Close descriptors of ours."""
    for fd in fds:
        os.close(fd)


@dataclass(eq=False)
class TrainerProcess:
    """One trainer: its process, its connection, and what it has said.

    Args:
        rank: Its rank.
        generation: Number of its generation.
        pid: Its pid, None while it is being forked or after its start failed.
        log: Its log file while it is a shadow, None where it writes to the user's output.
        keep_log: The log says why it failed.
    """

    rank: int
    generation: int
    pid: int | None = None
    log: Path | None = None
    keep_log: bool = False
    link: Link | None = None
    ready: bool = False
    entered_step: int | None = None
    finished: bool = False
    delivered: bool = False
    report: ErrorReport | None = None
    status: ExitStatus | None = None

    @property
    def alive(self) -> bool:
        """True while the process exists and is not reaped."""
        return self.pid is not None and self.status is None

    @property
    def started_step(self) -> bool:
        """True once it is in new work: in its first forward, or beyond the end of the call."""
        return self.entered_step is not None or self.finished

    def say(self, op: str, **fields: Any) -> None:
        """Send it a message; a trainer that is gone is noticed elsewhere."""
        if self.link is not None:
            self.link.send({"op": op, **fields})

    def disconnect(self) -> None:
        """Close the connection."""
        if self.link is not None:
            self.link.close()
            self.link = None


@dataclass(eq=False)
class Generation:
    """One trainer per rank.

    Args:
        number: Counts all generations of a job, from 0.
        role: "active" or "shadow" at its start.
        start: "stub" or "zygote": how its processes are made.
        started: Loop time of its start, seconds.
    """

    number: int
    role: str
    start: str
    started: float
    trainers: list[TrainerProcess] = field(default_factory=list)
    promoted: bool = False
    first_step_seen: bool = False
    announced: bool = False
    ready_seconds: float | None = None
    num_pending: int = 0
    """Processes that were asked for and are not there yet."""

    def __iter__(self) -> Iterator[TrainerProcess]:
        return iter(self.trainers)

    @property
    def pids(self) -> list[int]:
        """Pids of the trainers that exist, by rank."""
        return [trainer.pid for trainer in self.trainers if trainer.alive and trainer.pid is not None]

    @property
    def all_ready(self) -> bool:
        """True once every trainer waits at its gate."""
        return all(trainer.ready for trainer in self.trainers)

    @property
    def all_started_step(self) -> bool:
        """True once every trainer is in new work after its promotion."""
        return all(trainer.started_step for trainer in self.trainers)

    @property
    def all_finished(self) -> bool:
        """True once every trainer has returned from the call."""
        return all(trainer.finished for trainer in self.trainers)

    @property
    def all_ended(self) -> bool:
        """True once no process of it exists, nor will."""
        return self.num_pending == 0 and not any(trainer.alive for trainer in self.trainers)

    def say(self, op: str, **fields: Any) -> None:
        """Send every trainer a message."""
        for trainer in self.trainers:
            trainer.say(op, **fields)

    def disconnect(self) -> None:
        """Close all connections; what the trainers say from now on is not heard."""
        for trainer in self.trainers:
            trainer.disconnect()


def has_text(path: Path | None) -> bool:
    """Whether a log file has anything in it."""
    try:
        return path is not None and path.stat().st_size > 0
    except OSError:
        return False


class TrainerEvents:
    """Who hears what trainers do; the supervisor is one."""

    def on_trainer_started(self, trainer: TrainerProcess) -> None:
        """A trainer's process is there."""

    def on_trainer_message(self, trainer: TrainerProcess, message: TrainerMessage) -> None:
        """A trainer said something."""

    def on_trainer_ended(self, trainer: TrainerProcess) -> None:
        """A trainer was reaped; its `status` says how it ended."""

    def on_trainer_lost(self, trainer: TrainerProcess, reason: str) -> None:
        """The connection to a trainer is closed, though its process may still be there."""


def connect_trainer(loop: Loop, trainer: TrainerProcess, connection: FrameConnection, events: TrainerEvents) -> None:
    """Give a trainer its connection; its messages go to `events`, checked."""

    def on_frame(frame: dict[str, Any], fds: list[int]) -> None:
        if fds:
            close_all(fds)
            raise ProtocolError("a trainer sent descriptors")
        message = parse_trainer_message(frame)
        if isinstance(message, ErrorReport):
            trainer.report = message
        events.on_trainer_message(trainer, message)

    def on_lost(reason: str) -> None:
        trainer.link = None
        events.on_trainer_lost(trainer, reason)

    trainer.link = Link(loop, connection, on_frame=on_frame, on_lost=on_lost)
