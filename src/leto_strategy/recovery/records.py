"""Rings of step records in retained memory: START, MID and FILES of the last few steps (rules R2, R4, R16).

A record of step s lives in slot s mod K of its kind. Its header (step, timeline, length, checksum, capacity) is written
after its payload and its old header is cleared before, so a record is complete or absent, never torn. A payload that
outgrows its slot moves to a larger region of its own. Reading needs no trainer: the supervisor reads the same bytes.
Nothing here knows what a payload means. Standard library only.

On a GPU a record has a second part, for values that the device has yet to compute: the stream stores them, twice on
different pages, and then the record's step number. The host does not wait for that; who reads compares the copies.
"""

import zlib
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import NamedTuple, Protocol

from leto_strategy.errors import RecordError
from leto_strategy.memory.backend import Kind, RegionSpec
from leto_strategy.memory.pool import ResilientMemoryPool
from leto_strategy.recovery.decision import NUM_SLOTS, slot

INDEX_NAME = "records.index"
INDEX_BYTES = 4096
FIRST_CAPACITY_BYTES = 1 << 16
_HEADER_WORDS = 8
_STEP, _TIMELINE, _LENGTH, _CHECKSUM, _CAPACITY, _STREAM_LENGTH, _STREAM_CAPACITY, _STREAM_STEP = range(_HEADER_WORDS)
_PAGE_BYTES = 4096

BufferOf = Callable[[str], memoryview]
"""Gives the bytes of a region by its name; raises KeyError or PoolError where there is none."""


class Record(NamedTuple):
    """What was written: the payload, and what the stream has stored with it."""

    payload: bytes
    stream: bytes


class StreamPart(Protocol):
    """Values of a record that a GPU's stream brings to the host."""

    @property
    def size_bytes(self) -> int:
        """How many bytes; at least 1."""

    def store(self, addresses: Sequence[int], done_address: int, done: int) -> None:
        """Copy the bytes to each of the host's `addresses`, then store `done`, in the stream; don't wait."""


class RecordKind(IntEnum):
    """START: before a step's batch was fetched. MID: gradients final. FILES: checkpoint files written after a step.

    STATE: the whole state from which a step starts, where updates are not transactions.
    """

    START = 0
    MID = 1
    FILES = 2
    STATE = 3


_MIDDLE_POINTS = {RecordKind.START: "start_middle", RecordKind.MID: "mid_middle"}


def _header_at(kind: RecordKind, step: int) -> int:
    return (int(kind) * NUM_SLOTS + slot(step, NUM_SLOTS)) * _HEADER_WORDS


def _region_name(kind: RecordKind, step: int, capacity: int) -> str:
    return f"records.{kind.name.lower()}.{slot(step, NUM_SLOTS)}.{capacity}"


def _stream_name(kind: RecordKind, step: int, capacity: int) -> str:
    return f"records.{kind.name.lower()}.{slot(step, NUM_SLOTS)}.stream.{capacity}"


def _payload(
    words: memoryview, buffer_of: BufferOf, kind: RecordKind, step: int, timeline: int
) -> tuple[memoryview, memoryview] | None:
    """The payload of a complete, valid record and its part of the stream, which may be empty, else None."""
    at = _header_at(kind, step)
    stored, of_timeline, length, checksum, capacity, streamed, room, arrived = words[at : at + _HEADER_WORDS].tolist()
    if stored != step + 1 or of_timeline != timeline or not 0 < length <= capacity:
        return None
    try:
        payload = buffer_of(_region_name(kind, step, capacity))[:length]
        stream = buffer_of(_stream_name(kind, step, room)) if streamed else memoryview(b"")
    except (KeyError, LookupError):
        return None
    if zlib.crc32(payload) != checksum:
        return None
    if not streamed:
        return payload, stream
    first, second = stream[:streamed], stream[room : room + streamed]
    return (payload, first) if arrived == step + 1 and first == second else None


def complete_steps(buffer_of: BufferOf, *, timeline: int = 0) -> dict[RecordKind, frozenset[int]]:
    """Steps whose records are complete and valid, by kind; empty where the rank never wrote any."""
    try:
        words = buffer_of(INDEX_NAME).cast("Q")
    except (KeyError, LookupError):
        return {kind: frozenset() for kind in RecordKind}
    found: dict[RecordKind, frozenset[int]] = {}
    for kind in RecordKind:
        steps = [words[(int(kind) * NUM_SLOTS + k) * _HEADER_WORDS] - 1 for k in range(NUM_SLOTS)]
        found[kind] = frozenset(
            s for s in steps if s >= 0 and _payload(words, buffer_of, kind, s, timeline) is not None
        )
    return found


