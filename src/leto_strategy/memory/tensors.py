"""Tensors over regions of the pool, without a copy. With `dlpack` the only file of `memory` that imports torch.

Each tensor gets a storage of its own over exactly its bytes, so that `torch.save`, which writes whole storages, writes
no neighbours. They hold no reference to the pool: its mappings live until the process ends, or until `free`.
"""

from collections.abc import Sequence

import torch

from leto_strategy.memory.backend import Place, Region
from leto_strategy.memory.dlpack import bytes_at
from leto_strategy.memory.pool import ResilientMemoryPool


def tensor_from_pool(
    pool: ResilientMemoryPool,
    region: Region,
    *,
    dtype: torch.dtype,
    shape: Sequence[int],
    strides: Sequence[int] | None = None,
    offset_bytes: int = 0,
) -> torch.Tensor:
    """A tensor over bytes of `region`, where that lies; writing to it while the pool is read-only is a fault.

    Args:
        pool: a pool that has mapped the region.
        region: where.
        dtype: any but quantized ones.
        shape: may have zeros; no byte is covered then.
        strides: in elements, not negative; contiguous by default.
        offset_bytes: of the first element from the region's start; a multiple of the element's size.

    Raises:
        ValueError: the tensor would not lie inside the region, or not at a multiple of its element's size.
        PoolError: the region is not mapped.
    """
    shape = tuple(shape)
    strides = _contiguous_strides(shape) if strides is None else tuple(strides)
    if len(strides) != len(shape) or min((*shape, *strides), default=0) < 0:
        raise ValueError(f"region {region.spec.name}: shape {shape} with strides {strides}")
    size_bytes = _span(shape, strides) * dtype.itemsize
    if not 0 <= offset_bytes <= offset_bytes + size_bytes <= region.spec.size_bytes:
        raise ValueError(
            f"region {region.spec.name} of {region.spec.size_bytes} bytes is too small for {dtype} of shape {shape} "
            f"with strides {strides} at byte {offset_bytes}"
        )
    address = pool.address(region) + offset_bytes
    return _tensor_at(address, size_bytes, dtype, shape, strides, _device_of(pool, region))


def flat_tensor(pool: ResilientMemoryPool, first: Region, last: Region, dtype: torch.dtype) -> torch.Tensor:
    """One dimension over everything from the start of `first` to the end of `last`, the gaps of alignment included.

    Args:
        pool: a pool that has mapped both.
        first: a region.
        last: the same, or one behind it in the same arena and call.
        dtype: of the elements; the range is a multiple of its size.

    Raises:
        ValueError: they do not lie in this order in one segment, or the range is not a multiple of the element's size.
        PoolError: they are not mapped.
    """
    size_bytes = last.offset_bytes + last.spec.size_bytes - first.offset_bytes
    if first.segment != last.segment or last.offset_bytes < first.offset_bytes:
        raise ValueError(f"region {last.spec.name} does not lie behind {first.spec.name} in one segment")
    if size_bytes % dtype.itemsize:
        raise ValueError(f"{size_bytes} bytes from {first.spec.name} to {last.spec.name} are not a number of {dtype}")
    shape = (size_bytes // dtype.itemsize,)
    return _tensor_at(pool.address(first), size_bytes, dtype, shape, (1,), _device_of(pool, first))


def _device_of(pool: ResilientMemoryPool, region: Region) -> str:
    return pool.device if region.spec.kind.place is Place.DEVICE else "cpu"


def _tensor_at(
    address: int, size_bytes: int, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...], device: str
) -> torch.Tensor:
    empty = torch.empty(0, dtype=dtype, device=device)
    if not size_bytes:
        return empty.as_strided(shape, strides)
    if address % dtype.itemsize:
        raise ValueError(f"a tensor of {dtype} can't start at an address that is no multiple of {dtype.itemsize}")
    # The storage is made from bytes, since DLPack does not know every dtype.
    data = bytes_at(address, size_bytes, device)
    return empty.set_(data.untyped_storage(), 0, shape, strides)


def _span(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Elements from the first to the last, both included."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def _contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))
