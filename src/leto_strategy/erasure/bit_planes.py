"""Field arithmetic with numpy alone, on bit planes.

32 rows of n words are turned into 32 planes of n words, plane k holding bit k of every symbol. To multiply all symbols
by x^s is then to call plane k plane k + s, and to multiply by a constant is to XOR whole ranges of planes, one call
for each pair of its bits. So each operation of numpy works on many thousand bytes, and a multiplication costs about as
much as 19 passes over its operand.
"""

import ctypes
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from leto_strategy.erasure.field import SYMBOL_BITS, SYMBOL_BYTES
from leto_strategy.erasure.pages import ZERO_PAGE

Planes = NDArray[np.uint32]

TRANSPOSE_STAGES = ((16, 0x0000FFFF), (8, 0x00FF00FF), (4, 0x0F0F0F0F), (2, 0x33333333), (1, 0x55555555))
FOLDS = (0, 2, 3, 7)
FIRST_FOLDED_TWICE = 57
"""Planes from here on land at 32 or above when x^32 is replaced by x^7 + x^3 + x^2 + 1."""


class Slicer:
    """Works on bit planes of `num_words` words, with scratch of that size."""

    def __init__(self, num_words: int) -> None:
        self.num_words = num_words
        self.num_bytes = num_words * SYMBOL_BYTES
        self.plane = num_words // SYMBOL_BITS
        self.product = np.empty(2 * num_words, np.uint32)
        self.other = np.empty(num_words, np.uint32)
        self._half = np.empty(num_words // 2, np.uint32)
        self._double = np.empty(num_words + self.plane, np.uint32)  # (x + 1) times an operand has 33 planes

    def load(self, target: Planes, address: int, other_address: int = ZERO_PAGE) -> None:
        """Read words, and XOR others to them; turn them into planes."""
        self._copy(target, address)
        if other_address != ZERO_PAGE:
            self._copy(self.other, other_address)
            np.bitwise_xor(target, self.other, target)
        self._transpose(target)

    def store(self, planes: Planes, address: int, base_address: int = ZERO_PAGE) -> None:
        """Turn planes into words, XOR others to them, and write them."""
        self._transpose(planes)
        if base_address != ZERO_PAGE:
            self._copy(self.other, base_address)
            np.bitwise_xor(planes, self.other, planes)
        ctypes.memmove(address, planes.ctypes.data, self.num_bytes)

    def _copy(self, target: Planes, address: int) -> None:
        if address == ZERO_PAGE:
            target.fill(0)
        else:
            ctypes.memmove(target.ctypes.data, address, self.num_bytes)

    def _transpose(self, words: Planes) -> None:
        """Exchange bit k of row r with bit r of row k, everywhere; its own inverse."""
        for distance, mask in TRANSPOSE_STAGES:
            pairs = words.reshape(SYMBOL_BITS // (2 * distance), 2, distance * self.plane)
            low, high = pairs[:, 0], pairs[:, 1]
            moved = self._half.reshape(low.shape)
            np.right_shift(low, distance, moved)
            np.bitwise_xor(moved, high, moved)
            np.bitwise_and(moved, mask, moved)
            np.bitwise_xor(high, moved, high)
            np.left_shift(moved, distance, moved)
            np.bitwise_xor(low, moved, low)

    def add_product(self, product: Planes, operand: Planes, factor: int) -> None:
        """Add `factor` times `operand` to an unreduced product of 64 planes."""
        size, plane = operand.size, self.plane
        digits = _digits(factor)
        if any(digit == 3 for _, digit in digits):
            np.copyto(self._double[:size], operand)
            self._double[size:] = 0
            np.bitwise_xor(self._double[plane:], operand, self._double[plane:])
        for shift, digit in digits:
            source = operand if digit == 1 else self._double
            target = product[shift * plane : shift * plane + source.size]
            np.bitwise_xor(target, source, target)

    def reduce(self, product: Planes) -> Planes:
        """Fold the upper planes of a product into the lower 32, and return those."""
        for start, stop in ((FIRST_FOLDED_TWICE, 2 * SYMBOL_BITS - 1), (SYMBOL_BITS, FIRST_FOLDED_TWICE)):
            high = product[start * self.plane : stop * self.plane]
            for fold in FOLDS:
                first = (start - SYMBOL_BITS + fold) * self.plane
                target = product[first : first + high.size]
                np.bitwise_xor(target, high, target)
        return product[: SYMBOL_BITS * self.plane]

    def multiply_add(self, target: Planes, operand: Planes, factor: int) -> None:
        """`target` ^= `factor` times `operand`."""
        if factor == 0:
            return
        np.copyto(self.product[: target.size], target)
        self.product[target.size :] = 0
        self.add_product(self.product, operand, factor)
        np.copyto(target, self.reduce(self.product))


@lru_cache(maxsize=1 << 16)
def _digits(factor: int) -> tuple[tuple[int, int], ...]:
    """A sum of x^shift (digit 1) and x^shift (x + 1) (digit 3) that is `factor`, with few terms."""
    found, shift = [], 0
    while factor >> shift:
        digit = factor >> shift & 3
        if digit & 1:
            found.append((shift, digit))
            shift += 1
        shift += 1
    return tuple(found)
