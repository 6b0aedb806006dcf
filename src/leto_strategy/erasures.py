"""Which lost pages can be rebuilt, and from what: the counting rule of the recovery protocol as pure functions.

A rank's state is divided into protection groups of D data pages, its gradients into groups of their own. State and
gradients are separate code words. Where a group stands follows from the rank's word and from which step its parity in
host memory is of (rules T3 to T6). No tensor, no memory, no I/O: trainers rebuild by it, the supervisor decides by it.
Leto paper, sections 4.1 and 5.2; docs/recovery-protocol.md.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from leto_strategy.progress import Marker, Phase

NUM_DEVICE_BUFFERS = 4
"""Buffers of device parity: a pair for each of two neighbouring groups, the older of which is being drained (T4)."""


class PageKind(StrEnum):
    """What a page holds."""

    DATA = "data"
    FIRST = "host parity"
    SECOND = "second tier"
    DEVICE = "device parity"
    UNDO = "undo"
    GRADIENT = "gradient"
    GRADIENT_PARITY = "gradient parity"


class Page(NamedTuple):
    """One page.

    Args:
        kind: What it holds.
        group: Of the state, or of gradients; for device parity the number of the buffer; for undo 0.
        place: Within the group, buffer or undo buffer.
    """

    kind: PageKind
    group: int
    place: int


@dataclass(frozen=True, slots=True)
class Group:
    """A protection group.

    Args:
        num_pages: Data pages.
        first_chunk: Its first chunk. Frozen parameters are in groups without chunks.
        chunk_pages: Number of pages of each of its chunks; they lie back to back from page 0 on.
    """

    num_pages: int
    first_chunk: int
    chunk_pages: tuple[int, ...]

    @property
    def chunks(self) -> range:
        """Its chunks."""
        return range(self.first_chunk, self.first_chunk + len(self.chunk_pages))

    def pages_of(self, chunk: int) -> range:
        """The pages of one of its chunks. Undo page k holds the k-th of them."""
        place = chunk - self.first_chunk
        start = sum(self.chunk_pages[:place])
        return range(start, start + self.chunk_pages[place])


@dataclass(frozen=True, slots=True)
class Shape:
    """How a rank's pages are divided.

    Args:
        groups: Of the state, in the order of updates, those of frozen parameters behind.
        gradient_groups: Of the gradients, over the same chunks.
        num_parity: First-tier parity pages a group, H1.
        num_second: Second-tier pages a group, H2.
    """

    groups: tuple[Group, ...]
    gradient_groups: tuple[Group, ...]
    num_parity: int
    num_second: int

    def to_json(self) -> str:
        """As text, for a process that knows nothing of the layout."""
        groups = [[group.num_pages, group.first_chunk, list(group.chunk_pages)] for group in self.groups]
        gradients = [[group.num_pages, group.first_chunk, list(group.chunk_pages)] for group in self.gradient_groups]
        return json.dumps([groups, gradients, self.num_parity, self.num_second], separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> "Shape":
        """The inverse of `to_json`."""
        groups, gradients, num_parity, num_second = json.loads(text)
        state, sealed = ([Group(n, first, tuple(pages)) for n, first, pages in part] for part in (groups, gradients))
        return cls(tuple(state), tuple(sealed), num_parity, num_second)

    @property
    def num_undo(self) -> int:
        """Pages of the undo buffer."""
        return max((pages for group in self.groups for pages in group.chunk_pages), default=0)

    def pages(self) -> list[Page]:
        """All pages, in the order of their loss marks."""
        counts = [
            *((PageKind.DATA, index, group.num_pages) for index, group in enumerate(self.groups)),
            *((PageKind.FIRST, index, self.num_parity) for index in range(len(self.groups))),
            *((PageKind.SECOND, index, self.num_second) for index in range(len(self.groups))),
            *((PageKind.DEVICE, buffer, self.num_parity) for buffer in range(NUM_DEVICE_BUFFERS)),
            (PageKind.UNDO, 0, self.num_undo),
            *((PageKind.GRADIENT, index, group.num_pages) for index, group in enumerate(self.gradient_groups)),
            *((PageKind.GRADIENT_PARITY, index, self.num_parity) for index in range(len(self.gradient_groups))),
        ]
        return [Page(kind, group, place) for kind, group, count in counts for place in range(count)]


class InForce(StrEnum):
    """Which parity of a group belongs to its data."""

    HOST = "host"
    """Closed: first and second tier in host memory."""
    BOTH = "both"
    """Opened, nothing committed: the device's copy, and still the host's."""
    DEVICE = "device"
    """Some chunk is committed and the group not drained: only the device's."""


