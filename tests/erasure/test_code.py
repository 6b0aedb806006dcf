"""Every backend against the reference, byte for byte."""

import mmap
import random
from functools import cache
from itertools import combinations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.erasure.pages_of import POISON, random_pages, split_points
from torch import Tensor

from leto_strategy.erasure import reference
from leto_strategy.erasure.backend import Backend
from leto_strategy.erasure.code import ErasureCode
from leto_strategy.erasure.pages import PageTable
from leto_strategy.errors import TooManyErasures

PAGE_WORDS = 1024
NUM_PARITY = (*range(1, 21), 33, 64)

same_backend = settings(deadline=None, max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])


def code_of(num_data: int, num_parity: int, num_words: int = PAGE_WORDS) -> ErasureCode:
    return ErasureCode(num_data, num_parity, 4 * num_words)


@cache
def group(num_parity: int) -> tuple[Tensor, Tensor]:
    """A ragged group with the parity of the reference, the same for all backends. Don't write into it."""
    rng = random.Random(num_parity)
    data_DW = random_pages(rng.randint(1, 24), PAGE_WORDS, rng)
    return data_DW, reference.encode(data_DW, num_parity=num_parity)


def poisoned(num_pages: int, num_words: int = PAGE_WORDS) -> Tensor:
    return torch.full((num_pages, num_words), POISON, dtype=torch.int32)


@pytest.mark.parametrize("num_parity", NUM_PARITY)
def test_parity_is_that_of_the_reference(backend: Backend, num_parity: int) -> None:
    data_DW, expected_HW = group(num_parity)
    parity_HW = code_of(len(data_DW), num_parity).encode(data_DW, out=poisoned(num_parity), backend=backend)
    assert torch.equal(parity_HW, expected_HW)


@pytest.mark.parametrize("num_data", [1, 2, 15, 16, 17, 31, 32, 33, 48, 50])
def test_ragged_groups_have_the_parity_of_groups_filled_up_with_zeros(
    backend: Backend, num_data: int, rng: random.Random
) -> None:
    data_DW = random_pages(num_data, PAGE_WORDS, rng)
    filled_DW = torch.cat([data_DW, torch.zeros((64 - num_data, PAGE_WORDS), dtype=torch.int32)])
    whole = code_of(64, 16)
    parity_HW = whole.with_num_data(num_data).encode(data_DW, backend=backend)
    assert torch.equal(parity_HW, whole.encode(filled_DW, backend=backend))
    assert torch.equal(parity_HW, reference.encode(data_DW, num_parity=16))


@pytest.mark.parametrize("num_words", [1024, 3 * 1024, 5 * 1024, 33 * 1024, 65 * 1024])
@pytest.mark.parametrize("num_parity", [3, 16])
def test_odd_page_sizes(backend: Backend, num_words: int, num_parity: int, rng: random.Random) -> None:
    data_DW = random_pages(3, num_words, rng)
    code = code_of(3, num_parity, num_words)
    parity_HW = code.encode(data_DW, backend=backend, threads=2)
    assert torch.equal(parity_HW, reference.encode(data_DW, num_parity=num_parity))
    lost_DW = data_DW.clone()
    lost_DW[1] = POISON
    code.reconstruct(lost_DW, parity_HW, lost_data=[1], backend=backend, threads=2)
    assert torch.equal(lost_DW, data_DW)


@pytest.mark.parametrize("value", [0, -1, 1, -(2**31), 2**31 - 1])
def test_extreme_words(backend: Backend, value: int) -> None:
    data_DW = torch.full((20, PAGE_WORDS), value, dtype=torch.int32)
    for num_parity in (5, 16):
        parity_HW = code_of(20, num_parity).encode(data_DW, backend=backend)
        assert torch.equal(parity_HW, reference.encode(data_DW, num_parity=num_parity))


