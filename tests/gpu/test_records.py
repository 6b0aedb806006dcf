"""Records whose tensors the stream stores: absent until all of it is there, in two copies, and the same bits again."""

from typing import Any

import pytest
import torch

from leto_strategy.errors import RecordError
from leto_strategy.recovery.records import RecordKind, RecordRing, complete_steps
from leto_strategy.strategy.capture.packing import pack_record, unpack_record
from memory.stand_in import Rank
from tests.gpu.rig import DEVICE, MARKS, occupy

pytestmark = MARKS

BUSY_MS = 300.0
DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int8, torch.int16,
    torch.int32, torch.int64, torch.uint8, torch.uint16, torch.bool, torch.complex64,
)  # fmt: skip


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).tolist()) if tensor.numel() else b""


def made(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Random bits of a type, on the device."""
    size = dtype.itemsize * torch.Size(shape).numel()
    high = 2 if dtype is torch.bool else 256
    return torch.randint(0, high, (size,), dtype=torch.uint8, device=DEVICE).view(dtype).reshape(shape)


def require_same(have: Any, want: torch.Tensor) -> None:
    assert (have.dtype, have.shape, have.device, have.requires_grad) == (
        want.dtype, want.shape, want.device, want.requires_grad,
    )  # fmt: skip
    assert bits(have) == bits(want)


def write(ring: RecordRing, rank_pool: Any, kind: RecordKind, step: int, value: dict[str, Any]) -> None:
    data, streamed = pack_record(value, DEVICE, rank_pool.driver)
    ring.write(kind, step, data, streamed)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_of_every_type_and_shape_come_back_bit_for_bit(rank: Rank, dtype: torch.dtype) -> None:
    pool = rank.pool()
    ring = RecordRing(pool)
    matrix = made(dtype, 6, 4)
    value: dict[str, Any] = {
        "scalar": made(dtype),
        "empty": torch.empty(0, 3, dtype=dtype, device=DEVICE),
        "matrix": matrix,
        "transposed": matrix.t(),
        "every second": matrix[::2, 1:3],
        "one of many": matrix[3],
        "spread": made(dtype, 1, 4).expand(5, 4),
        "nested": [{"deep": made(dtype, 3)}, 1.5, "text"],
        "on the host": torch.arange(3),
    }
    if dtype.is_floating_point and dtype.itemsize > 1:
        value["leaf"] = made(dtype, 5).nan_to_num_().requires_grad_()
        value["not a leaf"] = value["leaf"] * 2
    write(ring, pool, RecordKind.MID, 5, value)
    torch.cuda.synchronize()
    found = unpack_record(ring.read(RecordKind.MID, 5), DEVICE)
    assert found.keys() == value.keys()
    assert found["nested"][1:] == [1.5, "text"]
    for name in value.keys() - {"nested", "not a leaf"}:
        require_same(found[name], value[name])
    require_same(found["nested"][0]["deep"], value["nested"][0]["deep"])
    if "leaf" in value:
        require_same(found["not a leaf"], value["not a leaf"].detach())


def test_a_record_is_absent_until_the_stream_has_stored_it_and_nobody_waits(rank: Rank) -> None:
    pool = rank.pool()
    ring = RecordRing(pool)
    for step in range(6):  # slots are used again
        loss = torch.full((), float(step), device=DEVICE)
        write(ring, pool, RecordKind.START, step, {"loss": loss})
        torch.cuda.synchronize()
    occupy(BUSY_MS)
    later = torch.full((3,), 8.0, device=DEVICE)
    write(ring, pool, RecordKind.START, 6, {"loss": later, "other": 1})
    written = torch.cuda.Event()
    written.record()
    later.fill_(9.0)  # what is written to it afterwards is no part of the record
    still_absent = not ring.holds(RecordKind.START, 6)
    known = complete_steps(rank.mirror.buffer)[RecordKind.START]
    assert not written.query(), "the GPU was too fast for this test"
    assert still_absent
    assert known == {3, 4, 5}
    with pytest.raises(RecordError, match="not complete"):
        ring.read(RecordKind.START, 6)
    torch.cuda.synchronize()
    assert complete_steps(rank.mirror.buffer)[RecordKind.START] == {3, 4, 5, 6}
    found = unpack_record(ring.read(RecordKind.START, 6), DEVICE)
    require_same(found["loss"], torch.full((3,), 8.0, device=DEVICE))
    assert found["other"] == 1


def test_the_streams_part_is_kept_twice_and_a_damaged_copy_makes_it_absent(rank: Rank) -> None:
    pool = rank.pool()
    ring = RecordRing(pool)
    value = torch.arange(1000, dtype=torch.float64, device=DEVICE)
    write(ring, pool, RecordKind.MID, 2, {"value": value})
    torch.cuda.synchronize()
    (name,) = [name for name, _ in pool.regions if ".stream." in name]
    part = pool.buffer(pool.attach(name))
    room, wanted = len(part) // 2, bits(value)
    assert bytes(part[: len(wanted)]) == bytes(part[room : room + len(wanted)]) == wanted
    assert room >= 4096, "the copies lie on different pages"
    for at in (17, room + 17):
        part[at] ^= 1
        assert not ring.holds(RecordKind.MID, 2)
        part[at] ^= 1
    assert ring.holds(RecordKind.MID, 2)


def test_another_trainer_unpacks_the_same_bits(rank: Rank) -> None:
    pool = rank.pool()
    write(RecordRing(pool), pool, RecordKind.MID, 1, {"value": made(torch.bfloat16, 100)})
    torch.cuda.synchronize()
    other = rank.pool(writable=False)
    first, second = (unpack_record(RecordRing(p).read(RecordKind.MID, 1), DEVICE)["value"] for p in (pool, other))
    require_same(second, first)
