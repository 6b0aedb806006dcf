"""The generator matrix, the claim that it is MDS, and the FFT that makes the same sums."""

import random
from itertools import combinations

import pytest

from leto_strategy.erasure.additive_fft import BLOCK_PAGES, BUTTERFLIES, block_twiddles, blocks_of, subspace_value
from leto_strategy.erasure.field import FIELD_SIZE, GENERATOR, inverse, multiply, multiply_slowly, power
from leto_strategy.erasure.generator import coefficient, coefficient_rows, generator


def determinant(rows: list[list[int]]) -> int:
    """By elimination over the field; signs do not matter there."""
    rows, result = [list(row) for row in rows], 1
    for column in range(len(rows)):
        pivot = next((index for index in range(column, len(rows)) if rows[index][column]), None)
        if pivot is None:
            return 0
        rows[column], rows[pivot] = rows[pivot], rows[column]
        result = multiply(result, rows[column][column])
        scale = inverse(rows[column][column])
        for index in range(column + 1, len(rows)):
            factor = multiply(rows[index][column], scale)
            rows[index] = [a ^ multiply(factor, b) for a, b in zip(rows[index], rows[column], strict=True)]
    return result


@pytest.mark.parametrize(("num_data", "num_parity"), [(7, 4), (4, 5), (5, 5)])
def test_every_square_minor_is_non_zero(num_data: int, num_parity: int) -> None:
    matrix = generator(num_data, num_parity).tolist()
    count = 0
    for size in range(1, min(num_data, num_parity) + 1):
        for rows in combinations(range(num_data), size):
            for columns in combinations(range(num_parity), size):
                assert determinant([[matrix[row][column] for column in columns] for row in rows]) != 0
                count += 1
    assert count > 100


def test_powers_of_points_instead_would_not_do() -> None:
    """The parity sum x_i^j data_i has zero minors: 1 and a cube root of unity have the same cube."""
    root = power(GENERATOR, (FIELD_SIZE - 1) // 3)
    rows = [[power(point, exponent) for exponent in range(4)] for point in (1, root)]
    assert determinant([row[:2] for row in rows]) != 0
    assert determinant([[row[0], row[3]] for row in rows]) == 0


@pytest.mark.parametrize("num_parity", [1, 2, 3, 7, 16, 17, 64])
def test_the_matrix_holds_the_coefficients_of_the_definition(num_parity: int) -> None:
    matrix = generator(40, num_parity)
    for data_index in (0, 1, 15, 16, 39):
        for parity_index in {0, 1, num_parity // 2, num_parity - 1} & set(range(num_parity)):
            expected = coefficient(data_index, parity_index, num_parity=num_parity)
            assert matrix[data_index, parity_index] == expected


def test_a_longer_group_has_the_same_coefficients() -> None:
    assert generator(100, 5)[:33].equal(generator(33, 5))
    assert coefficient_rows([3, 99], 5) == generator(100, 5)[[3, 99]].T.tolist()
    assert coefficient_rows([], 3) == [[], [], []]


def test_one_parity_page_is_the_xor() -> None:
    assert generator(50, 1).tolist() == [[1]] * 50


@pytest.mark.parametrize("level", range(4))
def test_subspace_values_vanish_on_their_subspace_and_are_linear(level: int, rng: random.Random) -> None:
    assert all(subspace_value(level, point) == 0 for point in range(1 << level))
    assert subspace_value(level, 1 << level) == 1
    a, b = rng.getrandbits(32), rng.getrandbits(32)
    assert subspace_value(level, a ^ b) == subspace_value(level, a) ^ subspace_value(level, b)
    product, scale = 1, 1
    for point in range(1 << level):
        product, scale = multiply(product, a ^ point), multiply(scale, (1 << level) ^ point)
    assert subspace_value(level, a) == multiply(product, inverse(scale))


@pytest.mark.parametrize("block", [0, 1, 5, 63, 1000])
def test_the_fft_adds_to_the_parity_what_the_matrix_adds(block: int, rng: random.Random) -> None:
    slots = [rng.getrandbits(32) for _ in range(BLOCK_PAGES)]
    expected = [0] * BLOCK_PAGES
    for place, value in enumerate(slots):
        for row in range(BLOCK_PAGES):
            factor = coefficient(BLOCK_PAGES * block + place, row, num_parity=BLOCK_PAGES)
            expected[row] ^= multiply_slowly(factor, value)
    factors = block_twiddles(block)
    for u, v, w in BUTTERFLIES:
        slots[v] ^= slots[u]
        slots[u] ^= multiply(factors[w], slots[v])
    factors = block_twiddles(-1)
    for u, v, w in reversed(BUTTERFLIES):
        slots[u] ^= multiply(factors[w], slots[v])
        slots[v] ^= slots[u]
    assert slots == expected


def test_blocks_know_which_pages_are_there() -> None:
    blocks = blocks_of([0, 15, 33])
    assert list(blocks) == [0, 2]
    assert blocks[0] == [0, *[None] * 14, 1]
    assert blocks[2] == [None, 2, *[None] * 14]
