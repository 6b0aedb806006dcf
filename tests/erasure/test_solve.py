import random
from itertools import combinations

import pytest
from tests.erasure.pages_of import split_points

from leto_strategy.erasure import reference
from leto_strategy.erasure.field import multiply
from leto_strategy.erasure.solve import Solution, solve
from leto_strategy.errors import TooManyErasures


def rebuilt(solution: Solution, data: list[int], parity: list[int]) -> list[int]:
    """Lost words from syndromes, as the solution says."""
    blanked = [[0 if index in solution.lost_data else word] for index, word in enumerate(data)]
    sums = [row[0] for row in reference.encode_ints(blanked, num_parity=len(parity))]
    syndromes = [sums[row] ^ (0 if row in solution.lost_parity else word) for row, word in enumerate(parity)]
    result = []
    for row in solution.matrix:
        word = 0
        for factor, used in zip(row, solution.syndrome_rows, strict=True):
            word ^= multiply(factor, syndromes[used])
        result.append(word)
    return result


@pytest.mark.parametrize(("num_data", "num_parity"), [(5, 3), (2, 5), (6, 2), (4, 4), (3, 1)])
def test_every_pattern_is_solved_and_elimination_agrees(num_data: int, num_parity: int, rng: random.Random) -> None:
    data = [rng.getrandbits(32) for _ in range(num_data)]
    parity = [row[0] for row in reference.encode_ints([[word] for word in data], num_parity=num_parity)]
    code_word = parity + data
    for num_lost in range(num_parity + 1):
        for points in combinations(range(num_data + num_parity), num_lost):
            lost_data, lost_parity = split_points(list(points), num_parity)
            solution = solve(lost_data, lost_parity, num_data=num_data, num_parity=num_parity)
            assert len(solution.syndrome_rows) == num_lost
            expected = [data[index] for index in lost_data] + [parity[index] for index in lost_parity]
            assert rebuilt(solution, data, parity) == expected
            survivors = {point: [word] for point, word in enumerate(code_word) if point not in points}
            found = reference.reconstruct(survivors, num_data=num_data, num_parity=num_parity)
            assert found == ([[word] for word in data], [[word] for word in parity])


def test_too_few_survivors_are_refused_by_the_reference() -> None:
    with pytest.raises(TooManyErasures):
        reference.reconstruct({0: [1], 2: [1]}, num_data=3, num_parity=2)


def test_lost_pages_come_in_any_order() -> None:
    assert solve([9, 3], [4, 1], num_data=10, num_parity=5) == solve([3, 9], [1, 4], num_data=10, num_parity=5)


def test_only_as_many_syndromes_are_used_as_pages_are_lost() -> None:
    solution = solve([7], [0, 15], num_data=1024, num_parity=16)
    assert solution.syndrome_rows == (0, 1, 15)
    assert [len(row) for row in solution.matrix] == [3, 3, 3]
