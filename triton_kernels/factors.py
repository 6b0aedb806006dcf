"""Factors of the additive FFT: what its butterflies multiply by in a block of 16 data pages."""

from functools import cache, lru_cache

import torch
from torch import Tensor

BLOCK_PAGES = 16


@lru_cache(maxsize=4096)
def factors_on(first_pages: tuple[int, ...], device: torch.device) -> Tensor:
    """Factors of blocks, int64 [num_blocks, 4], made once.

    Args:
        first_pages: Index in the group of each block's first page.
        device: Where they will be read.

    Raises:
        ValueError: An index is not a multiple of 16.
    """
    if any(page % BLOCK_PAGES or page < 0 for page in first_pages):
        raise ValueError(
            f"first pages must be multiples of {BLOCK_PAGES} where no matrix_PH is given, not {first_pages}"
        )
    rows = [block_factors(page // BLOCK_PAGES) for page in first_pages]
    return torch.tensor(rows, dtype=torch.int64, device=device)


@cache
def block_factors(block: int) -> tuple[int, int, int, int]:
    """s_k(point) / s_k(2^k), k = 0 to 3, at the first point of a block of data pages: 16 (block + 1).

    s_k(y) is the product of y + t over t < 2^k; it is linear over GF(2), so butterflies inside a block differ from the
    block's factor by constants.
    """
    values, raw, at_level = [], BLOCK_PAGES * (block + 1), [1, 2, 4, 8]
    for level in range(4):
        values.append(field_product(raw, _inverse(at_level[level])))
        scale = at_level[level]
        raw = field_product(raw, raw ^ scale)
        at_level = [field_product(value, value ^ scale) for value in at_level]
    return values[0], values[1], values[2], values[3]


def field_product(a: int, b: int) -> int:
    """Product of two symbols."""
    product = 0
    for bit in range(32):
        product ^= (a << bit) * (b >> bit & 1)
    for bit in range(63, 31, -1):
        product ^= (0x1_0000_008D << (bit - 32)) * (product >> bit & 1)
    return product


@cache
def _inverse(a: int) -> int:
    result, exponent = 1, 2**32 - 2
    while exponent:
        if exponent & 1:
            result = field_product(result, a)
        a, exponent = field_product(a, a), exponent >> 1
    return result
