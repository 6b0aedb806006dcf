"""Progress of one rank: marker words, their codec, and the page that holds them.

A marker says how far the update of a rank has come (rules R1-R8); it is the only thing that a recovery believes.
The word is kept in two copies on different pages, each with a check field: the newest valid copy wins, and both are
rewritten before anything else happens (T9). The page also carries telemetry, which nobody believes: it serves hang
detection and ``leto status``.

This module never decides anything and never allocates. Leto paper, section "Resumable model update".
"""

from binascii import crc_hqx
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import Self

PAGE_BYTES = 8192
FAULTS_OFFSET_BYTES = 1024
FAULTS_BYTES = 1024

# A word, from the top: timeline, step, progress within the step, check. Progress is never 0, so no marker encodes to 0.
_CHECK_BITS = 16
_PROGRESS_BITS = 12
_STEP_BITS = 28
_TIMELINE_BITS = 8
_PAYLOAD_BYTES = 6
_CHECK_SEED = 0xFFFF

_READY = 1
_SYNCED = 2
_UNDO = 3  # UNDO(j) = 3 + 2 j and COMMIT(j) = 4 + 2 j
_DONE = (1 << _PROGRESS_BITS) - 1
_PROGRESS = (0, _READY, _SYNCED, _UNDO, _UNDO + 1, _DONE)  # by phase, without the chunk

STEP_MAX = (1 << _STEP_BITS) - 1
CHUNK_MAX = (_DONE - _UNDO) // 2 - 1
TIMELINE_MAX = (1 << _TIMELINE_BITS) - 1


class Phase(IntEnum):
    """How far a rank is within a step, in the order in which the phases are passed."""

    READY = 1
    """The gradients of the step are final."""
    SYNCED = 2
    """The global synchronisation is passed and its values are stored."""
    UNDO = 3
    """The old content of one chunk is in the undo buffer."""
    COMMIT = 4
    """One chunk is updated."""
    DONE = 5
    """All chunks are updated."""


class Activity(IntEnum):
    """What a trainer is busy with; each activity has its own hang limit."""

    STARTING = 0
    STEP = 1
    VALIDATION = 2
    CHECKPOINT = 3
    ENDING = 4


@dataclass(frozen=True, slots=True)
class Marker:
    """One position of a rank. Markers are ordered by the time at which a rank passes them.

    Args:
        step: Transaction number, from 0. It counts attempts, skipped ones too, and is not ``global_step`` (R8).
        phase: Phase within the step.
        chunk: Chunk index for UNDO and COMMIT, otherwise 0.
        timeline: Number of checkpoint fallbacks before; a higher timeline makes every older word void (R16).

    Raises:
        ValueError: a field does not fit its place in the word.
    """

    step: int
    phase: Phase
    chunk: int = 0
    timeline: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.step <= STEP_MAX:
            raise ValueError(f"step {self.step} is outside 0..{STEP_MAX}")
        if not 0 <= self.chunk <= CHUNK_MAX:
            raise ValueError(f"chunk {self.chunk} is outside 0..{CHUNK_MAX}: use larger chunks")
        if self.chunk and self.phase not in (Phase.UNDO, Phase.COMMIT):
            raise ValueError(f"{self.phase.name} has no chunk, got {self.chunk}")
        if not 0 <= self.timeline <= TIMELINE_MAX:
            raise ValueError(f"timeline {self.timeline} is outside 0..{TIMELINE_MAX}")

    @property
    def position(self) -> int:
        """The marker as one integer that grows with the order of markers (48 bits)."""
        progress = _PROGRESS[self.phase] + 2 * self.chunk
        return (self.timeline << _STEP_BITS | self.step) << _PROGRESS_BITS | progress

    def __lt__(self, other: Self) -> bool:
        return self.position < other.position

    def __le__(self, other: Self) -> bool:
        return self.position <= other.position

    def __gt__(self, other: Self) -> bool:
        return self.position > other.position

    def __ge__(self, other: Self) -> bool:
        return self.position >= other.position

    def __str__(self) -> str:
        inner = f"{self.step}, {self.chunk}" if self.phase in (Phase.UNDO, Phase.COMMIT) else f"{self.step}"
        return f"{self.phase.name}({inner})" + (f" of timeline {self.timeline}" if self.timeline else "")


def encode(marker: Marker) -> int:
    """Return the 64-bit word of a marker; it is never 0."""
    position = marker.position
    return position << _CHECK_BITS | _check(position)


def decode(word: int) -> Marker | None:
    """Return the marker of a word, or None where the word is 0 ("nothing yet") or damaged."""
    position = word >> _CHECK_BITS
    progress = position & _DONE
    if progress == 0 or word & 0xFFFF != _check(position):
        return None
    step = position >> _PROGRESS_BITS & STEP_MAX
    timeline = position >> (_PROGRESS_BITS + _STEP_BITS)
    if progress == _DONE:
        return Marker(step, Phase.DONE, timeline=timeline)
    if progress < _UNDO:
        return Marker(step, Phase.READY if progress == _READY else Phase.SYNCED, timeline=timeline)
    chunk, committed = divmod(progress - _UNDO, 2)
    return Marker(step, Phase.COMMIT if committed else Phase.UNDO, chunk, timeline)


def newest(words: Iterable[int]) -> Marker | None:
    """Return the newest marker among the copies of a word, None where no copy holds one."""
    return max((marker for marker in map(decode, words) if marker is not None), default=None)