@pytest.mark.parametrize("num_parity", [1, 2, 7, 16, 20])
def test_an_update_makes_the_parity_of_the_new_data(backend: Backend, num_parity: int, rng: random.Random) -> None:
    num_data = 37
    code = code_of(num_data, num_parity)
    old_DW = random_pages(num_data, PAGE_WORDS, rng)
    parity_HW = code.encode(old_DW, backend=backend)
    for num_changed in (0, 1, 3, 20, num_data):
        indices = sorted(rng.sample(range(num_data), num_changed))
        new_DW = old_DW.clone()
        new_DW[indices] = random_pages(num_changed, PAGE_WORDS, rng)
        expected_HW = code.encode(new_DW, backend=backend)
        kept_HW = parity_HW.clone()
        out_HW = poisoned(num_parity)
        code.update(parity_HW, indices=indices, new=new_DW[indices], old=old_DW[indices], out=out_HW, backend=backend)
        assert torch.equal(out_HW, expected_HW)
        assert torch.equal(parity_HW, kept_HW), "the parity in force is untouched"
        change = new_DW[indices] ^ old_DW[indices]
        assert torch.equal(code.update(parity_HW, indices=indices, new=change, backend=backend), expected_HW)
        code.update(kept_HW, indices=indices, new=change, out=kept_HW, backend=backend)
        assert torch.equal(kept_HW, expected_HW)


@pytest.mark.parametrize("num_parity", range(1, 21))
def test_random_erasures_are_rebuilt(backend: Backend, num_parity: int, rng: random.Random) -> None:
    data_DW, parity_HW = group(num_parity)
    num_points = len(data_DW) + num_parity
    for num_lost in {1, rng.randint(1, num_parity), num_parity}:
        check_rebuilt(data_DW, parity_HW, rng.sample(range(num_points), num_lost), backend)


def check_rebuilt(data_DW: Tensor, parity_HW: Tensor, points: list[int], backend: Backend | None = None) -> None:
    lost_data, lost_parity = split_points(points, parity_HW.shape[0])
    damaged_DW, damaged_HW = data_DW.clone(), parity_HW.clone()
    damaged_DW[lost_data], damaged_HW[lost_parity] = POISON, POISON
    code = code_of(data_DW.shape[0], parity_HW.shape[0], data_DW.shape[1])
    code.reconstruct(damaged_DW, damaged_HW, lost_data=lost_data, lost_parity=lost_parity, backend=backend, threads=1)
    assert torch.equal(damaged_DW, data_DW)
    assert torch.equal(damaged_HW, parity_HW)


@pytest.mark.parametrize(("num_data", "num_parity"), [(5, 3), (1, 2), (2, 4)])
def test_every_pattern_of_erasures_of_a_small_group_is_rebuilt(
    num_data: int, num_parity: int, rng: random.Random
) -> None:
    data_DW = random_pages(num_data, PAGE_WORDS, rng)
    parity_HW = reference.encode(data_DW, num_parity=num_parity)
    for num_lost in range(num_parity + 1):
        for points in combinations(range(num_data + num_parity), num_lost):
            check_rebuilt(data_DW, parity_HW, list(points))


def test_every_single_erasure_is_rebuilt(backend: Backend, rng: random.Random) -> None:
    data_DW = random_pages(18, PAGE_WORDS, rng)
    parity_HW = code_of(18, 16).encode(data_DW, backend=backend)
    for point in range(18 + 16):
        check_rebuilt(data_DW, parity_HW, [point], backend)


def test_sixteen_neighbours_in_a_large_group_are_rebuilt(backend: Backend, rng: random.Random) -> None:
    data_DW = random_pages(200, PAGE_WORDS, rng)
    parity_HW = code_of(200, 16).encode(data_DW, backend=backend)
    check_rebuilt(data_DW, parity_HW, list(range(16 + 90, 16 + 106)), backend)
    check_rebuilt(data_DW, parity_HW, [*range(2, 6), *range(16 + 188, 16 + 200)], backend)


@pytest.mark.parametrize("num_parity", range(1, 21))
def test_one_erasure_too_many_is_refused_and_nothing_is_written(num_parity: int, rng: random.Random) -> None:
    num_data = rng.randint(1, 20)
    data_DW, parity_HW = poisoned(num_data), poisoned(num_parity)
    lost_data, lost_parity = split_points(rng.sample(range(num_data + num_parity), num_parity + 1), num_parity)
    with pytest.raises(TooManyErasures, match=f"{num_parity + 1} pages") as caught:
        code_of(num_data, num_parity).reconstruct(data_DW, parity_HW, lost_data=lost_data, lost_parity=lost_parity)
    assert (caught.value.num_lost, caught.value.num_parity) == (num_parity + 1, num_parity)
    assert torch.equal(data_DW, poisoned(num_data))
    assert torch.equal(parity_HW, poisoned(num_parity))


