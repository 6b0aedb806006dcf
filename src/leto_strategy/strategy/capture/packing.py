"""Turns what a record holds into bytes and back: pickle, with small tensors packed as raw bytes.

Only Leto's own trainers of one job read these bytes, from memory that only this user can open; nothing that arrives on
a socket is ever unpickled. Aliases inside one packed value stay aliases.
"""

import io
import math
import pickle
from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from leto_strategy.config import trainer_identity
from leto_strategy.memory.libcuda import CudaDriver
from leto_strategy.recovery.records import Record
from leto_strategy.strategy.capture.device_values import DeviceValues

_retained: set[int] = set()
"""Addresses of parameters and gradients in retained memory."""

_KNOWN_TO_NUMPY = frozenset((torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool))


def _tensor_from_bytes(data: bytes, dtype: torch.dtype, shape: tuple[int, ...], requires_grad: bool) -> Tensor:
    if not data:
        tensor = torch.empty(shape, dtype=dtype)
    else:
        tensor = torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape)
    return tensor.requires_grad_(requires_grad) if requires_grad else tensor


def _streamed(offset_bytes: int, dtype: torch.dtype, shape: tuple[int, ...], requires_grad: bool) -> Tensor:
    raise AssertionError("a record with values of a GPU's stream is unpacked with them")


def _to_device(tensor: Tensor, device: torch.device, requires_grad: bool) -> Tensor:
    """To the device again in a trainer; the user's process gets what was kept in host memory, like the weights."""
    return (tensor if trainer_identity() is None else tensor.to(device)).requires_grad_(requires_grad)


def _generator_from_state(state: Tensor, device: str) -> torch.Generator:
    generator = torch.Generator(device=device)
    generator.set_state(state)
    return generator


def reduce_tensor(tensor: Tensor) -> Any:
    """How a plain tensor is pickled: as its bytes, and its device where that is another one than the host."""
    if tensor.layout is not torch.strided or tensor.is_quantized:
        return NotImplemented
    requires_grad = tensor.requires_grad and tensor.is_leaf
    plain = tensor.detach()
    if plain.device.type != "cpu":
        return _to_device, (plain.cpu(), plain.device, requires_grad)
    if plain.dtype in _KNOWN_TO_NUMPY:
        data = plain.numpy().tobytes()
    else:
        data = plain.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""
    return _tensor_from_bytes, (data, plain.dtype, tuple(plain.shape), requires_grad)


class ModuleNames:
    """Modules that every trainer of a job has under the same name; packed values hold them by that name."""

    def __init__(self) -> None:
        self._names: dict[int, str] = {}
        self._modules: dict[str, Any] = {}

    def add(self, name: str, module: Any) -> None:
        """Name a module, unless it has a name."""
        if id(module) not in self._names:
            self._names[id(module)] = name
            self._modules[name] = module

    def name_of(self, value: Any) -> str | None:
        """The name of a module, None for anything else."""
        return self._names.get(id(value))

    def module(self, name: str) -> Any:
        """The module of that name.

        Raises:
            pickle.UnpicklingError: There is none here.
        """
        if name not in self._modules:
            raise pickle.UnpicklingError(f"there is no module {name!r} here")
        return self._modules[name]


def note_retained(tensors: Iterable[Tensor]) -> None:
    """From now on what a user keeps must not be one of these tensors itself: it changes with every step."""
    _retained.update(tensor.data_ptr() for tensor in tensors if tensor.numel())