@dataclass(frozen=True, slots=True)
class Position:
    """Where one group stands.

    Args:
        parity: Which parity is in force.
        buffer: Which buffer of device parity is, where one is.
        open_chunk: The chunk whose old content is in the undo buffer; None where there is none.
        num_committed: Chunks of a group that is not closed whose content is new.
    """

    parity: InForce
    buffer: int = 0
    open_chunk: int | None = None
    num_committed: int = 0


@dataclass(frozen=True, slots=True)
class Repair:
    """How the lost pages of one group are rebuilt, in this order.

    Args:
        first_from_second: First-tier pages that the second tier gives.
        device_from_first: Device parity pages of which the first tier has the same content.
        data: Data pages to solve for, outside an open chunk.
        undo: The same of an open chunk, by their place in the group: they are solved for in the undo buffer.
        parity: Parity pages in force to solve for.
        second: Second-tier pages to encode again.
    """

    first_from_second: tuple[int, ...] = ()
    device_from_first: tuple[int, ...] = ()
    data: tuple[int, ...] = ()
    undo: tuple[int, ...] = ()
    parity: tuple[int, ...] = ()
    second: tuple[int, ...] = ()

    @property
    def num_erasures(self) -> int:
        """Unknowns of the code word."""
        return len(self.data) + len(self.undo) + len(self.parity)


@dataclass(frozen=True, slots=True)
class Assessment:
    """What a set of lost pages means for a rank.

    Args:
        repairs: For each group of the state.
        gradient_repairs: For each group of the gradients; None where nothing needs them and they can't be rebuilt.
        state_beyond: One sentence for each group of the state that can't be rebuilt.
        gradients_beyond: The same for gradients that are still needed (rule R14).
    """

    repairs: tuple[Repair, ...]
    gradient_repairs: tuple[Repair | None, ...]
    state_beyond: tuple[str, ...]
    gradients_beyond: tuple[str, ...]


def device_buffer(group: int, num_committed: int) -> int:
    """The buffer of device parity that is in force when so many chunks of an open group are committed.

    It is a function of the word, so COMMIT alone makes the next buffer the one in force: no second store, `auth`, has
    to be ordered with it. Neighbouring groups use different pairs, so the older one can be drained meanwhile (T4).
    """
    return 2 * (group % 2) + num_committed % 2


def positions(shape: Shape, marker: Marker | None, drained: Sequence[int]) -> list[Position]:
    """Say where each group stands.

    Args:
        shape: The division.
        marker: The rank's word.
        drained: For each group, the position of DONE of the step of which its parity in host memory is.
    """
    if marker is None or marker.phase not in (Phase.UNDO, Phase.COMMIT):
        return [Position(InForce.HOST)] * len(shape.groups)
    saved = marker.chunk if marker.phase is Phase.UNDO else None
    num_committed = marker.chunk + (marker.phase is Phase.COMMIT)
    done = Marker(marker.step, Phase.DONE, timeline=marker.timeline).position
    result = []
    for index, group in enumerate(shape.groups):
        inside = min(max(0, num_committed - group.first_chunk), len(group.chunks))
        opened = saved if saved in group.chunks else None
        closed = inside == len(group.chunks) and drained[index] == done
        if not group.chunks or closed or (inside == 0 and opened is None):
            result.append(Position(InForce.HOST))
        else:
            parity = InForce.DEVICE if inside else InForce.BOTH
            result.append(Position(parity, device_buffer(index, inside), opened, inside))
    return result


