import random

import pytest
import torch
from tests.erasure.pages_of import POISON, random_pages

from leto_strategy.erasure import reference
from leto_strategy.erasure.code import ErasureCode
from leto_strategy.erasure.second_tier import TwoTierCode
from leto_strategy.errors import TooManyErasures

PAGE_WORDS = 1024


def tiers(num_second: int, num_parity: int = 16) -> TwoTierCode:
    return TwoTierCode(ErasureCode(20, num_parity, 4 * PAGE_WORDS), num_second)


def test_one_page_of_the_second_tier_is_the_xor_of_the_first(rng: random.Random) -> None:
    first_HW = random_pages(16, PAGE_WORDS, rng)
    expected = first_HW[0].clone()
    for page in first_HW[1:]:
        expected ^= page
    second_HW = tiers(1).second.encode(first_HW)
    assert torch.equal(second_HW[0], expected)


@pytest.mark.parametrize("num_second", [1, 2, 3, 16])
def test_the_second_tier_rebuilds_the_first_without_the_data(num_second: int, rng: random.Random) -> None:
    two = tiers(num_second)
    first_HW = random_pages(16, PAGE_WORDS, rng)
    second_HW = two.second.encode(first_HW)
    assert torch.equal(second_HW, reference.encode(first_HW, num_parity=num_second))
    lost = rng.sample(range(16), num_second)
    plan = two.plan(lost_first=lost, lost_second=[])
    assert plan == (tuple(sorted(lost)), (), ())
    damaged_HW = first_HW.clone()
    damaged_HW[lost] = POISON
    two.second.reconstruct(damaged_HW, second_HW, lost_data=plan.first_from_second, lost_parity=plan.second)
    assert torch.equal(damaged_HW, first_HW)


def test_both_tiers_rebuild_what_either_could_not(rng: random.Random) -> None:
    """16 data pages and 1 page of each tier's 17: the second tier first, then the first."""
    two = TwoTierCode(ErasureCode(20, 4, 4 * PAGE_WORDS), num_second=1)
    data_DW = random_pages(20, PAGE_WORDS, rng)
    first_HW = reference.encode(data_DW, num_parity=4)
    second_HW = reference.encode(first_HW, num_parity=1)
    damaged_DW, damaged_HW = data_DW.clone(), first_HW.clone()
    lost_data = [0, 5, 6, 19]
    damaged_DW[lost_data], damaged_HW[2] = POISON, POISON
    plan = two.plan(lost_first=[2], lost_second=[])
    with pytest.raises(TooManyErasures):
        two.first.reconstruct(damaged_DW, damaged_HW, lost_data=lost_data, lost_parity=[2])
    two.second.reconstruct(damaged_HW, second_HW, lost_data=plan.first_from_second)
    two.first.reconstruct(damaged_DW, damaged_HW, lost_data=lost_data, lost_parity=plan.first_from_data)
    assert torch.equal(damaged_DW, data_DW)
    assert torch.equal(damaged_HW, first_HW)


@pytest.mark.parametrize(
    ("lost_first", "lost_second", "plan"),
    [
        ([], [], ((), (), ())),
        ([3], [], ((3,), (), ())),
        ([], [0], ((), (), (0,))),
        ([3], [0], ((3,), (), (0,))),
        ([5, 3], [], ((3, 5), (), ())),
        ([5, 3], [1], ((), (3, 5), (1,))),
        ([1, 2, 3], [], ((), (1, 2, 3), ())),
    ],
)
def test_what_the_second_tier_can_not_rebuild_counts_in_the_first(
    lost_first: list[int], lost_second: list[int], plan: tuple[tuple[int, ...], ...]
) -> None:
    assert tiers(2).plan(lost_first=lost_first, lost_second=lost_second) == plan


def test_a_second_tier_without_pages_is_refused() -> None:
    with pytest.raises(ValueError, match="num_second"):
        tiers(0)
    with pytest.raises(ValueError, match="num_parity"):
        tiers(65)
