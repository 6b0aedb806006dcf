"""The format of a frame, and the parser that takes one stream of bytes and fds apart. No sockets.

A frame is a 12-byte header (magic, flags, number of fds, length of the body) and a JSON object in UTF-8. Its fds travel
with its first byte, so they are here whenever its header is. A message that does not fit one frame continues in the
next, as far as the receiver's `Limits` allow; the default is one frame.
"""

import contextlib
import json
import os
import struct
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from leto_strategy.errors import ProtocolError

FRAME_BYTES_MAX = 1 << 20
FRAME_FDS_MAX = 253  # the kernel's SCM_MAX_FD

_HEADER = struct.Struct("<2sBxHxxI")  # magic, flags, number of fds, bytes of the body
_MAGIC = b"Lt"
_CONTINUES = 1


class Frame(NamedTuple):
    """One message; whoever takes it owns `fds` and must close them."""

    message: dict[str, Any]
    fds: list[int]


class Limits(NamedTuple):
    """What a receiver accepts in one message, and how much it has waiting to be sent at most."""

    message_bytes: int = FRAME_BYTES_MAX
    message_fds: int = FRAME_FDS_MAX
    pending_bytes: int = 4 * FRAME_BYTES_MAX


class FrameParser:
    """Puts messages together from what a socket delivers. Owns the fds of what is not complete."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._received = bytearray()
        self._received_fds: deque[int] = deque()
        self._body_bytes: int | None = None  # of the frame whose header was read; None between frames
        self._flags = 0
        self._message = bytearray()
        self._message_fds: list[int] = []

    @property
    def partial(self) -> bool:
        """True in the middle of a message."""
        return bool(self._received or self._message or self._body_bytes is not None)

    def feed(self, data: bytes, fds: Iterable[int]) -> list[Frame]:
        """Take what came and return the messages that it completes.

        Raises:
            ProtocolError: it is not what `encode` makes, or more than the limits allow. Call `drop` then.
        """
        self._received += data
        self._received_fds.extend(fds)
        frames: list[Frame] = []
        try:
            while self._parse_one(frames):
                pass
            # Inside a body, or between two frames, every fd that came belongs to a header that was read.
            if self._received_fds and (self._body_bytes is not None or not self._received):
                raise ProtocolError("file descriptors that no frame announced")
            if len(self._received_fds) > self._limits.message_fds:
                raise ProtocolError(f"more than {self._limits.message_fds} file descriptors")
        except ProtocolError:
            for frame in frames:
                close_quietly(frame.fds)
            raise
        return frames

    def drop(self) -> None:
        """Forget an incomplete message and close its fds."""
        close_quietly(self._received_fds)
        close_quietly(self._message_fds)
        self._received.clear()
        self._message.clear()
        self._body_bytes = None

    def _parse_one(self, frames: list[Frame]) -> bool:
        """Take one header and one body off what was received; False where more has to come first."""
        if self._body_bytes is None:
            if len(self._received) < _HEADER.size:
                return False
            self._begin_frame(*_HEADER.unpack_from(self._received))
            del self._received[: _HEADER.size]
        assert self._body_bytes is not None
        if len(self._received) < self._body_bytes:
            return False
        self._message += self._received[: self._body_bytes]
        del self._received[: self._body_bytes]
        self._body_bytes = None
        if not self._flags & _CONTINUES:
            frames.append(Frame(_decode(self._message), self._message_fds))
            self._message, self._message_fds = bytearray(), []
        return True

    def _begin_frame(self, magic: bytes, flags: int, num_fds: int, body_bytes: int) -> None:
        if magic != _MAGIC or flags & ~_CONTINUES:
            raise ProtocolError("not a frame")
        if body_bytes > FRAME_BYTES_MAX or len(self._message) + body_bytes > self._limits.message_bytes:
            raise ProtocolError(f"a message of more than {self._limits.message_bytes} bytes")
        if flags & _CONTINUES and not body_bytes:
            raise ProtocolError("an empty part")  # else a peer could send parts for ever
        if num_fds > FRAME_FDS_MAX or len(self._message_fds) + num_fds > self._limits.message_fds:
            raise ProtocolError(f"a message with more than {self._limits.message_fds} file descriptors")
        if num_fds > len(self._received_fds):
            raise ProtocolError(f"a frame announces {num_fds} file descriptors, {len(self._received_fds)} came")
        self._message_fds += [self._received_fds.popleft() for _ in range(num_fds)]
        self._flags, self._body_bytes = flags, body_bytes


def encode(message: dict[str, Any], fds: Sequence[int] = ()) -> list[tuple[bytes, list[int]]]:
    """The frames of a message: bytes, and the fds that travel with the first of them."""
    body = json.dumps(message, separators=(",", ":"), allow_nan=False).encode()
    num_frames = max(1, -(-len(body) // FRAME_BYTES_MAX), -(-len(fds) // FRAME_FDS_MAX))
    body = body.ljust(num_frames)  # spaces: no part is empty
    # Equal parts but for the last, and none that is empty: the cuts are at multiples rounded down.
    cuts = [len(body) * i // num_frames for i in range(num_frames + 1)]
    frames = []
    for i in range(num_frames):
        part, part_fds = body[cuts[i] : cuts[i + 1]], list(fds[i * FRAME_FDS_MAX :][:FRAME_FDS_MAX])
        flags = _CONTINUES if i + 1 < num_frames else 0
        frames.append((_HEADER.pack(_MAGIC, flags, len(part_fds), len(part)) + part, part_fds))
    return frames


def close_quietly(fds: list[int] | deque[int]) -> None:
    """Close and remove all of `fds`."""
    while fds:
        with contextlib.suppress(OSError):
            os.close(fds.pop())


def _decode(body: bytearray) -> dict[str, Any]:
    try:
        message = json.loads(body.decode(), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:  # bad UTF-8, bad JSON, numbers too long, nested too deep
        raise ProtocolError(f"not JSON: {error}") from None
    if not isinstance(message, dict):
        raise ProtocolError(f"a frame holds a {type(message).__name__} instead of an object")
    return message


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
