"""Coefficients of the code: the generator matrix.

Points are numbers read as field elements. Parity page j sits at the point j, data page i at the point H + i, with H
parity pages. With s(y) = prod over j < H of (y + j), and s' its derivative,

    parity_j = sum over i of C[i, j] data_i,    C[i, j] = s(H + i) / (s'(j) (H + i + j)):

the j-th Lagrange polynomial of the parity points, taken at data point i. Nothing depends on the number of data pages,
so a shorter group has the same coefficients. Why any H erasures can be repaired is proved in docs/erasure_code.md.
"""

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from leto_strategy.erasure import words
from leto_strategy.erasure.field import inverse, multiply, product_of


def coefficient(data_index: int, parity_index: int, *, num_parity: int) -> int:
    """One entry of the generator matrix, by its definition."""
    point = num_parity + data_index
    above = product_of(point ^ other for other in range(num_parity))
    below = product_of(parity_index ^ other for other in range(num_parity) if other != parity_index)
    return multiply(above, inverse(multiply(below, point ^ parity_index)))


@cache
def generator(num_data: int, num_parity: int) -> Tensor:
    """The generator matrix C [D, H], int64 symbols on the CPU. Shared: don't write into it."""
    points = torch.arange(num_parity, num_parity + num_data)
    parity_points = torch.arange(num_parity)
    # Every factor is an integer below the next power of two after the last point: invert those once.
    inverse_of = words.inverse(torch.arange(1 << (num_parity + num_data).bit_length()))
    above = torch.ones_like(points)
    for other in range(num_parity):
        above = words.multiply(above, points ^ other)
    below = torch.ones_like(parity_points)
    for other in range(1, num_parity):  # the differences to all others
        factors = inverse_of[parity_points ^ (parity_points + other) % num_parity]
        below = words.multiply(below, factors)
    cauchy = inverse_of[points[:, None] ^ parity_points[None, :]]
    return words.multiply(words.multiply(cauchy, above[:, None]), below[None, :])


def coefficient_rows(data_indices: Sequence[int], num_parity: int) -> list[list[int]]:
    """A row for each parity page, with the coefficients of the given data pages."""
    if not data_indices:
        return [[] for _ in range(num_parity)]
    # Sizes are rounded up, so that the cache holds few matrices.
    matrix_DH = generator(1 << max(data_indices).bit_length(), num_parity)
    rows: list[list[int]] = matrix_DH[list(data_indices)].T.tolist()
    return rows
