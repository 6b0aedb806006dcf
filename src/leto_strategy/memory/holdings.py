"""What a state manager or a mirror of it holds: a catalogue together with the fds of its segments."""

import errno
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from leto_strategy.errors import ProtocolError, ResourceError
from leto_strategy.memory.backend import Backends, MemoryBackend, RegionSpec
from leto_strategy.memory.catalogue import Catalogue, Change

Handles = dict[int, list[int]]  # fds by segment number


class Holdings:
    """Catalogue and fds, which change together. Owns the fds."""

    def __init__(self) -> None:
        self.catalogue = Catalogue()
        self.handles: Handles = {}

    @classmethod
    def adopt(cls, message: object, fds: Sequence[int]) -> "Holdings":
        """What a predecessor held: the counterpart of `snapshot`. Takes the fds.

        Raises:
            ProtocolError: not a snapshot.
        """
        holdings = cls()
        change = _change_from(message)
        handles = handles_of(change, fds)
        holdings.catalogue = Catalogue.from_snapshot(change)
        holdings.handles = handles
        return holdings

    def snapshot(self) -> tuple[dict[str, Any], list[int]]:
        """Message and fds from which `adopt` makes the same again. The fds stay this object's."""
        change = self.catalogue.snapshot()
        return change.to_message(), fds_of(change, self.handles)

    def apply(self, change: Change, handles: Handles) -> list[int]:
        """Go on to the next version and take `handles`; closes what ends. The numbers of the segments that ended.

        Raises:
            ProtocolError: the change does not follow; nothing was changed, and `handles` are still the caller's.
        """
        ended = self.catalogue.apply(change)
        self.handles.update(handles)
        for number in ended:
            close_fds(self.handles.pop(number))
        return ended

    def close(self) -> None:
        """Let go of all memory."""
        for fds in self.handles.values():
            close_fds(fds)
        self.handles.clear()
        self.catalogue = Catalogue()


def create_segments(change: Change, backends: Backends) -> tuple[Change, Handles]:
    """Make the segments of a planned change, all or none; the change with their numbers of handles, and the fds.

    Raises:
        ResourceError: a backend has no memory; nothing is left behind.
    """
    handles: Handles = {}
    try:
        for segment in change.segments:
            handles[segment.number] = backends[segment.place].create(
                segment.size_bytes, label=f"segment-{segment.number}", protected=segment.protected
            )
    except BaseException:
        for fds in handles.values():
            close_fds(fds)
        raise
    segments = [replace(segment, num_handles=len(handles[segment.number])) for segment in change.segments]
    return replace(change, segments=segments), handles


def check_capacity(specs: Sequence[RegionSpec], change: Change, holdings: Holdings, backends: Backends) -> None:
    """Refuse a change that needs more memory than there is, before anything is made.

    Memory that was handed out before and not touched yet is counted as taken. What other processes will touch later
    is not known to anyone: `backend.populate` in the trainer turns that risk into an error at the start.

    Raises:
        ResourceError: says how much is asked for, how much there is, and what to do.
    """
    for backend in dict.fromkeys(backends.values()):
        _check_backend(specs, change, holdings, backends, backend)


def _check_backend(
    specs: Sequence[RegionSpec], change: Change, holdings: Holdings, backends: Backends, backend: MemoryBackend
) -> None:
    asked_bytes = sum(segment.size_bytes for segment in change.segments if backends[segment.place] is backend)
    if not asked_bytes:
        return
    available_bytes, limit = backend.available_bytes()
    promised_bytes = sum(
        max(0, segment.size_bytes - backend.committed_bytes(holdings.handles[segment.number], segment.size_bytes))
        for segment in holdings.catalogue.segments.values()
        if backends[segment.place] is backend
    )
    if asked_bytes <= available_bytes - promised_bytes:
        return
    largest = max(specs, key=lambda spec: spec.size_bytes)
    raise ResourceError(
        errno.ENOMEM,
        f"{_gib(asked_bytes)} of memory are asked for ({len(specs)} regions, the largest {largest.name} with "
        f"{_gib(largest.size_bytes)}), but {_gib(available_bytes)} are available ({limit}), of which "
        f"{_gib(promised_bytes)} are promised to earlier regions. Free memory, raise the limit, start fewer ranks on "
        "this machine, or train a smaller model",
    )


def fds_of(change: Change, handles: Handles) -> list[int]:
    """The fds of the change's segments in the order in which `handles_of` takes them apart."""
    return [fd for segment in change.segments for fd in handles[segment.number]]


def handles_of(change: Change, fds: Sequence[int]) -> Handles:
    """The fds that came with a change, by segment. Closes all of them if their number is wrong.

    Raises:
        ProtocolError: too many or too few.
    """
    if len(fds) != sum(segment.num_handles for segment in change.segments):
        close_fds(fds)
        raise ProtocolError(f"{len(fds)} file descriptors came with {len(change.segments)} segments")
    handles, begin = {}, 0
    for segment in change.segments:
        handles[segment.number] = list(fds[begin : begin + segment.num_handles])
        begin += segment.num_handles
    return handles


def close_fds(fds: Sequence[int]) -> None:
    """Close each of `fds`, which must be open."""
    for fd in fds:
        os.close(fd)


def _change_from(message: object) -> Change:
    if not isinstance(message, dict):
        raise ProtocolError(f"a {type(message).__name__} instead of a catalogue")
    return Change.from_message(message)


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.3g} GiB"
