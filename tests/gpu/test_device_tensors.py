"""Tensors over device memory: of any type, with storages of exactly their bytes, and like torch's own in a kernel."""

import io

import torch
from torch.optim.adamw import adamw

from leto_strategy.memory.backend import Kind, RegionSpec
from leto_strategy.memory.tensors import flat_tensor, tensor_from_pool
from memory.stand_in import Rank
from tests.gpu.rig import DEVICE, MARKS

pytestmark = MARKS

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool, torch.complex64)


def test_tensors_of_every_type_lie_on_the_device_over_the_regions_bytes(rank: Rank) -> None:
    pool = rank.pool()
    (region,) = pool.allocate([RegionSpec("w", 1 << 20, Kind.PROTECTED)])
    whole = tensor_from_pool(pool, region, dtype=torch.uint8, shape=(1 << 20,))
    for dtype in DTYPES:
        tensor = tensor_from_pool(pool, region, dtype=dtype, shape=(33, 7), offset_bytes=512)
        size_bytes = 33 * 7 * dtype.itemsize
        assert (tensor.device, tensor.dtype, tuple(tensor.shape)) == (DEVICE, dtype, (33, 7))
        assert tensor.untyped_storage().nbytes() == size_bytes
        assert tensor.data_ptr() == pool.address(region) + 512
        value = torch.randint(0, 2, (33, 7), device=DEVICE).to(dtype)
        tensor.copy_(value)
        assert torch.equal(whole[512 : 512 + size_bytes].view(dtype).view(33, 7), value)
        file = io.BytesIO()
        torch.save(tensor, file)
        assert file.tell() < size_bytes + 4096, "no neighbours are saved"


def test_scalars_strides_empty_ones_and_whole_arenas(rank: Rank) -> None:
    pool = rank.pool()
    regions = pool.allocate([RegionSpec(f"p{i}", 4000, Kind.PROTECTED, arena="a") for i in range(3)])
    scalar = tensor_from_pool(pool, regions[0], dtype=torch.bfloat16, shape=())
    scalar.fill_(1.5)
    assert scalar.item() == 1.5
    across = tensor_from_pool(pool, regions[1], dtype=torch.float32, shape=(8, 16), strides=(1, 8))
    value = torch.randn(8, 16, device=DEVICE)
    across.copy_(value)
    assert torch.equal(across, value)
    assert not across.is_contiguous()
    empty = tensor_from_pool(pool, regions[2], dtype=torch.float32, shape=(0, 4))
    assert (empty.device, empty.numel()) == (DEVICE, 0)
    flat = flat_tensor(pool, regions[0], regions[2], torch.float32)
    flat.zero_()
    assert (scalar.item(), float(across.abs().sum())) == (0.0, 0.0)


def test_kernels_compute_the_same_bits_there_as_in_torchs_memory(rank: Rank) -> None:
    pool = rank.pool()
    length = 1 << 18
    regions = pool.allocate([RegionSpec(name, 4 * length, Kind.PROTECTED, arena="s") for name in "pmvg"])
    torch.manual_seed(3)
    own = [torch.randn(length, device=DEVICE) for _ in regions]
    kept = [tensor_from_pool(pool, region, dtype=torch.float32, shape=(length,)) for region in regions]
    for tensor, value in zip(kept, own, strict=True):
        tensor.copy_(value)
    for parameter, moment, variance, gradient in (own, kept):
        adamw(
            [parameter], [gradient], [moment], [variance.abs_()], [], [torch.tensor(3.0)],
            foreach=True, amsgrad=False, beta1=0.9, beta2=0.95, lr=1e-3, weight_decay=0.1, eps=1e-8, maximize=False,
        )  # fmt: skip
    for tensor, value in zip(kept, own, strict=True):
        assert torch.equal(tensor.view(torch.int32), value.view(torch.int32))
