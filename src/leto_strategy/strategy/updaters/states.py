"""Whole states in retained memory: a tree of Python values whose tensors lie in one region, written step by step.

For updates that can't be resumed chunk by chunk: parameters and optimizer state live in the trainer's own memory, and
what the next step starts from is copied here. Two slots alternate. The record that describes a state is written after
its last byte, so a state is complete or absent. Paper, section 3, "sync snapshot".
"""

import io
import pickle
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from leto_strategy.geometry import align_up
from leto_strategy.memory.backend import Kind, Region, RegionSpec
from leto_strategy.memory.pool import ResilientMemoryPool
from leto_strategy.memory.tensors import tensor_from_pool
from leto_strategy.recovery.records import RecordKind, RecordRing
from leto_strategy.strategy.capture.packing import pack, reduce_tensor, unpack

_NUM_STATES = 2  # that of the step which may have to be redone, and that of the next
_CAPACITY_BYTES_MIN = 1 << 16

_Place = tuple[int, torch.dtype, tuple[int, ...], tuple[int, ...], bool]
"""Offset in bytes, dtype, shape, strides, requires_grad."""


class StateSnapshots:
    """Writes and reads whole states.

    Args:
        pool: The rank's retained memory.
        records: Its records; hold one STATE record for each state.
        names: Tensors that stay the same objects, by name: where a tree holds one, whoever reads it gets their own.
        reach: Called at the crash point "snapshot_middle", when half of a state's tensors are copied.
    """

    def __init__(
        self,
        pool: ResilientMemoryPool,
        records: RecordRing,
        reach: Callable[[str, int], None],
        names: Mapping[str, Tensor],
    ) -> None:
        self._pool, self._records, self._reach = pool, records, reach
        self._named = names
        self._name_of = {id(tensor): name for name, tensor in names.items()}
        self._regions: dict[str, Region] = {}
        self._last: tuple[int, bytes, list[Tensor]] | None = None

    def write(self, step: int, tree: Any) -> None:
        """Keep the state from which step `step` starts, in place of that of step - 2.

        Args:
            step: Transaction number.
            tree: Anything that can be pickled; tensors in it are copied as bytes.

        Raises:
            PoolError: There is no memory left.
            pickle.PicklingError: A value can't be pickled (other pickling errors too).
        """
        self._last = None
        text, tensors = self._take_apart(tree)
        places, size_bytes = _lay_out(tensors)
        capacity = max(_CAPACITY_BYTES_MIN, 1 << max(0, size_bytes - 1).bit_length())
        region = self._region(step, capacity)
        kept = [_view(self._pool, region, place) for place in places]
        with torch.no_grad():
            for index, (view, tensor) in enumerate(zip(kept, tensors, strict=True)):
                if index == len(kept) // 2:
                    self._reach("snapshot_middle", step - 1)
                view.copy_(tensor)
        if self._pool.on_device:  # the record is the host's word that the last byte is there
            torch.cuda.current_stream(self._pool.device).synchronize()
        self._records.write(RecordKind.STATE, step, pickle.dumps((region.spec.name, places, text)))
        self._last = (step, text, kept)

    def read(self, step: int) -> Any:
        """The state from which step `step` starts, its tensors in memory of their own.

        Raises:
            RecordError: It is not there.
        """
        name, places, text = pickle.loads(self._records.read(RecordKind.STATE, step).payload)
        region = self._attach(name)
        kept = [_view(self._pool, region, place) for place in places]
        self._last = (step, text, kept)
        tensors = []
        for view, place in zip(kept, places, strict=True):
            tensors.append(view.clone().requires_grad_(place[-1]))
        return _Unpickler(io.BytesIO(text), tensors, self._named).load()

    def pack(self, tree: Any) -> bytes:
        """A state as bytes, for a record that holds it itself; see `unpack`."""
        text, tensors = self._take_apart(tree)
        return pickle.dumps((text, [pack(tensor) for tensor in tensors]))

    def unpack(self, data: bytes) -> Any:
        """Inverse of `pack`, in this process or another one."""
        text, tensors = pickle.loads(data)
        return _Unpickler(io.BytesIO(text), [unpack(tensor) for tensor in tensors], self._named).load()

    def equals(self, step: int, tree: Any) -> bool:
        """Whether `tree` is, bit for bit, the state that was kept for step `step`; a NaN makes it another one."""
        if self._last is None or self._last[0] != step:
            return False
        text, tensors = self._take_apart(tree)
        _, kept_text, kept = self._last
        return text == kept_text and all(
            torch.equal(now.detach(), then) for now, then in zip(tensors, kept, strict=True)
        )

    def _take_apart(self, tree: Any) -> tuple[bytes, list[Tensor]]:
        stream = io.BytesIO()
        pickler = _Pickler(stream, self._name_of, torch.device(self._pool.device))
        pickler.dump(tree)
        return stream.getvalue(), pickler.tensors

    def _region(self, step: int, capacity: int) -> Region:
        prefix = f"snapshot.{step % _NUM_STATES}."
        name = f"{prefix}{capacity}"
        if name not in self._regions:
            (region,) = self._pool.allocate([RegionSpec(name, capacity, Kind.RETAINED)])
            for outgrown in [n for n in self._regions if n.startswith(prefix)]:
                del self._regions[outgrown]  # of step - 2, which no recovery enters any more
                self._pool.free(outgrown)
            self._regions[name] = region
        return self._regions[name]

    def _attach(self, name: str) -> Region:
        if name not in self._regions:
            self._regions[name] = self._pool.attach(name)
        return self._regions[name]


