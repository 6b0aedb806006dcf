"""Rings of step records in retained memory: START, MID and FILES of the last few steps (rules R2, R4, R16).

A record of step s lives in slot s mod K of its kind. Its header (step, timeline, length, checksum, capacity) is written
after its payload and its old header is cleared before, so a record is complete or absent, never torn. A payload that
outgrows its slot moves to a larger region of its own. Reading needs no trainer: the supervisor reads the same bytes.
Nothing here knows what a payload means. Standard library only.
"""

import zlib
from collections.abc import Callable
from enum import IntEnum

from leto_strategy.errors import RecordError
from leto_strategy.memory.backend import Kind, RegionSpec
from leto_strategy.memory.pool import ResilientMemoryPool
from leto_strategy.recovery.decision import NUM_SLOTS, slot

INDEX_NAME = "records.index"
INDEX_BYTES = 4096
FIRST_CAPACITY_BYTES = 1 << 16
_HEADER_WORDS = 8
_STEP, _TIMELINE, _LENGTH, _CHECKSUM, _CAPACITY = range(5)

BufferOf = Callable[[str], memoryview]
"""Gives the bytes of a region by its name; raises KeyError or PoolError where there is none."""


class RecordKind(IntEnum):
    """START: before a step's batch was fetched. MID: gradients final. FILES: checkpoint files written after a step.

    STATE: the whole state from which a step starts, where updates are not transactions.
    """

    START = 0
    MID = 1
    FILES = 2
    STATE = 3


def _header_at(kind: RecordKind, step: int) -> int:
    return (int(kind) * NUM_SLOTS + slot(step, NUM_SLOTS)) * _HEADER_WORDS


def _region_name(kind: RecordKind, step: int, capacity: int) -> str:
    return f"records.{kind.name.lower()}.{slot(step, NUM_SLOTS)}.{capacity}"


def _payload(words: memoryview, buffer_of: BufferOf, kind: RecordKind, step: int, timeline: int) -> memoryview | None:
    """The payload of a complete, valid record, else None."""
    at = _header_at(kind, step)
    stored, of_timeline, length, checksum, capacity = words[at : at + 5].tolist()
    if stored != step + 1 or of_timeline != timeline or not 0 < length <= capacity:
        return None
    try:
        payload = buffer_of(_region_name(kind, step, capacity))[:length]
    except (KeyError, LookupError):
        return None
    return payload if zlib.crc32(payload) == checksum else None


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
        self._words = self._buffers[INDEX_NAME].cast("Q")

    def _buffer(self, name: str) -> memoryview:
        if name not in self._buffers:
            self._buffers[name] = self._pool.buffer(self._pool.attach(name))
        return self._buffers[name]

    def write(self, kind: RecordKind, step: int, payload: bytes | memoryview) -> None:
        """Replace the record of step - K by that of `step`.

        Invariant: at every moment the header in the index is zero or describes a complete payload.
        """
        at, length = _header_at(kind, step), len(payload)
        assert length > 0
        previous = self._words[at + _CAPACITY]
        capacity = max(FIRST_CAPACITY_BYTES, previous, 1 << (length - 1).bit_length())
        name = _region_name(kind, step, capacity)
        if name not in self._buffers:
            (region,) = self._pool.allocate([RegionSpec(name, capacity, Kind.RECORD)])
            self._buffers[name] = self._pool.buffer(region)
        self._words[at + _STEP] = 0
        self._buffers[name][:length] = payload
        if kind in (RecordKind.START, RecordKind.MID):
            self._reach(f"{kind.name.lower()}_middle", step)
        self._words[at + _TIMELINE] = self._timeline
        self._words[at + _LENGTH] = length
        self._words[at + _CHECKSUM] = zlib.crc32(payload)
        self._words[at + _CAPACITY] = capacity
        self._words[at + _STEP] = step + 1
        if previous > FIRST_CAPACITY_BYTES and previous < capacity:
            outgrown = _region_name(kind, step, previous)
            self._buffers.pop(outgrown, None)
            self._pool.free(outgrown)

    def read(self, kind: RecordKind, step: int) -> bytes:
        """The payload of a record.

        Raises:
            RecordError: It is absent, of another step or timeline, or damaged.
        """
        payload = _payload(self._words, self._buffer, kind, step, self._timeline)
        if payload is None:
            raise RecordError(f"the {kind.name} record of step {step} is not complete")
        return bytes(payload)

    def holds(self, kind: RecordKind, step: int) -> bool:
        """Whether a complete record of `step` is there."""
        return _payload(self._words, self._buffer, kind, step, self._timeline) is not None
