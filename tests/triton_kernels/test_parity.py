"""Parity kernels with integer products against the plain reference, word for word."""

import pytest
import torch
from benchmarks.kernel_data import Place, table
from benchmarks.parity_checks import (
    check_encode,
    check_encode_matrix,
    check_reconstruct,
    check_update,
    check_xor,
)

from leto_strategy.erasure.generator import generator
from leto_strategy.triton_kernels.factors import block_factors, field_product
from leto_strategy.triton_kernels.pages import PARTIAL, SCATTERED, WHOLE, PageTable
from leto_strategy.triton_kernels.parity import apply_matrix, encode, update
from leto_strategy.triton_kernels.references import apply_matrix_torch


@pytest.mark.parametrize(("num_pages", "first_page", "scattered"), [(32, 0, False), (19, 16, False), (3, 0, True)])
def test_sixteen_parity_pages(place: Place, num_pages: int, first_page: int, scattered: bool) -> None:
    check_encode(place, num_pages=num_pages, first_page=first_page, scattered=scattered)


def test_missing_pages_count_as_zeros(place: Place) -> None:
    check_encode(place, num_pages=18, missing=[[0, 15, 17]])


@pytest.mark.parametrize("height", [1, 2, 3, 7, 16, 17, 20])
def test_any_number_of_parity_pages(place: Place, height: int) -> None:
    check_encode_matrix(place, num_pages=3, heights=[height])


def test_the_reference_adds_up_products(place: Place) -> None:
    words = place.random_words(5)[:, :8]
    data = words.numpy().astype("uint32").astype("int64")
    rows = generator(5, 3)
    got = apply_matrix_torch(words, rows)
    for column in range(8):
        for parity in range(3):
            expected = 0
            for page in range(5):
                expected ^= field_product(int(data[page, column]), int(rows[page, parity]))
            assert int(got[parity, column]) & 0xFFFFFFFF == expected


@pytest.mark.parametrize(("num_pages", "height", "first", "count"), [(40, 16, 16, 19), (16, 5, 3, 11), (9, 20, 8, 1)])
def test_the_parity_follows_a_chunk(place: Place, num_pages: int, height: int, first: int, count: int) -> None:
    check_update(place, num_pages=num_pages, height=height, first=first, count=count)


@pytest.mark.parametrize(
    ("num_data", "lost", "lost_parity"), [(20, [3, 17], [0]), (16, [2, 3, 8, 15], [1, 15]), (5, [], [7])]
)
def test_lost_pages_come_back(place: Place, num_data: int, lost: list[int], lost_parity: list[int]) -> None:
    check_reconstruct(place, num_data=num_data, lost=lost, lost_parity=lost_parity)


def test_second_tier(place: Place) -> None:
    check_xor(place, num_pages=5)


def test_factors_are_those_of_the_subspace_polynomials() -> None:
    for block in (0, 1, 5, 63):
        point, factors = 16 * (block + 1), block_factors(block)
        for level, factor in enumerate(factors):
            value, scale = 1, 1
            for root in range(1 << level):
                value, scale = field_product(value, point ^ root), field_product(scale, (1 << level) ^ root)
            assert field_product(factor, scale) == value


# tables and arguments


def test_layouts_are_recognised(place: Place) -> None:
    pages = place.poisoned(33)
    whole = table(pages[:32])
    assert whole.layout == WHOLE
    assert table(pages).layout == PARTIAL
    assert whole.without([3]).layout == PARTIAL
    assert PageTable.of_tensors([pages[0], pages[2], pages[1]]).layout == SCATTERED
    assert len(whole.extents) == 1


def test_overlaps_are_seen(place: Place) -> None:
    pages = place.poisoned(6)
    scattered = PageTable.of_tensors([pages[4], pages[0], pages[2]])
    assert scattered.overlaps(table(pages[2:3]))
    assert not scattered.overlaps(PageTable.of_tensors([pages[1], pages[3], pages[5]]))
    assert not table(pages[:3]).overlaps(table(pages[3:]))


def test_arguments_are_checked(place: Place) -> None:
    data, out = place.random_words(17), place.poisoned(16)
    pages, parity = table(data), table(out)
    with pytest.raises(ValueError, match="matrix_PH is needed for 3"):
        encode(pages, table(out[:3]))
    with pytest.raises(ValueError, match="multiples of 16"):
        encode(pages, parity, first_page=8)
    with pytest.raises(ValueError, match="one for each of 2 blocks"):
        encode(pages, parity, first_page=[0])
    with pytest.raises(ValueError, match="out must not overlap pages"):
        encode(pages, table(data[:16]))
    with pytest.raises(ValueError, match="out must not overlap parity"):
        update(pages, table(data.clone()), parity, parity)
    with pytest.raises(ValueError, match="must miss the same pages"):
        update(pages.without([1]), table(data.clone()), parity, table(out.clone()))
    with pytest.raises(ValueError, match="matrix_PH must be 17 x 16"):
        apply_matrix(pages, place.matrix(16, 16), parity)
    with pytest.raises(ValueError, match="contiguous int64"):
        apply_matrix(pages, place.matrix(17, 16).to(torch.int32), parity)
    with pytest.raises(ValueError, match="must have pages of 4096 bytes"):
        encode(pages, PageTable.of_tensor(torch.zeros(16, 2048, dtype=torch.int32), page_bytes=8192))
    with pytest.raises(ValueError, match="addresses must be multiples of 16"):
        PageTable.of_addresses([8], page_bytes=4096, device="cpu")
