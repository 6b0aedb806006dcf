"""Turns what a record holds into bytes and back: pickle, with small tensors packed as raw bytes.

Only Leto's own trainers of one job read these bytes, from memory that only this user can open; nothing that arrives on
a socket is ever unpickled. Aliases inside one packed value stay aliases.
"""

import io
import pickle
from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor

_retained: set[int] = set()
"""Addresses of parameters and gradients in retained memory."""

_KNOWN_TO_NUMPY = frozenset((torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool))


def _tensor_from_bytes(data: bytes, dtype: torch.dtype, shape: tuple[int, ...], requires_grad: bool) -> Tensor:
    if not data:
        tensor = torch.empty(shape, dtype=dtype)
    else:
        tensor = torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape)
    return tensor.requires_grad_(requires_grad) if requires_grad else tensor


def _to_device(tensor: Tensor, device: torch.device, requires_grad: bool) -> Tensor:
    return tensor.to(device).requires_grad_(requires_grad)


def _generator_from_state(state: Tensor, device: str) -> torch.Generator:
    generator = torch.Generator(device=device)
    generator.set_state(state)
    return generator


def _reduce_tensor(tensor: Tensor) -> Any:
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

    def reducer_override(self, value: Any) -> Any:
        if type(value) is Tensor:
            if self._forbidden and _retained and value.data_ptr() in _retained:
                raise pickle.PicklingError("it is a parameter or gradient itself; keep a .clone() of it")
            return _reduce_tensor(value)
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

    def pack(self, value: Any) -> bytes:
        stream = self._stream
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
        return _packer(forbidden).pack(value)
    stream = io.BytesIO()
    pickler = _NamingPickler(stream, forbidden)
    pickler.names = names
    pickler.dump(value)
    return stream.getvalue()


def unpack(data: bytes, names: ModuleNames | None = None) -> Any:
    """Inverse of `pack`."""
    return pickle.loads(data) if names is None else _NamingUnpickler(data, names).load()
