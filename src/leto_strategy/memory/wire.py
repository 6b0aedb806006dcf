"""Frames between Leto's processes: JSON objects and file descriptors over unix stream sockets, never pickle.

Whatever breaks a rule of the format (`frames`) or its limits raises `ProtocolError`: its owner closes that connection,
and nobody else notices. All received fds are close-on-exec, and are closed with the connection unless a frame that
carries them was delivered. Only processes of the same user are served (SO_PEERCRED).
"""

import array
import errno
import os
import select
import socket
import time
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Self

from leto_strategy.errors import ProtocolError
from leto_strategy.memory.frames import (
    FRAME_BYTES_MAX,
    FRAME_FDS_MAX,
    Frame,
    FrameParser,
    Limits,
    close_quietly,
    encode,
)
from leto_strategy.system import peer_credentials

__all__ = [
    "DEFAULT_LIMITS",
    "FRAME_BYTES_MAX",
    "FRAME_FDS_MAX",
    "Frame",
    "FrameConnection",
    "Limits",
    "connect",
    "encode",
    "listen",
    "require_same_user",
]

DEFAULT_LIMITS = Limits()

_RECEIVE_BYTES = 1 << 16
_RECEIVE_CALLS_MAX = 32
_FDS_SPACE = socket.CMSG_SPACE(FRAME_FDS_MAX * array.array("i").itemsize)


