"""Field arithmetic on tensors of symbols: plain, on any device, the same result as `field.multiply` for every element.

Symbols travel as int32 in pages (`data_DW`) and as int64 with values in [0, 2^32) inside calculations.
"""

import torch
from torch import Tensor

from leto_strategy.erasure.field import REDUCTION, SYMBOL_BITS

_MASK = (1 << SYMBOL_BITS) - 1


def to_symbols(words: Tensor) -> Tensor:
    """int32 words of pages as int64 values in [0, 2^32)."""
    return words.to(torch.int64) & _MASK


def to_words(symbols: Tensor) -> Tensor:
    """int64 values in [0, 2^32) as int32 words of the same bits."""
    return ((symbols ^ (1 << 31)) - (1 << 31)).to(torch.int32)


def multiply(a: Tensor, b: Tensor) -> Tensor:
    """Element-wise product of int64 symbols, broadcast: shift, reduce and add, once for each bit of `b`."""
    shape = torch.broadcast_shapes(a.shape, b.shape)
    multiple, product = a, torch.zeros(shape, dtype=torch.int64, device=a.device)
    for bit in range(SYMBOL_BITS):
        product ^= multiple * (b >> bit & 1)
        multiple = (multiple << 1 & _MASK) ^ (multiple >> (SYMBOL_BITS - 1)) * REDUCTION
    return product


def inverse(a: Tensor) -> Tensor:
    """Element-wise inverse of int64 symbols, a^(2^32 - 2); that of 0 comes out as 0."""
    result, square = torch.ones_like(a), a
    for _ in range(SYMBOL_BITS - 1):
        square = multiply(square, square)
        result = multiply(result, square)
    return result


def matmul(matrix: Tensor, data: Tensor) -> Tensor:
    """Product of int64 matrices [M, K] and [K, N] over the field."""
    product = torch.zeros((matrix.shape[0], data.shape[1]), dtype=torch.int64, device=data.device)
    for index in range(matrix.shape[1]):
        product ^= multiply(data[index : index + 1], matrix[:, index : index + 1])
    return product