def _check(position: int) -> int:
    # A 16-bit CRC over the big-endian payload detects every burst of up to 16 wrong bits, so also every mixture, cut
    # between two bytes, of neighbouring words: what is left of the other word is such a burst.
    return crc_hqx(position.to_bytes(_PAYLOAD_BYTES, "big"), _CHECK_SEED)


COPY_OFFSETS_BYTES = (0, 4096)
"""Where the copies of a rank's word lie in its page: on different memory pages, so that one erasure leaves one."""


class _Telemetry:
    """An unprotected 64-bit counter of the page: one native store to write, one load to read."""

    def __init__(self, offset_bytes: int) -> None:
        self._index = offset_bytes // 8

    def __get__(self, page: "ProgressPage", owner: type | None = None) -> int:
        return page._words[self._index]

    def __set__(self, page: "ProgressPage", value: int) -> None:
        page._words[self._index] = value


class ProgressPage:
    """The 8192-byte region "progress" of one rank: two copies of its word, telemetry, and room for fault injection.

    Only the trainer of the rank publishes; only the supervisor rewrites, and only behind the fence (R3, R5).

    Args:
        buffer: At least 8192 bytes of shared memory, 8-byte aligned; writable unless the page is only read.
    """

    _COPIES = tuple(offset // 8 for offset in COPY_OFFSETS_BYTES)

    heartbeat = _Telemetry(64)
    """Counter that a live trainer raises."""
    entered_ns = _Telemetry(80)
    """CLOCK_MONOTONIC time, in ns, of entering the first forward not yet done after the last promotion; 0 = not yet."""
    generation = _Telemetry(88)
    """Generation of the trainer that writes this page."""
    step = _Telemetry(96)
    """Transaction number that is being worked on."""
    debugger = _Telemetry(104)
    """1 while a debugger is attached: hang detection is off."""
    waits = _Telemetry(112)
    """Number of waits for other ranks that the trainer has begun."""
    slot_waits = _Telemetry(120)
    """Number of steps that had to wait until the GPU left a record slot (R4)."""

    def __init__(self, buffer: memoryview) -> None:
        if buffer.nbytes < PAGE_BYTES:
            raise ValueError(f"a progress page has {PAGE_BYTES} bytes, got {buffer.nbytes}")
        self._bytes = buffer.cast("B")[:PAGE_BYTES]
        # One native store of 8 aligned bytes per copy: a reader sees the old word or the new one, never half of each.
        self._words = self._bytes.cast("Q")

    pages_rebuilt = _Telemetry(128)
    """Pages that the trainer has rebuilt since its promotion."""
    localise_us = _Telemetry(136)
    """Microseconds that it took to find them."""
    rebuild_us = _Telemetry(144)
    """Microseconds that it took to rebuild them."""

    @property
    def activity(self) -> Activity:
        """What the trainer is busy with; STARTING where the stored value means nothing."""
        value = self._words[72 // 8]
        return Activity(value) if value in Activity._value2member_map_ else Activity.STARTING

    @activity.setter
    def activity(self, activity: Activity) -> None:
        self._words[72 // 8] = activity

    def beat(self, activity: Activity) -> None:
        """Tell the watchdog that this trainer lives and what it does."""
        words = self._words
        words[72 // 8] = activity
        words[64 // 8] += 1

    @property
    def marker(self) -> Marker | None:
        """The newest valid copy; None where nothing was published yet, or where the word is :attr:`lost`."""
        return newest(self._words[index] for index in self._COPIES)

    @property
    def lost(self) -> bool:
        """True where every copy is damaged: the rank's position is unknown, and recovery must fall back (T9)."""
        words = [self._words[index] for index in self._COPIES]
        return all(word != 0 and decode(word) is None for word in words)

    def publish(self, marker: Marker) -> None:
        """Store a marker; on return it survives the death of this process and the loss of either copy."""
        word, words = encode(marker), self._words
        first, second = self._COPIES
        # Positions are the high bits, so words are ordered like markers; a damaged copy may hold any number.
        assert words[first] <= word >= words[second] or self._repairs(marker), f"{marker} would take back {self.marker}"
        words[first] = word
        words[second] = word
        assert words[first] == word == words[second], f"read back {self.marker} after {marker}"

    def rewrite(self, marker: Marker | None) -> None:
        """Lower the word to a marker, or to nothing (R5); a kill between the two stores leaves the old one in force."""
        assert marker is None or ((current := self.marker) is not None and marker <= current), (
            f"{marker} would raise {self.marker}"
        )
        word = 0 if marker is None else encode(marker)
        for index in self._COPIES:
            self._words[index] = word
        assert self.marker == marker, f"read back {self.marker} after {marker}"

    def faults(self) -> memoryview:
        """Return the 1024 bytes that belong to fault injection."""
        return self._bytes[FAULTS_OFFSET_BYTES : FAULTS_OFFSET_BYTES + FAULTS_BYTES]

    def close(self) -> None:
        """Release the views, so that the mapping below can be closed. The page can't be used afterwards."""
        self._words.release()
        self._bytes.release()

    def _repairs(self, marker: Marker) -> bool:
        """Whether a marker is not behind the newest one though a copy holds a larger number: a damaged one."""
        current = self.marker
        return current is None or current <= marker
