"""Updates cut off anywhere: restored by what flags are left, done again under a new number, the bits are those of an
update that nothing disturbed (rules T7, T8)."""

import pytest
import torch
from benchmarks.kernel_data import Place
from benchmarks.torn_checks import Phase, check_flags_matter, check_torn
from benchmarks.update_checks import STEPS, Chunk

from leto_strategy.triton_kernels.chunk_update import restore
from leto_strategy.triton_kernels.launch_shapes import Way
from leto_strategy.triton_kernels.tile_flags import NUMBER_MAX, TileFlags, TileNumbers


@pytest.mark.parametrize("lost", ["", "flags", "other_flags"])
@pytest.mark.parametrize("rotate", [True, False])
def test_page_by_page(place: Place, rotate: bool, lost: str) -> None:
    check_torn(place, num=4, way=Way.PAGES, rotate=rotate, lost=lost, height=2)


@pytest.mark.parametrize(("rotate", "lost"), [(True, "flags"), (False, "other_flags")])
def test_in_one_pass(place: Place, rotate: bool, lost: str) -> None:
    place = Place(place.device, 2048 if rotate else 1024)
    check_torn(place, num=16, way=Way.FUSED, rotate=rotate, lost=lost)


@pytest.mark.parametrize("phase", Phase)
def test_every_tile_in_one_phase(place: Place, phase: Phase) -> None:
    check_torn(place, num=2, way=Way.PAGES, rotate=False, height=1, phases=[phase] * 2)


def test_a_tile_without_its_flags_is_not_restored(place: Place) -> None:
    check_flags_matter(place, num=2, way=Way.PAGES, rotate=True)


def test_a_number_of_another_update_restores_nothing(place: Place) -> None:
    chunk = Chunk(place, 2, height=1)
    chunk.update(STEPS[0], 1.0, 41, Way.PAGES)
    after = chunk.now.clone()
    restore(chunk.pages, chunk.flags, 42, Way.PAGES)
    assert torch.equal(chunk.now, after)
    with pytest.raises(ValueError, match="number must be positive"):
        restore(chunk.pages, chunk.flags, 0, Way.PAGES)


def test_numbers_are_never_zero_and_never_given_out_twice() -> None:
    counter = torch.zeros(2, dtype=torch.int64)
    numbers = TileNumbers(counter)
    assert [numbers.next() for _ in range(3)] == [1, 2, 3]
    counter[1] = 2  # a crash came between the two stores
    assert TileNumbers(counter).next() == 4
    counter[0] = 0  # the page of one copy was lost
    assert TileNumbers(counter).next() == 5
    counter[0] = NUMBER_MAX
    with pytest.raises(OverflowError):
        TileNumbers(counter).next()


def test_flags_and_counters_are_checked() -> None:
    good = torch.zeros(4, dtype=torch.int64)
    with pytest.raises(ValueError, match="other_flags must be contiguous int64"):
        TileFlags(good, good.to(torch.int32))
    with pytest.raises(ValueError, match="one size"):
        TileFlags(good, good[:2])
    with pytest.raises(ValueError, match="flags must be 5 or more"):
        TileFlags(good, good.clone()).check(5, 1, good.device)
    with pytest.raises(ValueError, match="counter must be int64"):
        TileNumbers(good)
