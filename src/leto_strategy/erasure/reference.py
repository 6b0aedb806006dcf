"""The code by its definition: slow, plain, and what every faster way is compared with, byte for byte.

Shapes: D data pages, H parity pages, W words a page, as int32 tensors; or lists of lists of Python ints.
"""

from collections.abc import Mapping, Sequence

from torch import Tensor

from leto_strategy.erasure import words
from leto_strategy.erasure.field import inverse, multiply, multiply_slowly
from leto_strategy.erasure.generator import coefficient, generator
from leto_strategy.errors import TooManyErasures


def encode(data_DW: Tensor, *, num_parity: int) -> Tensor:
    """Parity pages [H, W] of int32 data pages [D, W], on the device of the data."""
    matrix_DH = generator(data_DW.shape[0], num_parity).to(data_DW.device)
    return words.to_words(words.matmul(matrix_DH.T, words.to_symbols(data_DW)))


def encode_ints(data: Sequence[Sequence[int]], *, num_parity: int) -> list[list[int]]:
    """The same on Python ints, each coefficient and each product by its definition. Shares only the formula."""
    width = len(data[0])
    parity = [[0] * width for _ in range(num_parity)]
    for data_index, page in enumerate(data):
        for parity_index, sums in enumerate(parity):
            factor = coefficient(data_index, parity_index, num_parity=num_parity)
            for place, word in enumerate(page):
                sums[place] ^= multiply_slowly(factor, word)
    return parity


def reconstruct(
    survivors: Mapping[int, Sequence[int]], *, num_data: int, num_parity: int
) -> tuple[list[list[int]], list[list[int]]]:
    """All data and parity pages from those that survived, by Gauss-Jordan elimination on Python ints.

    Args:
        survivors: Words of each surviving page by its point: parity page j has j, data page i has H + i.
        num_data: D.
        num_parity: H.

    Raises:
        TooManyErasures: Fewer than D pages survived.
    """
    chosen = sorted(survivors, reverse=True)[:num_data]
    if len(chosen) < num_data:
        raise TooManyErasures(num_data + num_parity - len(survivors), num_parity)
    # One row a chosen page: what it is in terms of the data, and its words.
    rows = []
    for point in chosen:
        if point >= num_parity:
            left = [int(point - num_parity == column) for column in range(num_data)]
        else:
            left = [coefficient(column, point, num_parity=num_parity) for column in range(num_data)]
        rows.append(left + list(survivors[point]))
    for column in range(num_data):
        pivot = next(index for index in range(column, num_data) if rows[index][column])
        rows[column], rows[pivot] = rows[pivot], rows[column]
        scale = inverse(rows[column][column])
        rows[column] = [multiply(scale, value) for value in rows[column]]
        for index in range(num_data):
            if index != column and (factor := rows[index][column]):
                rows[index] = [a ^ multiply(factor, b) for a, b in zip(rows[index], rows[column], strict=True)]
    data = [row[num_data:] for row in rows]
    return data, encode_ints(data, num_parity=num_parity)
