"""How tensors and chunks are laid out where pages are protected: no page belongs to two chunks.

In every arena a run starts at a page, and so does every chunk, at the same offset in the run for the parameter, its
moments and its gradient. A tensor that may be cut is cut there, without a gap; one that may not is moved to the next
page where it opens a chunk. So a chunk's pages are its own, a group of whole chunks has whole pages, and what
is copied to the undo buffer, page by page, is what the delta of the parity is computed from. The price is less than a
page a chunk and arena. Pure arithmetic, as in `geometry`. Leto paper, section 5.2.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from leto_strategy.erasures import Group, Shape
from leto_strategy.geometry import Chunk, align_up


@dataclass(frozen=True, slots=True)
class Paging:
    """What a user chooses of the protection.

    Args:
        page_bytes: What is lost and rebuilt at once; a power of two.
        num_data: Pages of a group at most, D.
        num_parity: First-tier parity pages of a group, H1.
        num_second: Second-tier parity pages of a group, H2.
    """

    page_bytes: int = 2 << 20
    num_data: int = 1024
    num_parity: int = 16
    num_second: int = 1

    @property
    def group_bytes(self) -> int:
        """Size of a whole group."""
        return self.page_bytes * self.num_data


@dataclass(frozen=True, slots=True)
class RunSizes:
    """One run as it is to be placed.

    Args:
        element_bytes: Size of one element.
        num_copies: The parameter and its moments.
        cuttable: Whether its tensors may be cut.
        num_elements: Of each tensor, in order; none is 0.
    """

    element_bytes: int
    num_copies: int
    cuttable: bool
    num_elements: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """The elements `start` to `stop` of one tensor of a run; both by their places."""

    run: int
    tensor: int
    start: int
    stop: int


@dataclass(slots=True)
class Placement:
    """Where tensors lie and how they are cut.

    Args:
        offsets: Bytes from the start of the run of each of its tensors.
        at_page: The tensors, by run and place, that are moved to a page.
        chunks: Pieces of each chunk.
    """

    offsets: list[list[int]]
    at_page: set[tuple[int, int]]
    chunks: list[list[Piece]]


def chunk_bytes_in_groups(chunk_bytes: int, paging: Paging) -> int:
    """Return a chunk size of which a whole number fills a group, so that groups have few pages less than they may."""
    return paging.group_bytes // max(1, round(paging.group_bytes / max(1, chunk_bytes)))


def place(runs: Sequence[RunSizes], *, chunk_bytes: int, page_bytes: int) -> Placement:
    """Lay out all runs, in their order, and divide them into chunks of about `chunk_bytes`, counted in whole pages."""
    filling = _Filling(chunk_bytes, page_bytes)
    offsets = []
    at_page: set[tuple[int, int]] = set()
    for index, run in enumerate(runs):
        filling.begin_run(run.num_copies)
        starts: list[int] = []
        end = 0
        for tensor, num_elements in enumerate(run.num_elements):
            begin, size = align_up(end), num_elements * run.element_bytes
            if run.cuttable:
                done = 0
                while done < size:
                    stop = min(size, filling.limit - begin)
                    if stop > done:
                        filling.add(
                            Piece(index, tensor, done // run.element_bytes, stop // run.element_bytes), begin + stop
                        )
                        done = stop
                    if done < size:
                        filling.begin_chunk(begin + done)
            else:
                if begin + size > filling.limit and not filling.is_empty:
                    begin = align_up(end, page_bytes)
                    at_page.add((index, tensor))
                    filling.begin_chunk(begin)
                filling.add(Piece(index, tensor, 0, num_elements), begin + size)
            starts.append(begin)
            end = begin + size
        offsets.append(starts)
    return Placement(offsets, at_page, [pieces for pieces in filling.chunks if pieces])


class _Filling:
    """The chunk that is being filled. Positions are bytes from the start of the run at hand."""

    def __init__(self, chunk_bytes: int, page_bytes: int) -> None:
        self.chunks: list[list[Piece]] = [[]]
        self._chunk_bytes, self._page_bytes = chunk_bytes, page_bytes
        self._room = chunk_bytes
        self._counted = 0  # the pages of the run up to here are counted in this chunk or an earlier one
        self._copies = 1

    @property
    def is_empty(self) -> bool:
        return not self.chunks[-1]

    @property
    def limit(self) -> int:
        """Where the chunk ends if it has nothing else: the end of a page, behind at least one page where empty."""
        num_pages = max(self._room // (self._copies * self._page_bytes), int(self.is_empty))
        return self._counted + num_pages * self._page_bytes

    def begin_run(self, num_copies: int) -> None:
        self._counted, self._copies = 0, num_copies

    def begin_chunk(self, position: int) -> None:
        assert position % self._page_bytes == 0, f"a chunk would start at byte {position} of its run"
        self.chunks.append([])
        self._room, self._counted = self._chunk_bytes, position

    def add(self, piece: Piece, end: int) -> None:
        self.chunks[-1].append(piece)
        counted = max(self._counted, align_up(end, self._page_bytes))
        self._room = max(0, self._room - (counted - self._counted) * self._copies)
        self._counted = counted


def shape_of(
    chunks: Sequence[Chunk],
    copies: Sequence[int],
    element_bytes: Sequence[int],
    frozen_pages: int,
    paging: Paging,
) -> Shape:
    """Put chunks into groups, in order.

    Args:
        chunks: Placed as above.
        copies: Number of protected tensors of each run.
        element_bytes: Of each run.
        frozen_pages: Pages of parameters that no chunk has.
        paging: Sizes.

    Raises:
        ValueError: a chunk is larger than a group may be.
    """
    spans = [
        [(pages_of(span.num_elements * element_bytes[span.run], paging), copies[span.run]) for span in chunk.spans]
        for chunk in chunks
    ]
    state = [sum(pages * count for pages, count in chunk) for chunk in spans]
    gradients = [sum(pages for pages, _ in chunk) for chunk in spans]
    largest = max(state, default=0)
    if largest > paging.num_data:
        raise ValueError(
            f"a tensor that can't be cut, with its moments, takes {largest} pages of {paging.page_bytes} bytes, and "
            f"protection_pages is {paging.num_data}: set protection_pages to at least {largest}"
        )
    frozen = [
        Group(min(paging.num_data, frozen_pages - start), len(chunks), ())
        for start in range(0, frozen_pages, paging.num_data)
    ]
    return Shape((*_groups(state, paging), *frozen), _groups(gradients, paging), paging.num_parity, paging.num_second)


def pages_of(size_bytes: int, paging: Paging) -> int:
    """Pages that a range from the start of a page on touches."""
    return -(-size_bytes // paging.page_bytes)


def _groups(pages: Sequence[int], paging: Paging) -> tuple[Group, ...]:
    members: list[list[int]] = []
    for chunk, count in enumerate(pages):
        if not members or sum(pages[i] for i in members[-1]) + count > paging.num_data:
            members.append([])
        members[-1].append(chunk)
    return tuple(Group(sum(pages[i] for i in inside), inside[0], tuple(pages[i] for i in inside)) for inside in members)