@pytest.mark.parametrize("num_parity", [1, 4, 16])
def test_a_corrupted_page_is_found(backend: Backend, num_parity: int, rng: random.Random) -> None:
    code = code_of(19, num_parity)
    data_DW = random_pages(19, PAGE_WORDS, rng)
    parity_HW = code.encode(data_DW, backend=backend)
    assert code.verify(data_DW, parity_HW, backend=backend) == ()
    for page in (0, 9, 18):
        place, bit = rng.randrange(PAGE_WORDS), rng.randrange(31)
        data_DW[page, place] ^= 1 << bit
        assert code.verify(data_DW, parity_HW, backend=backend) == tuple(range(num_parity))
        data_DW[page, place] ^= 1 << bit
    parity_HW[num_parity // 2, rng.randrange(PAGE_WORDS)] ^= 1
    assert code.verify(data_DW, parity_HW, backend=backend) == (num_parity // 2,)


@same_backend
@given(
    num_data=st.integers(1, 40),
    num_parity=st.one_of(st.just(16), st.integers(1, 20)),
    seed=st.integers(0, 2**32),
    data=st.data(),
)
def test_encode_update_lose_rebuild(
    backend: Backend, num_data: int, num_parity: int, seed: int, data: st.DataObject
) -> None:
    rng = random.Random(seed)
    code = code_of(num_data, num_parity)
    data_DW = random_pages(num_data, PAGE_WORDS, rng)
    parity_HW = code.encode(data_DW, backend=backend, threads=1)
    indices = sorted(data.draw(st.sets(st.integers(0, num_data - 1))))
    new_DW = data_DW.clone()
    new_DW[indices] = random_pages(len(indices), PAGE_WORDS, rng)
    rows = [new_DW[index] for index in indices]
    code.update(parity_HW, indices=indices, new=rows, old=data_DW[indices], out=parity_HW, backend=backend, threads=1)
    lost = data.draw(st.sets(st.integers(0, num_data + num_parity - 1), max_size=num_parity))
    check_rebuilt(new_DW, parity_HW, sorted(lost), backend)
    assert code.verify(new_DW, parity_HW, backend=backend, threads=1) == ()


def test_any_number_of_threads_makes_the_same_bytes(backend: Backend, rng: random.Random) -> None:
    data_DW = random_pages(20, 7 * PAGE_WORDS, rng)
    for num_parity in (6, 16):
        code = code_of(20, num_parity, 7 * PAGE_WORDS)
        expected_HW = code.encode(data_DW, backend=backend, threads=1)
        for threads in (2, 3, 16):
            assert torch.equal(code.encode(data_DW, backend=backend, threads=threads), expected_HW)


def test_pages_may_lie_anywhere(backend: Backend, rng: random.Random) -> None:
    """Rows of a larger tensor, pages of several segments, and memory that no tensor describes: the same bytes."""
    data_DW = random_pages(21, PAGE_WORDS, rng)
    code = code_of(21, 16)
    expected_HW = reference.encode(data_DW, num_parity=16)
    wide = poisoned(21, PAGE_WORDS + 512)
    wide[:, 256:-256] = data_DW
    assert torch.equal(code.encode(wide[:, 256:-256], backend=backend), expected_HW)
    segments = [data_DW[:4].clone(), data_DW[4:20].clone(), data_DW[20:].clone()]
    scattered = [page for segment in segments for page in segment]
    out_HW = [torch.full((PAGE_WORDS,), POISON, dtype=torch.int32) for _ in range(16)]
    code.encode(scattered, out=out_HW, backend=backend)
    assert torch.equal(torch.stack(out_HW), expected_HW)
    with mmap.mmap(-1, data_DW.numel() * 4 + 4096) as mapping:
        mapped = torch.frombuffer(mapping, dtype=torch.int32, count=data_DW.numel())
        mapped.copy_(data_DW.flatten())
        start = mapped.data_ptr()
        table = PageTable(tuple(start + index * code.page_bytes for index in range(21)), PAGE_WORDS, owner=mapped)
        assert torch.equal(code.encode(table, backend=backend), expected_HW)
        del mapped, table


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_parity": 0}, "num_parity"),
        ({"num_parity": 65}, "num_parity"),
        ({"num_data": 0}, "num_data"),
        ({"num_data": 2**32}, "num_data"),
        ({"page_bytes": 0}, "page_bytes"),
        ({"page_bytes": 4096 + 512}, "page_bytes"),
        ({"page_bytes": -4096}, "page_bytes"),
    ],
)
def test_a_code_that_can_not_be_is_refused(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ErasureCode(**arguments)


def test_the_defaults_are_those_of_the_design() -> None:
    assert ErasureCode() == ErasureCode(num_data=1024, num_parity=16, page_bytes=2 << 20)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (torch.zeros((4, PAGE_WORDS), dtype=torch.int64), "int32"),
        (torch.zeros((4, PAGE_WORDS), dtype=torch.float32), "int32"),
        (torch.zeros((3, PAGE_WORDS), dtype=torch.int32), "4 pages"),
        (torch.zeros((4, PAGE_WORDS + 1), dtype=torch.int32), "shape"),
        (torch.zeros(4 * PAGE_WORDS, dtype=torch.int32), "shape"),
        (torch.zeros((4, 2 * PAGE_WORDS), dtype=torch.int32)[:, ::2], "contiguous"),
        ([torch.zeros(2 * PAGE_WORDS, dtype=torch.int32)[::2]] * 4, "contiguous"),
        ([torch.zeros(PAGE_WORDS - 1, dtype=torch.int32)] * 4, "contiguous"),
        ([torch.zeros(PAGE_WORDS, dtype=torch.int32)] * 5, "4 pages"),
        ([], "4 pages"),
        (PageTable((4096, 8192, 12288, 16385), PAGE_WORDS), "multiples of 4"),
        (PageTable((4096, 8192, 12288, 16384), PAGE_WORDS - 1024), "words a page"),
        (torch.zeros((4, PAGE_WORDS), dtype=torch.int32, device="meta"), "host memory"),
    ],
)
def test_pages_that_do_not_fit_are_refused(data: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        code_of(4, 2).encode(data)  # type: ignore[arg-type]


def test_output_that_overlaps_input_is_refused(rng: random.Random) -> None:
    data_DW = random_pages(6, PAGE_WORDS, rng)
    code = code_of(4, 2)
    kept_DW = data_DW.clone()
    with pytest.raises(ValueError, match="overlaps"):
        code.encode(data_DW[:4], out=data_DW[3:5])
    flat = data_DW.flatten()
    with pytest.raises(ValueError, match="overlaps"):
        code.encode(data_DW[:4], out=[flat[7 : 7 + PAGE_WORDS], data_DW[5]])
    with pytest.raises(ValueError, match="overlaps"):
        code.encode(data_DW[:4], out=[data_DW[4], data_DW[4]])
    with pytest.raises(ValueError, match="overlaps"):
        code.update(data_DW[4:], indices=[0], new=data_DW[:1], out=[data_DW[5], data_DW[4]])
    with pytest.raises(ValueError, match="zeros can't be written"):
        code.encode(data_DW[:4], out=PageTable((0, data_DW[4].data_ptr()), PAGE_WORDS))
    assert torch.equal(data_DW, kept_DW)


@pytest.mark.parametrize("indices", [[4], [-1], [1, 1], [2, 1]])
def test_indices_that_do_not_fit_are_refused(indices: list[int]) -> None:
    code, parity_HW = code_of(4, 2), poisoned(2)
    with pytest.raises(ValueError, match="indices"):
        code.update(parity_HW, indices=indices, new=poisoned(len(indices)))
    if indices != [2, 1]:
        with pytest.raises(ValueError, match="lost_data"):
            code.reconstruct(poisoned(4), parity_HW, lost_data=indices)
        with pytest.raises(ValueError, match="lost_parity"):
            code.reconstruct(poisoned(4), parity_HW, lost_parity=indices)
    assert bool((parity_HW == POISON).all())