def assess(shape: Shape, marker: Marker | None, drained: Sequence[int], lost: Collection[Page]) -> Assessment:
    """Count erasures and say how to rebuild: the whole rule "when is a set of erasures recoverable".

    Args:
        shape: The division.
        marker: The rank's word, lowered where a recovery has decided so.
        drained: As for `positions`.
        lost: All lost pages.
    """
    by_place: dict[tuple[PageKind, int], set[int]] = {}
    for page in lost:
        by_place.setdefault((page.kind, page.group), set()).add(page.place)
    where = positions(shape, marker, drained)
    repairs = [_repair(shape, index, position, by_place) for index, position in enumerate(where)]
    beyond = [
        f"protection group {index}: {_described(repair)} to rebuild, {shape.num_parity} can be"
        for index, repair in enumerate(repairs)
        if repair.num_erasures > shape.num_parity
    ]
    gradient_repairs: list[Repair | None] = []
    gradients_beyond = []
    for index, group in enumerate(shape.gradient_groups):
        data = tuple(sorted(by_place.get((PageKind.GRADIENT, index), ())))
        parity = tuple(sorted(by_place.get((PageKind.GRADIENT_PARITY, index), ())))
        final = marker is not None and marker.phase is not Phase.DONE
        fits = final and len(data) + len(parity) <= shape.num_parity
        gradient_repairs.append(Repair(data=data, parity=parity) if fits else None)
        if final and not fits and _awaited(group, marker):
            gradients_beyond.append(
                f"gradients of chunks {group.chunks.start} to {group.chunks.stop - 1}: "
                f"{_described(Repair(data=data, parity=parity))} to rebuild, {shape.num_parity} can be"
            )
    return Assessment(tuple(repairs), tuple(gradient_repairs), tuple(beyond), tuple(gradients_beyond))


def _awaited(group: Group, marker: Marker | None) -> bool:
    """Whether the update still reads gradients of a group."""
    if marker is None or marker.phase is Phase.DONE:
        return False
    if marker.phase in (Phase.READY, Phase.SYNCED):
        return True
    return group.chunks.stop > marker.chunk + (marker.phase is Phase.COMMIT)


def _repair(shape: Shape, index: int, position: Position, lost: Mapping[tuple[PageKind, int], set[int]]) -> Repair:
    group = shape.groups[index]
    data = lost.get((PageKind.DATA, index), set())
    first = lost.get((PageKind.FIRST, index), set())
    second = lost.get((PageKind.SECOND, index), set())
    tier_helps = len(first) + len(second) <= shape.num_second
    if position.parity is InForce.HOST:
        from_second = first if tier_helps else set()
        return Repair(
            _in_order(from_second), (), _in_order(data), (), _in_order(first - from_second), _in_order(second)
        )
    opened = group.pages_of(position.open_chunk) if position.open_chunk is not None else range(0)
    undo = {opened[k] for k in lost.get((PageKind.UNDO, 0), ()) if k < len(opened)}
    device = lost.get((PageKind.DEVICE, position.buffer), set())
    from_second = set()
    from_first: set[int] = set()
    if position.parity is InForce.BOTH:
        if device & first and tier_helps:  # host pages that nothing needs are written again by the drain
            from_second = device & first
        from_first = device - (first - from_second)
    return Repair(
        _in_order(from_second),
        _in_order(from_first),
        _in_order(data - set(opened)),
        _in_order(undo),
        _in_order(device - from_first),
    )


def _described(repair: Repair) -> str:
    parts = ((len(repair.data), "data"), (len(repair.undo), "undo"), (len(repair.parity), "parity"))
    named = [f"{number} {name}" for number, name in parts if number]
    return f"{' and '.join(named)} page{'s' * (repair.num_erasures != 1)}"


def _in_order(indices: Collection[int]) -> tuple[int, ...]:
    return tuple(sorted(indices))
