"""The additive FFT: the parity of 16 parity pages for two products a data word instead of 16, to the same bytes.

Block b, the data pages 16 b to 16 b + 15, sits at the points o + t with o = 16 (b + 1) and t < 16. Take its 16 words
as values there of a polynomial of degree below 16. Its values at the points of the parity pages, 0 to 15, are just
what the block adds to the parity (docs/erasure_code.md). So: an inverse FFT a block, from values to coefficients in a
basis that all blocks share; the sum over blocks; one FFT at the end. The transforms are those of Lin, Chung and Han.

A butterfly of the inverse FFT is v ^= u; u ^= w v, one of the FFT u ^= w v; v ^= u.
"""

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

from leto_strategy.erasure.field import inverse, multiply

BLOCK_PAGES = 16
"""Pages of a block, and number of parity pages with which the FFT is used."""

BLOCK_LEVELS = 4
TWIDDLES_PER_BLOCK = BLOCK_PAGES - 1


class Butterfly(NamedTuple):
    """One butterfly: the slots of u and v within a block, and the place of w among the block's twiddles."""

    u: int
    v: int
    w: int


def _butterflies() -> tuple[Butterfly, ...]:
    found, first = [], 0
    for level in range(BLOCK_LEVELS):
        for index, start in enumerate(range(0, BLOCK_PAGES, 2 << level)):
            found += [Butterfly(u, u + (1 << level), first + index) for u in range(start, start + (1 << level))]
        first += BLOCK_PAGES >> (level + 1)
    return tuple(found)


BUTTERFLIES = _butterflies()
"""Those of the inverse FFT, in order; the FFT has them in reverse order."""


@cache
def _subspace_images() -> tuple[tuple[int, ...], ...]:
    """Images of x^0 to x^31 under each normalised subspace polynomial (see `subspace_value`), which is GF(2)-linear."""
    images = []
    raw = [1 << bit for bit in range(32)]  # s_0(y) = y
    for level in range(BLOCK_LEVELS):
        scale = inverse(raw[level])
        images.append(tuple(multiply(value, scale) for value in raw))
        at_level = raw[level]
        raw = [multiply(value, value ^ at_level) for value in raw]  # s_{k+1}(y) = s_k(y) (s_k(y) + s_k(2^k))
    return tuple(images)


def subspace_value(level: int, point: int) -> int:
    """s_k(point) / s_k(2^k) with s_k(y) = prod over t < 2^k of (y + t): 0 on the numbers below 2^k, 1 at 2^k."""
    value = 0
    for bit, image in enumerate(_subspace_images()[level]):
        if point >> bit & 1:
            value ^= image
    return value


@cache
def block_twiddles(block: int) -> tuple[int, ...]:
    """The 15 factors of one block's inverse FFT: 8 of level 0, then 4, 2 and 1, each level in order of its butterflies.

    Butterfly i of level k starts at the block's page i 2^(k+1). Block -1 gives the factors of the closing FFT: its
    points are those of the parity pages.
    """
    first = BLOCK_PAGES * (block + 1)
    return tuple(
        subspace_value(level, first + start)
        for level in range(BLOCK_LEVELS)
        for start in range(0, BLOCK_PAGES, 2 << level)
    )


def closing_and_block_twiddles(blocks: Sequence[int]) -> list[int]:
    """The factors of the closing FFT and then of the given blocks, 15 each."""
    return [factor for block in (-1, *blocks) for factor in block_twiddles(block)]


def blocks_of(indices: Sequence[int]) -> dict[int, list[int | None]]:
    """The blocks that data pages belong to.

    Returns:
        For each block that has one of `indices`, the place in `indices` of each of its 16 pages; None for others.
    """
    blocks: dict[int, list[int | None]] = {}
    for place, index in enumerate(indices):
        block, slot = divmod(index, BLOCK_PAGES)
        blocks.setdefault(block, [None] * BLOCK_PAGES)[slot] = place
    return blocks
