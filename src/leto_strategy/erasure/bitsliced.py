"""The backend for host memory without a C compiler: numpy on bit planes, strip by strip."""

from collections.abc import Iterator, Sequence

import numpy as np

from leto_strategy.erasure.additive_fft import BLOCK_PAGES, BUTTERFLIES, block_twiddles, blocks_of
from leto_strategy.erasure.backend import Backend
from leto_strategy.erasure.bit_planes import Slicer
from leto_strategy.erasure.field import SYMBOL_BITS
from leto_strategy.erasure.generator import coefficient_rows
from leto_strategy.erasure.pages import ZERO_PAGE, PageTable
from leto_strategy.erasure.threads import run_in_ranges

PLANE_WORDS = 1024
"""Words of a plane. A call of numpy takes about 0.4 µs beside its work, so with 256, where 16 pages of planes would fit
into an L2 cache of 1 MiB, encoding is slower by 45 %."""

STRIP_WORDS = SYMBOL_BITS * PLANE_WORDS


class BitslicedBackend(Backend):
    """numpy on the planes of bits, strip by strip."""

    name = "numpy"
    strip_words = 1 << 16

    def parity(
        self,
        out: PageTable,
        *,
        indices: Sequence[int],
        new: PageTable,
        old: PageTable | None,
        base: PageTable | None,
        threads: int,
    ) -> None:
        """See `Backend.parity`."""
        if len(out) == BLOCK_PAGES:
            blocks = blocks_of(indices)
            run_in_ranges(
                lambda start, stop: _encode_blocks(out, blocks, new, old, base, start, stop),
                out.num_words,
                threads=threads,
            )
        else:
            matrix = coefficient_rows(indices, len(out))
            run_in_ranges(
                lambda start, stop: _combine(out, matrix, new, old, base, start, stop), out.num_words, threads=threads
            )

    def combine(self, out: PageTable, *, matrix: Sequence[Sequence[int]], pages: PageTable, threads: int) -> None:
        """See `Backend.combine`."""
        run_in_ranges(
            lambda start, stop: _combine(out, matrix, pages, None, None, start, stop), out.num_words, threads=threads
        )


def _strips(start: int, stop: int) -> Iterator[tuple[int, Slicer]]:
    """The first word of each strip of a range, and what works on it."""
    slicer = None
    for first in range(start, stop, STRIP_WORDS):
        num_words = min(STRIP_WORDS, stop - first)
        if slicer is None or slicer.num_words != num_words:
            slicer = Slicer(num_words)
        yield first, slicer


def _addresses(table: PageTable | None, first_word: int) -> list[int]:
    """Addresses of a strip; none where there is no table."""
    return list(table.words(first_word, table.num_words).addresses) if table is not None else []


def _encode_blocks(
    out: PageTable,
    blocks: dict[int, list[int | None]],
    new: PageTable,
    old: PageTable | None,
    base: PageTable | None,
    start: int,
    stop: int,
) -> None:
    for first, slicer in _strips(start, stop):
        slots = np.empty((BLOCK_PAGES, slicer.num_words), np.uint32)
        sums = np.zeros_like(slots)
        sources, others, bases = _addresses(new, first), _addresses(old, first), _addresses(base, first)
        for block, places in blocks.items():
            for slot, place in zip(slots, places, strict=True):
                if place is None:
                    slot.fill(0)
                else:
                    slicer.load(slot, sources[place], others[place] if others else ZERO_PAGE)
            factors = block_twiddles(block)
            for u, v, w in BUTTERFLIES:
                np.bitwise_xor(slots[v], slots[u], slots[v])
                slicer.multiply_add(slots[u], slots[v], factors[w])
            np.bitwise_xor(sums, slots, sums)
        factors = block_twiddles(-1)
        for u, v, w in reversed(BUTTERFLIES):
            slicer.multiply_add(sums[u], sums[v], factors[w])
            np.bitwise_xor(sums[v], sums[u], sums[v])
        for row, address in enumerate(_addresses(out, first)):
            slicer.store(sums[row], address, bases[row] if bases else ZERO_PAGE)


def _combine(
    out: PageTable,
    matrix: Sequence[Sequence[int]],
    new: PageTable,
    old: PageTable | None,
    base: PageTable | None,
    start: int,
    stop: int,
) -> None:
    for first, slicer in _strips(start, stop):
        products = np.zeros((len(out), 2 * slicer.num_words), np.uint32)
        page = np.empty(slicer.num_words, np.uint32)
        others, bases = _addresses(old, first), _addresses(base, first)
        for column, address in enumerate(_addresses(new, first)):
            slicer.load(page, address, others[column] if others else ZERO_PAGE)
            for product, row in zip(products, matrix, strict=True):
                slicer.add_product(product, page, row[column])
        for index, address in enumerate(_addresses(out, first)):
            slicer.store(slicer.reduce(products[index]), address, bases[index] if bases else ZERO_PAGE)
