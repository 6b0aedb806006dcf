"""How retained bytes are divided: alignment, chunks of the update, buckets of the gradient reduction.

Pure arithmetic on numbers of bytes and elements: no tensor, no memory, no optimizer. Every generation of trainers must
divide alike, so nothing here depends on anything but its arguments. Leto paper, section 5.2.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

ALIGNMENT_BYTES = 512
"""Start of every region. Tensors of torch's own allocator are aligned no better, so kernels choose the same paths."""

CHUNKS_AIM = 32
"""Chunks of a large model: the undo buffer is then 1/32 of the state, and calls cost little beside what they update."""

CHUNKS_MIN = 4
"""Chunks of a tiny model, where its tensors can be cut: an interrupted update always has several boundaries."""

CHUNK_BYTES_MIN = 4 << 20
"""Between the two a chunk has at least this size, because a smaller one costs more to call than to update."""


@dataclass(frozen=True, slots=True)
class Extent:
    """One trained tensor as the cutter sees it.

    Args:
        slot: Index of the tensor.
        run: Tensors of one run have the same dtype, moments and hyper-parameters and lie back to back.
        offset_elements: Start within the run, alignment gaps included.
        num_elements: Length; tensors without elements have no place in a chunk.
        element_bytes: Size of one element.
        num_copies: Tensors of this shape that an update changes: the parameter and its moments.
        cuttable: Whether an update gives the same bits wherever the tensor is cut.
    """

    slot: int
    run: int
    offset_elements: int
    num_elements: int
    element_bytes: int
    num_copies: int
    cuttable: bool


@dataclass(frozen=True, slots=True)
class Segment:
    """The elements `start` to `stop` of one tensor."""

    slot: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Span:
    """Neighbouring segments of one run: the elements `start` to `stop` of the run, alignment gaps included."""

    run: int
    start: int
    stop: int
    segments: tuple[Segment, ...]

    @property
    def num_elements(self) -> int:
        """Length with gaps."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Chunk:
    """Unit of commit: what the undo buffer holds at one time.

    Args:
        index: Position in the order of updates; it stands in the progress marker.
        spans: What the chunk consists of, at most one span per run.
        undo_bytes: Size in the undo buffer, where each copy of each span starts aligned.
    """

    index: int
    spans: tuple[Span, ...]
    undo_bytes: int


def align_up(size: int, alignment: int = ALIGNMENT_BYTES) -> int:
    """Return the smallest multiple of `alignment` that is not below `size`."""
    return -(-size // alignment) * alignment


def default_chunk_bytes(total_bytes: int) -> int:
    """Return the chunk size for `total_bytes` of protected state (parameters that are trained, and their moments)."""
    num_chunks = min(CHUNKS_AIM, max(CHUNKS_MIN, total_bytes // CHUNK_BYTES_MIN))
    return align_up(max(1, -(-total_bytes // num_chunks)))


def cut_chunks(extents: Sequence[Extent], *, chunk_bytes: int) -> tuple[Chunk, ...]:
    """Divide tensors, in their order, into chunks of about `chunk_bytes`.

    A cuttable tensor is cut where the chunk is full, at a multiple of the alignment. Another one is never divided: it
    opens a new chunk where it does not fit, and may be larger than `chunk_bytes` alone.

    Raises:
        ValueError: `chunk_bytes` is not positive.
    """
    if chunk_bytes <= 0:
        raise ValueError(f"chunk_bytes must be positive, got {chunk_bytes}")
    by_slot = {extent.slot: extent for extent in extents}
    filled: list[list[Segment]] = [[]]
    room = chunk_bytes
    for extent in extents:
        element_bytes = extent.element_bytes * extent.num_copies
        start = 0
        while start < extent.num_elements:
            fitting = extent.num_elements - start
            if fitting * element_bytes > room:
                fitting = _cut(extent, start, room // element_bytes, alone=not filled[-1])
            if fitting == 0:
                filled.append([])
                room = chunk_bytes
                continue
            filled[-1].append(Segment(extent.slot, start, start + fitting))
            start += fitting
            room = max(0, room - fitting * element_bytes)
    return tuple(chunk_of(index, segments, by_slot) for index, segments in enumerate(filled) if segments)


def chunk_of(
    index: int, segments: Sequence[Segment], by_slot: dict[int, Extent], *, alignment_bytes: int = ALIGNMENT_BYTES
) -> Chunk:
    """Put segments together.

    Args:
        index: Of the chunk.
        segments: In order.
        by_slot: The extents that they are of.
        alignment_bytes: Of the start of each copy of each span in the undo buffer.
    """
    spans: list[Span] = []
    undo_bytes = 0
    for run in dict.fromkeys(by_slot[segment.slot].run for segment in segments):
        inside = tuple(segment for segment in segments if by_slot[segment.slot].run == run)
        first, last = by_slot[inside[0].slot], by_slot[inside[-1].slot]
        span = Span(run, first.offset_elements + inside[0].start, last.offset_elements + inside[-1].stop, inside)
        undo_bytes += align_up(span.num_elements * first.element_bytes, alignment_bytes) * first.num_copies
        spans.append(span)
    return Chunk(index, tuple(spans), undo_bytes)


def cut_buckets(sizes: Sequence[int], *, first_bytes: int, bytes_each: int) -> tuple[range, ...]:
    """Divide gradients of `sizes` bytes, in their order, into buckets that are reduced together.

    A bucket is closed when it has reached its limit, so it is at least that large, except for the last.

    Args:
        sizes: Bytes of each gradient.
        first_bytes: Limit of the first bucket: small, so that communication starts early in the backward pass.
        bytes_each: Limit of every other bucket.

    Raises:
        ValueError: a limit is not positive.
    """
    if first_bytes <= 0 or bytes_each <= 0:
        raise ValueError(f"bucket sizes must be positive, got {first_bytes} and {bytes_each}")
    buckets: list[range] = []
    start = filled = 0
    for index, size in enumerate(sizes):
        filled += size
        if filled >= (bytes_each if buckets else first_bytes):
            buckets.append(range(start, index + 1))
            start, filled = index + 1, 0
    if start < len(sizes):
        buckets.append(range(start, len(sizes)))
    return tuple(buckets)


def offsets(sizes: Iterable[int]) -> list[int]:
    """Return where each of `sizes` bytes starts when all lie back to back, each aligned, and the end as last item."""
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + align_up(size))
    return starts


def _cut(extent: Extent, start: int, room_elements: int, *, alone: bool) -> int:
    """Return how many elements from `start` on go into a chunk that has no room for all of them."""
    if not extent.cuttable:
        return extent.num_elements if alone else 0
    quantum = max(1, ALIGNMENT_BYTES // extent.element_bytes)
    fitting = room_elements // quantum * quantum
    return min(fitting or (quantum if alone else 0), extent.num_elements - start)
