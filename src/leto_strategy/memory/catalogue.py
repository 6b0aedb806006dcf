"""Which region lies where: pure data that the state manager owns and the supervisor mirrors. No fds, no I/O.

The catalogue changes only by a `Change`, which takes it from one version to the next (rule R17). Manager and mirror
apply the same changes in the same order, so that a new manager can go on from the mirror's copy; both ends check each
change, since a wrong one would hand one tensor's memory to another.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from leto_strategy.errors import AllocationMismatchError, ProtocolError
from leto_strategy.memory.backend import Kind, Place, RegionSpec

# Segments get the same address in every process where it is free there: far from where the kernel puts heaps, stacks
# and libraries on 64-bit systems. It is a hint; an offset is what counts.
_FIRST_ADDRESS = 0x2000_0000_0000
_LAST_ADDRESS = 0x5000_0000_0000
_ADDRESS_STEP_BYTES = 2 << 20

Key = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Segment:
    """One piece of memory that is created, exported and mapped as a whole."""

    number: int  # never used again
    size_bytes: int
    num_handles: int
    address_hint: int  # 0 where there is none
    version: int  # of the catalogue when its pages last changed: who mapped it earlier must map it again (R17)
    place: Place
    protected: bool  # some region in it is


@dataclass(frozen=True, slots=True)
class Entry:
    """One region: what was asked for, where it lies, and which request made it."""

    spec: RegionSpec
    segment: int
    offset_bytes: int
    creator: str


@dataclass(frozen=True, slots=True)
class Change:
    """What leads to `version`. Segments that lose their last region end with it."""

    version: int
    next_segment: int
    next_address: int
    segments: list[Segment] = field(default_factory=list)
    regions: list[Entry] = field(default_factory=list)
    removed: list[Key] = field(default_factory=list)

    def to_message(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "version": self.version,
            "next": [self.next_segment, self.next_address],
            "segments": [segment_to_list(segment) for segment in self.segments],
            "regions": [
                [*spec_to_list(entry.spec), entry.segment, entry.offset_bytes, entry.creator] for entry in self.regions
            ],
            "removed": [list(key) for key in self.removed],
        }

    @classmethod
    def from_message(cls, message: dict[str, Any]) -> "Change":
        """The inverse of `to_message`.

        Raises:
            ProtocolError: not of that form.
        """
        try:
            next_segment, next_address = integers_from_list(message["next"], count=2)
            return cls(
                version=_integer(message["version"]),
                next_segment=next_segment,
                next_address=next_address,
                segments=[segment_from_list(item) for item in _list(message["segments"])],
                regions=[_entry_from_list(item) for item in _list(message["regions"])],
                removed=[key_from_list(item) for item in _list(message["removed"])],
            )
        except KeyError as error:
            raise ProtocolError(f"a change of the catalogue without {error}") from None


class Catalogue:
    """All segments and regions of one rank at one version."""

    def __init__(self) -> None:
        self.version = 0
        self.segments: dict[int, Segment] = {}
        self.regions: dict[Key, Entry] = {}
        self._next_segment = 1
        self._next_address = _FIRST_ADDRESS
        self._num_regions: dict[int, int] = {}  # by segment

    @classmethod
    def from_snapshot(cls, change: Change) -> "Catalogue":
        """The catalogue that `snapshot` was taken of."""
        catalogue = cls()
        catalogue.version = change.version - 1
        catalogue.apply(change)
        return catalogue

    def snapshot(self) -> Change:
        """The whole catalogue as one change."""
        return Change(
            self.version,
            self._next_segment,
            self._next_address,
            list(self.segments.values()),
            list(self.regions.values()),
        )

    def plan(
        self, specs: Sequence[RegionSpec], *, creator: str, granularity_bytes: Callable[[Place], int]
    ) -> Change | None:
        """What has to be added so that all of `specs` exist; None if they do.

        Every arena, and every spec without one, gets a segment, whose `num_handles` is 0 until it is created.

        Raises:
            AllocationMismatchError: one exists with another size, kind or place, or an arena exists in part.
            ValueError: two of them have the same name and shard, or an arena spreads over host and device.
        """
        if len({spec.key for spec in specs}) < len(specs):
            raise ValueError("two regions of one allocation have the same name and shard")
        number, address = self._next_segment, self._next_address
        segments, regions = [], []
        for group in _groups(specs):
            if self._has(group):
                continue
            offsets, size_bytes = _layout(group)
            place = _place(group)
            granularity = granularity_bytes(place)
            size_bytes = max(1, -(-size_bytes // granularity)) * granularity
            hint = address if address + size_bytes <= _LAST_ADDRESS else 0
            protected = any(spec.kind is Kind.PROTECTED for spec in group)
            segments.append(Segment(number, size_bytes, 0, hint, self.version + 1, place, protected))
            regions += [Entry(spec, number, offset, creator) for spec, offset in zip(group, offsets, strict=True)]
            number += 1
            if hint:  # one step stays free between two segments: an overrun faults
                address += -(-size_bytes // _ADDRESS_STEP_BYTES) * _ADDRESS_STEP_BYTES + _ADDRESS_STEP_BYTES
        return Change(self.version + 1, number, address, segments, regions) if regions else None

    def plan_removal(self, keys: Iterable[Key]) -> Change | None:
        """What removes those of `keys` that exist; None if none does."""
        removed = [key for key in dict.fromkeys(keys) if key in self.regions]
        if not removed:
            return None
        return Change(self.version + 1, self._next_segment, self._next_address, removed=removed)

    def apply(self, change: Change) -> list[int]:
        """Go on to the next version.

        Returns:
            Numbers of the segments that ended.

        Raises:
            ProtocolError: the change does not follow from this catalogue. Nothing was changed then.
        """
        self._check(change)
        for segment in change.segments:
            self.segments[segment.number] = segment
            self._num_regions[segment.number] = 0
        for entry in change.regions:
            self.regions[entry.spec.key] = entry
            self._num_regions[entry.segment] += 1
        ended = []
        for key in change.removed:
            number = self.regions.pop(key).segment
            self._num_regions[number] -= 1
            if not self._num_regions[number]:
                del self.segments[number], self._num_regions[number]
                ended.append(number)
        self.version = change.version
        self._next_segment, self._next_address = change.next_segment, change.next_address
        return ended

    def _check(self, change: Change) -> None:
        if change.version != self.version + 1:
            raise ProtocolError(f"version {change.version} of the catalogue after version {self.version}")
        added = {segment.number: segment for segment in change.segments}
        if len(added) < len(change.segments) or any(number in self.segments for number in added):
            raise ProtocolError("a segment was added twice")
        if any(number >= change.next_segment for number in added) or change.next_segment < self._next_segment:
            raise ProtocolError("a segment number could be used twice")
        if {entry.segment for entry in change.regions} != set(added):
            raise ProtocolError("new regions lie in new segments, and each of these has one")
        seen = set()
        for entry in change.regions:
            if entry.spec.key in self.regions or entry.spec.key in seen:
                raise ProtocolError(f"region {entry.spec.name} was added twice")
            seen.add(entry.spec.key)
            if entry.offset_bytes + entry.spec.size_bytes > added[entry.segment].size_bytes:
                raise ProtocolError(f"region {entry.spec.name} ends behind its segment")
        if len(set(change.removed)) < len(change.removed) or any(key not in self.regions for key in change.removed):
            raise ProtocolError("a region that is not there was removed")

    def _has(self, group: list[RegionSpec]) -> bool:
        """Whether all of one arena exist, as they would be laid out now."""
        entries = [self.regions.get(spec.key) for spec in group]
        for spec, entry in zip(group, entries, strict=True):
            if entry is not None and (entry.spec.size_bytes, entry.spec.kind) != (spec.size_bytes, spec.kind):
                raise AllocationMismatchError(
                    f"region {spec.name} (shard {spec.shard}) exists with {entry.spec.size_bytes} bytes of kind "
                    f"{entry.spec.kind}, now asked for with {spec.size_bytes} bytes of kind {spec.kind}"
                )
        there = [entry for entry in entries if entry is not None]
        if not there:
            return False
        segments, offsets = {entry.segment for entry in there}, [entry.offset_bytes for entry in there]
        if len(there) < len(group) or len(segments) > 1 or offsets != _layout(group)[0]:
            raise AllocationMismatchError(
                f"region {group[0].name}: its arena {group[0].arena!r} of {len(group)} regions exists in part or in "
                f"another order ({len(there)} of them exist)"
            )
        return True


def spec_to_list(spec: RegionSpec) -> list[Any]:
    """A spec as JSON."""
    return [spec.name, spec.size_bytes, str(spec.kind), spec.shard, spec.arena, spec.alignment_bytes]


def spec_from_list(item: object) -> RegionSpec:
    """The inverse of `spec_to_list`; `ProtocolError` if it is not of that form."""
    fields = _list(item)
    try:
        name, size_bytes, kind, shard, arena, alignment_bytes = fields
        return RegionSpec(name, size_bytes, Kind(kind), shard, arena, alignment_bytes)
    except (ValueError, TypeError) as error:
        raise ProtocolError(f"not a region: {error}") from None


def segment_to_list(segment: Segment) -> list[int]:
    """A segment as JSON."""
    numbers = [segment.number, segment.size_bytes, segment.num_handles, segment.address_hint, segment.version]
    return [*numbers, int(segment.place), int(segment.protected)]


def segment_from_list(item: object) -> Segment:
    """The inverse of `segment_to_list`; `ProtocolError` if it is not of that form."""
    number, size_bytes, num_handles, address_hint, version, place, protected = integers_from_list(item, count=7)
    if not number or not size_bytes or not num_handles:
        raise ProtocolError("a segment without number, size or handles")
    if place not in (Place.HOST, Place.DEVICE) or protected > 1:
        raise ProtocolError("a segment that lies nowhere")
    return Segment(number, size_bytes, num_handles, address_hint, version, Place(place), bool(protected))


def key_from_list(item: object) -> Key:
    """[name, shard]; `ProtocolError` if it is not of that form."""
    fields = _list(item)
    if len(fields) != 2 or not all(isinstance(part, str) and len(part) <= 200 for part in fields):
        raise ProtocolError("not the name and shard of a region")
    return fields[0], fields[1]


def integers_from_list(item: object, *, count: int | None = None) -> list[int]:
    """Whole numbers from 0, `count` of them if given; `ProtocolError` if it is not of that form."""
    numbers = [_integer(part) for part in _list(item)]
    if count is not None and len(numbers) != count:
        raise ProtocolError(f"{len(numbers)} numbers instead of {count}")
    return numbers


def _entry_from_list(item: object) -> Entry:
    fields = _list(item)
    if len(fields) != 9 or not isinstance(fields[8], str):
        raise ProtocolError("not a region of the catalogue")
    return Entry(spec_from_list(fields[:6]), _integer(fields[6]), _integer(fields[7]), fields[8])


def _list(value: object) -> list[Any]:
    if not isinstance(value, list):
        raise ProtocolError(f"a {type(value).__name__} instead of a list")
    return value


def _integer(value: object) -> int:
    if type(value) is not int or not 0 <= value < 1 << 62:  # bool is an int, and not meant
        raise ProtocolError(f"{value!r:.60} instead of a number")
    return value


def _groups(specs: Sequence[RegionSpec]) -> list[list[RegionSpec]]:
    """The specs of each arena together, in order; each spec without one alone."""
    arenas: dict[object, list[RegionSpec]] = {}
    for spec in specs:
        arenas.setdefault(spec.arena or spec.key, []).append(spec)
    return list(arenas.values())


def _place(group: list[RegionSpec]) -> Place:
    """Where all of an arena lie."""
    places = {spec.kind.place for spec in group}
    if len(places) > 1:
        raise ValueError(f"arena {group[0].arena!r} spreads over host and device")
    return places.pop()


def _layout(group: list[RegionSpec]) -> tuple[list[int], int]:
    """Offsets back to back, each aligned, and the end of the last."""
    offsets, end = [], 0
    for spec in group:
        begin = -(-end // spec.alignment_bytes) * spec.alignment_bytes
        offsets.append(begin)
        end = begin + spec.size_bytes
    return offsets, end