class FrameConnection:
    """A connected unix socket that carries frames. Owns the socket, which it makes non-blocking.

    `receive`, `queue` and `flush` never block and suit an event loop; `receive_one` and `send` wait, with a timeout.
    """

    def __init__(self, sock: socket.socket, *, limits: Limits = DEFAULT_LIMITS) -> None:
        sock.setblocking(False)
        self.socket = sock
        self.at_end = False  # the other end has closed; frames it sent before were delivered
        self._broken = False
        self._parser = FrameParser(limits)
        self._inbox: deque[Frame] = deque()
        self._pending: deque[tuple[memoryview, list[int]]] = deque()  # fds go with the first byte of their bytes
        self._pending_bytes = 0
        self._pending_bytes_max = limits.pending_bytes

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def fileno(self) -> int:
        """The socket's fd, -1 once closed; for a selector."""
        return self.socket.fileno()

    @property
    def closed(self) -> bool:
        """True after `close`."""
        return self.socket.fileno() < 0

    @property
    def receiving(self) -> bool:
        """True in the middle of a message: a peer that stays there is slow or hostile."""
        return self._parser.partial

    @property
    def wants_write(self) -> bool:
        """True while something queued waits for room in the socket: call `flush` when it is writable."""
        return bool(self._pending)

    def receive(self) -> list[Frame]:
        """What has come, without blocking. Sets `at_end` when the other end has closed; half a message is dropped then.

        Reads a bounded amount, so that a peer that never stops sending can't hold the caller; a level-triggered
        selector reports the rest.

        Raises:
            ProtocolError: malformed, oversized, or with unexpected or lost fds. Frames before the fault are dropped: a
                peer that breaks one rule is not believed. Close the connection; nothing comes from it any more.
        """
        for _ in range(_RECEIVE_CALLS_MAX):
            if not self._receive_some():
                break
        frames = list(self._inbox)
        self._inbox.clear()
        return frames

    def receive_one(self, *, timeout: timedelta) -> Frame:
        """Wait for the next message.

        Raises:
            TimeoutError: none was complete in time.
            EOFError: the other end has closed or reset the connection.
            ProtocolError: as in `receive`.
        """
        deadline = time.monotonic() + timeout.total_seconds()
        while not self._inbox:
            if self.at_end or self.closed:
                raise EOFError("the other end has closed the connection")
            if not self._receive_some() and not self._inbox and not self.at_end:
                self._wait(select.POLLIN, deadline)
        return self._inbox.popleft()

    def queue(self, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
        """Take a message for sending and send what the socket takes now. `fds` stay the caller's.

        Raises:
            ProtocolError: more is waiting than the limit: the other end does not read.
            ConnectionError: the other end is gone.
            OSError: no descriptor is left to keep `fds` for it; nothing of the message was sent.
        """
        if self._pending_bytes > self._pending_bytes_max:
            raise ProtocolError(f"{self._pending_bytes} bytes wait for a peer that does not read")
        # Duplicates, because the caller may close its own before the socket has room. All or none: after a part of a
        # message nothing else can be sent.
        frames: list[tuple[memoryview, list[int]]] = []
        try:
            for data, frame_fds in encode(message, fds):
                frames.append((memoryview(data), []))
                for fd in frame_fds:
                    frames[-1][1].append(os.dup(fd))
        except OSError:
            for _, duplicates in frames:
                close_quietly(duplicates)
            raise
        self._pending.extend(frames)
        self._pending_bytes += sum(len(data) for data, _ in frames)
        self.flush()

    def flush(self) -> bool:
        """Send what the socket takes now; True when nothing is left.

        Raises:
            OSError: the other end is gone.
        """
        while self._pending:
            data, fds = self._pending[0]
            try:
                sent = self.socket.sendmsg([data], _rights(fds), socket.MSG_NOSIGNAL)
            except (BlockingIOError, InterruptedError):
                return False
            except OSError as error:
                # Too many descriptors in flight: they come back as the receivers take theirs.
                if error.errno == errno.ETOOMANYREFS:
                    return False
                raise
            self._pending_bytes -= sent
            close_quietly(fds)
            if sent == len(data):
                self._pending.popleft()
            else:
                self._pending[0] = (data[sent:], [])
        return True

    def send(self, message: dict[str, Any], fds: Sequence[int] = (), *, timeout: timedelta) -> None:
        """Send a message and wait until the socket has taken all of it. `fds` stay the caller's.

        Raises:
            TimeoutError: the other end did not read in time. The connection is of no use any more.
            OSError: the other end is gone.
        """
        deadline = time.monotonic() + timeout.total_seconds()
        self.queue(message, fds)
        while not self.flush():
            self._wait(select.POLLOUT, deadline)

    def close(self) -> None:
        """Close the socket and every fd that was received or queued and not handed over. May be called again."""
        self.socket.close()
        self._drop_received()
        for _, fds in self._pending:
            close_quietly(fds)
        self._pending.clear()
        self._pending_bytes = 0

    def _wait(self, event: int, deadline: float) -> None:
        left = deadline - time.monotonic()
        poller = select.poll()
        poller.register(self.socket, event)
        if left <= 0 or not poller.poll(left * 1000):
            raise TimeoutError("the other end did not answer in time")

    def _receive_some(self) -> bool:
        """One recvmsg and what follows from it; False when there is nothing more to read now."""
        if self._broken:
            raise ProtocolError("this connection broke the rules before")
        try:
            data, ancillary, flags, _ = self.socket.recvmsg(_RECEIVE_BYTES, _FDS_SPACE, socket.MSG_CMSG_CLOEXEC)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:  # a reset is an end
            data, ancillary, flags = b"", [], 0
        fds = array.array("i")
        for level, kind, payload in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
        try:
            self._inbox.extend(self._parser.feed(data, fds))
            if flags & socket.MSG_CTRUNC:
                raise ProtocolError("file descriptors were lost on the way: too many, or no room for them here")
        except ProtocolError:
            self._broken = True
            self._drop_received()
            raise
        if not data:
            self.at_end = True
            self._parser.drop()
        return bool(data)

    def _drop_received(self) -> None:
        self._parser.drop()
        for frame in self._inbox:
            close_quietly(frame.fds)
        self._inbox.clear()


def require_same_user(sock: socket.socket) -> None:
    """Refuse a peer of another user.

    Raises:
        PermissionError: the peer's uid is not this process's effective uid.
    """
    peer = peer_credentials(sock)
    if peer.uid != os.geteuid():
        raise PermissionError(errno.EPERM, f"process {peer.pid} of uid {peer.uid} is not of uid {os.geteuid()}")


def listen(address: str, *, timeout: timedelta) -> socket.socket:
    """A non-blocking socket that listens on the abstract `address` (which has no file and ends with its holder).

    Args:
        address: name without the leading zero byte.
        timeout: how long to go on where the address is still another process's, say a killed predecessor's.

    Raises:
        OSError: still in use.
    """
    deadline = time.monotonic() + timeout.total_seconds()
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    while True:
        try:
            sock.bind(b"\0" + address.encode())
            sock.listen(64)
            sock.setblocking(False)
            return sock
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() > deadline:
                sock.close()
                raise
            time.sleep(0.002)


def connect(address: str, *, timeout: timedelta) -> socket.socket:
    """Connect to the abstract `address` and check that its owner is this user.

    Tries again until `timeout` is over while nobody listens: a process that takes over listens in a moment.

    Raises:
        OSError: nobody listened in time (ConnectionRefusedError), or the backlog stayed full.
        PermissionError: another user listens.
    """
    deadline = time.monotonic() + timeout.total_seconds()
    while True:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            sock.connect(b"\0" + address.encode())
            require_same_user(sock)
            return sock
        except (ConnectionRefusedError, BlockingIOError):
            sock.close()
            if time.monotonic() > deadline:
                raise
            time.sleep(0.002)
        except BaseException:
            sock.close()
            raise


def _rights(fds: list[int]) -> "list[tuple[int, int, array.array[int]]]":
    return [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