def _lay_out(tensors: list[Tensor]) -> tuple[list[_Place], int]:
    places: list[_Place] = []
    offset = 0
    for tensor in tensors:
        dense = torch.ops.aten.is_non_overlapping_and_dense(tensor)
        strides = tuple(tensor.stride()) if dense else tuple(torch.empty(tensor.shape, device="meta").stride())
        requires_grad = tensor.requires_grad and tensor.is_leaf
        places.append((offset, tensor.dtype, tuple(tensor.shape), strides, requires_grad))
        offset += align_up(tensor.numel() * tensor.element_size())
    return places, offset


def _view(pool: ResilientMemoryPool, region: Region, place: _Place) -> Tensor:
    offset, dtype, shape, strides, _ = place
    return tensor_from_pool(pool, region, dtype=dtype, shape=shape, strides=strides, offset_bytes=offset)


class _Pickler(pickle.Pickler):
    """Takes the tensors of a device out of what it pickles; the same object twice stays the same object."""

    def __init__(self, stream: io.BytesIO, name_of: Mapping[int, str], device: torch.device) -> None:
        super().__init__(stream, protocol=pickle.HIGHEST_PROTOCOL)
        self._device = device
        self.tensors: list[Tensor] = []
        self._name_of = name_of
        self._index: dict[int, int] = {}

    def persistent_id(self, value: Any) -> int | str | None:
        if id(value) in self._name_of:
            return self._name_of[id(value)]
        if type(value) not in (Tensor, Parameter) or value.layout is not torch.strided or value.is_quantized:
            return None
        if value.device != self._device:  # step counts of torch's optimizers stay in host memory
            return None
        if id(value) not in self._index:
            self._index[id(value)] = len(self.tensors)
            self.tensors.append(value)
        return self._index[id(value)]

    def reducer_override(self, value: Any) -> Any:
        """Tensors that are not taken out."""
        return reduce_tensor(value) if type(value) is Tensor else NotImplemented


class _Unpickler(pickle.Unpickler):
    def __init__(self, stream: io.BytesIO, tensors: list[Tensor], named: Mapping[str, Tensor]) -> None:
        super().__init__(stream)
        self._tensors, self._named = tensors, named

    def persistent_load(self, index: Any) -> Any:
        return self._named[index] if isinstance(index, str) else self._tensors[index]