class _Pickler(pickle.Pickler):
    def __init__(self, stream: io.BytesIO, forbidden: tuple[type, ...]) -> None:
        super().__init__(stream, protocol=pickle.HIGHEST_PROTOCOL)
        self._forbidden = forbidden
        self.streamed: DeviceValues | None = None
        """Takes tensors on a GPU, whose values are not waited for; None copies them here and now."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is Tensor:
            if self._forbidden and _retained and value.data_ptr() in _retained:
                raise pickle.PicklingError("it is a parameter or gradient itself; keep a .clone() of it")
            if self.streamed is not None and value.is_cuda and value.layout is torch.strided:
                offset_bytes = self.streamed.take(value)
                requires_grad = value.requires_grad and value.is_leaf
                return _streamed, (offset_bytes, value.dtype, tuple(value.shape), requires_grad)
            return reduce_tensor(value)
        if type(value) is torch.Generator:
            return _generator_from_state, (value.get_state(), str(value.device))
        if self._forbidden and isinstance(value, self._forbidden):
            raise pickle.PicklingError(f"holds a {type(value).__name__}")
        return NotImplemented


class _NamingPickler(_Pickler):
    names: ModuleNames

    def persistent_id(self, value: Any) -> str | None:
        return self.names.name_of(value)


class _NamingUnpickler(pickle.Unpickler):
    def __init__(self, data: bytes, names: ModuleNames) -> None:
        super().__init__(io.BytesIO(data))
        self._names = names

    def persistent_load(self, pid: Any) -> Any:
        return self._names.module(pid)


class _Packer:
    """A pickler that is used again and again: making one costs as much as packing a small record."""

    def __init__(self, forbidden: tuple[type, ...]) -> None:
        self._stream = io.BytesIO()
        self._pickler = _Pickler(self._stream, forbidden)

    def pack(self, value: Any, streamed: DeviceValues | None = None) -> bytes:
        stream = self._stream
        self._pickler.streamed = streamed
        stream.seek(0)
        stream.truncate()
        try:
            self._pickler.dump(value)
            return stream.getvalue()
        finally:
            self._pickler.clear_memo()


@cache
def _packer(forbidden: tuple[type, ...]) -> _Packer:
    return _Packer(forbidden)


_plain_packer = _Packer(())


def pack(value: Any, *, forbidden: tuple[type, ...] = (), names: ModuleNames | None = None) -> bytes:
    """Bytes of `value`.

    Args:
        value: Anything that can be pickled.
        forbidden: Types that must not be inside: packing them would drag half the trainer along.
        names: Modules that may be inside, and are held by name.

    Raises:
        pickle.PicklingError: A forbidden type is inside, or the value can't be pickled (other pickling errors too).
    """
    if names is None:
        return _packer(forbidden).pack(value) if forbidden else _plain_packer.pack(value)
    stream = io.BytesIO()
    pickler = _NamingPickler(stream, forbidden)
    pickler.names = names
    pickler.dump(value)
    return stream.getvalue()


def unpack(data: bytes, names: ModuleNames | None = None) -> Any:
    """Inverse of `pack`."""
    return pickle.loads(data) if names is None else _NamingUnpickler(data, names).load()


class _StreamUnpickler(pickle.Unpickler):
    """Makes tensors of the bytes that a stream has stored."""

    def __init__(self, data: bytes, stream: bytes, device: torch.device) -> None:
        super().__init__(io.BytesIO(data))
        self._values, self._device = stream, device

    def find_class(self, module: str, name: str) -> Any:
        """Resolve a global; ours is answered with the values at hand."""
        if (module, name) == (_streamed.__module__, _streamed.__name__):
            return self._tensor
        return super().find_class(module, name)

    def _tensor(self, offset_bytes: int, dtype: torch.dtype, shape: tuple[int, ...], requires_grad: bool) -> Tensor:
        size_bytes = dtype.itemsize * math.prod(shape)
        data = self._values[offset_bytes : offset_bytes + size_bytes]
        return _tensor_from_bytes(data, dtype, shape, False).to(self._device).requires_grad_(requires_grad)


def pack_record(value: Any, device: torch.device, driver: CudaDriver | None) -> tuple[bytes, DeviceValues | None]:
    """Bytes of a record, and its tensors on a GPU, which the stream will bring to the host.

    Args:
        value: As in `pack`.
        device: Where the rank trains.
        driver: The GPU's, None on the CPU.
    """
    if driver is None:
        return _packer(()).pack(value), None
    streamed = DeviceValues(device, driver)
    data = _packer(()).pack(value, streamed)
    return data, streamed.gather()


def unpack_record(record: Record, device: torch.device) -> Any:
    """Inverse of `pack_record`; tensors of the stream are on `device` again."""
    return _StreamUnpickler(record.payload, record.stream, device).load()
