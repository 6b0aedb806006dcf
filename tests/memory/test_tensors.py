"""Tensors over regions: every dtype, any strides, storages of their own."""

import io
import warnings

import pytest
import torch

from leto_strategy.memory.backend import Kind, Region, RegionSpec
from leto_strategy.memory.pool import ResilientMemoryPool
from leto_strategy.memory.tensors import flat_tensor, tensor_from_pool
from memory.stand_in import Rank


def usable(dtype: torch.dtype) -> bool:
    try:
        with warnings.catch_warnings(action="ignore"):
            torch.zeros(3, dtype=dtype).view(torch.uint8)
    except (RuntimeError, NotImplementedError, TypeError):
        return False
    return not (dtype.is_floating_point and dtype.itemsize < 1)


DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype) and usable(value)}, key=str)


@pytest.fixture
def arena(rank: Rank) -> tuple[ResilientMemoryPool, list[Region]]:
    pool = rank.pool()
    return pool, pool.allocate([RegionSpec(f"w{i}", 4096, Kind.PROTECTED, arena="a") for i in range(3)])


def test_all_dtypes_see_the_regions_bytes(arena: tuple[ResilientMemoryPool, list[Region]]) -> None:
    pool, (region, *_) = arena
    assert {torch.float32, torch.bfloat16, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.uint16} <= set(
        DTYPES
    )
    for dtype in DTYPES:
        tensor = tensor_from_pool(pool, region, dtype=dtype, shape=(2, 3), offset_bytes=64)
        assert tensor.dtype == dtype
        assert tensor.shape == (2, 3)
        assert tensor.is_contiguous()
        assert tensor.untyped_storage().nbytes() == 6 * dtype.itemsize
        assert tensor.data_ptr() == pool.address(region) + 64
        value = torch.randint(0, 2, (6 * dtype.itemsize,), dtype=torch.uint8)
        tensor.view(torch.uint8).view(-1).copy_(value)
        assert bytes(pool.buffer(region)[64 : 64 + 6 * dtype.itemsize]) == bytes(value.tolist())


def test_empty_scalar_and_strided_tensors(arena: tuple[ResilientMemoryPool, list[Region]]) -> None:
    pool, (region, *_) = arena
    for shape in ((0,), (3, 0, 2), (0, 0)):
        empty = tensor_from_pool(pool, region, dtype=torch.float32, shape=shape, offset_bytes=4096)
        assert empty.shape == shape
        assert empty.numel() == 0
        assert empty.stride() == torch.empty(shape).stride()
    scalar = tensor_from_pool(pool, region, dtype=torch.float64, shape=())
    scalar.fill_(3.5)
    assert scalar.shape == ()
    assert scalar.untyped_storage().nbytes() == 8
    like = torch.arange(24.0).view(2, 3, 4).permute(2, 0, 1)
    strided = tensor_from_pool(pool, region, dtype=torch.float32, shape=like.shape, strides=like.stride())
    strided.copy_(like)
    assert strided.stride() == like.stride()
    assert torch.equal(strided, like)
    assert bytes(pool.buffer(region)[:96]) == bytes(like.untyped_storage().tolist())
    channels = torch.empty(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    last = tensor_from_pool(pool, region, dtype=torch.float32, shape=channels.shape, strides=channels.stride())
    assert last.is_contiguous(memory_format=torch.channels_last)


def test_a_saved_tensor_holds_its_own_bytes_only(arena: tuple[ResilientMemoryPool, list[Region]]) -> None:
    pool, (region, *_) = arena
    tensor = tensor_from_pool(pool, region, dtype=torch.float32, shape=(4,)).fill_(1.5)
    file, plain = io.BytesIO(), io.BytesIO()
    torch.save(tensor, file)
    torch.save(torch.full((4,), 1.5), plain)
    assert len(file.getvalue()) == len(plain.getvalue())
    parameter = torch.nn.Parameter(tensor)
    parameter.grad = tensor_from_pool(pool, region, dtype=torch.float32, shape=(4,), offset_bytes=512)
    (parameter * 2).sum().backward()
    assert bytes(pool.buffer(region)[512:528]) == bytes(torch.full((4,), 2.0).untyped_storage().tolist())


@pytest.mark.parametrize(
    "wrong",
    [
        {"shape": (1025,)},
        {"shape": (1024,), "offset_bytes": 4},
        {"shape": (2,), "strides": (1024,)},
        {"shape": (2,), "strides": (-1,)},
        {"shape": (2,), "strides": (1, 1)},
        {"shape": (-1,)},
        {"shape": (1,), "offset_bytes": -4},
        {"shape": (1,), "offset_bytes": 2},
        {"shape": (0,), "offset_bytes": 5000},
    ],
)
def test_a_tensor_outside_its_region_is_an_error(
    arena: tuple[ResilientMemoryPool, list[Region]], wrong: dict[str, object]
) -> None:
    pool, (region, *_) = arena
    with pytest.raises(ValueError, match=r"region|multiple"):
        tensor_from_pool(pool, region, dtype=torch.float32, **wrong)  # type: ignore[arg-type]


def test_neighbours_make_one_flat_tensor(rank: Rank) -> None:
    pool = rank.pool()
    sizes = [400, 512, 100]
    regions = pool.allocate([RegionSpec(f"g{i}", size, Kind.RETAINED, arena="g") for i, size in enumerate(sizes)])
    (other,) = pool.allocate([RegionSpec("other", 400, Kind.RETAINED)])
    flat = flat_tensor(pool, regions[0], regions[2], torch.float32)
    assert flat.shape == ((1024 + 100) // 4,)
    flat.fill_(2.0)
    assert flat_tensor(pool, regions[1], regions[1], torch.float32).tolist() == [2.0] * 128
    with pytest.raises(ValueError, match="behind"):
        flat_tensor(pool, regions[1], regions[0], torch.float32)
    with pytest.raises(ValueError, match="behind"):
        flat_tensor(pool, regions[1], other, torch.float32)
    with pytest.raises(ValueError, match="not a number"):
        flat_tensor(pool, regions[2], regions[2], torch.float64)


def test_tensors_outlive_the_pool(arena: tuple[ResilientMemoryPool, list[Region]]) -> None:
    pool, (region, *_) = arena
    tensor = tensor_from_pool(pool, region, dtype=torch.float32, shape=(4,)).fill_(1.0)
    pool.close()
    assert tensor.sum() == 4.0