class RecordRing:
    """Writes and reads the records of one rank.

    Args:
        pool: The rank's retained memory.
        timeline: Raised by a checkpoint fallback, which so makes older records invalid (R16).
        reach: Called at the crash points "start_middle" and "mid_middle" between payload and header.
    """

    def __init__(
        self,
        pool: ResilientMemoryPool,
        *,
        timeline: int = 0,
        reach: Callable[[str, int], None] = lambda point, step: None,
    ) -> None:
        self._pool, self._timeline, self._reach = pool, timeline, reach
        names = [_region_name(kind, k, FIRST_CAPACITY_BYTES) for kind in RecordKind for k in range(NUM_SLOTS)]
        specs = [RegionSpec(INDEX_NAME, INDEX_BYTES, Kind.RECORD, arena="records")]
        specs += [RegionSpec(name, FIRST_CAPACITY_BYTES, Kind.RECORD, arena="records") for name in names]
        regions = pool.allocate(specs)
        self._buffers = {region.spec.name: pool.buffer(region) for region in regions}
        self._slots: dict[int, tuple[int, memoryview]] = {}  # capacity and bytes, by the place of the header
        self._words = self._buffers[INDEX_NAME].cast("Q")
        self._index = regions[0]

    def _buffer(self, name: str) -> memoryview:
        if name not in self._buffers:
            self._buffers[name] = self._pool.buffer(self._pool.attach(name))
        return self._buffers[name]

    def write(self, kind: RecordKind, step: int, payload: bytes | memoryview, stream: StreamPart | None = None) -> None:
        """Replace the record of step - K by that of `step`.

        Invariant: at every moment the header in the index is zero or describes a complete payload. The part of the
        stream is complete when its own word says so; the caller has waited for what the slot held before (R4).
        """
        at, length = _header_at(kind, step), len(payload)
        assert length > 0
        words = self._words
        previous = words[at + _CAPACITY]
        capacity, buffer = self._slots.get(at, (0, words))
        if length > capacity or previous > capacity:
            capacity = max(FIRST_CAPACITY_BYTES, previous, 1 << (length - 1).bit_length())
            buffer = self._slot(kind, step, capacity)
            self._slots[at] = capacity, buffer
        words[at + _STEP] = 0
        words[at + _STREAM_STEP] = 0
        words[at + _STREAM_LENGTH] = 0 if stream is None else stream.size_bytes
        buffer[:length] = payload
        if kind in _MIDDLE_POINTS:
            self._reach(_MIDDLE_POINTS[kind], step)
        words[at + _TIMELINE] = self._timeline
        words[at + _LENGTH] = length
        words[at + _CHECKSUM] = zlib.crc32(payload)
        words[at + _CAPACITY] = capacity
        words[at + _STEP] = step + 1
        if stream is not None:
            self._store(kind, step, stream)
        if FIRST_CAPACITY_BYTES < previous < capacity:
            self._drop(_region_name(kind, step, previous))

    def _slot(self, kind: RecordKind, step: int, capacity: int) -> memoryview:
        """The bytes of a slot of that capacity, allocated where it has outgrown the others."""
        name = _region_name(kind, step, capacity)
        if name not in self._buffers:
            (region,) = self._pool.allocate([RegionSpec(name, capacity, Kind.RECORD)])
            self._buffers[name] = self._pool.buffer(region)
        return self._buffers[name]

    def _drop(self, outgrown: str) -> None:
        self._buffers.pop(outgrown, None)
        self._pool.free(outgrown)

    def _store(self, kind: RecordKind, step: int, stream: StreamPart) -> None:
        """Let the stream store its part, in a region that grows with it."""
        at = _header_at(kind, step)
        previous = self._words[at + _STREAM_CAPACITY]
        room = max(_PAGE_BYTES, previous, 1 << (stream.size_bytes - 1).bit_length())
        name = _stream_name(kind, step, room)
        if name not in self._buffers:
            (region,) = self._pool.allocate([RegionSpec(name, 2 * room, Kind.RECORD, alignment_bytes=_PAGE_BYTES)])
            self._buffers[name] = self._pool.buffer(region)
        self._words[at + _STREAM_CAPACITY] = room
        if previous and previous < room:
            self._drop(_stream_name(kind, step, previous))
        begin = self._pool.address(self._pool.attach(name))
        done = self._pool.address(self._index) + 8 * (at + _STREAM_STEP)
        stream.store((begin, begin + room), done, step + 1)

    def read(self, kind: RecordKind, step: int) -> Record:
        """A record.

        Raises:
            RecordError: It is absent, of another step or timeline, or damaged.
        """
        found = _payload(self._words, self._buffer, kind, step, self._timeline)
        if found is None:
            raise RecordError(f"the {kind.name} record of step {step} is not complete")
        return Record(bytes(found[0]), bytes(found[1]))

    def holds(self, kind: RecordKind, step: int) -> bool:
        """Whether a complete record of `step` is there."""
        return _payload(self._words, self._buffer, kind, step, self._timeline) is not None
