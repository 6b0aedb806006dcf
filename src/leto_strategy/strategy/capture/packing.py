"""Turns what a record holds into bytes and back: pickle, with small tensors packed as raw bytes.

Only Leto's own trainers of one job read these bytes, from memory that only this user can open; nothing that arrives on
a socket is ever unpickled. Aliases inside one packed value stay aliases.
"""

import io
import pickle
from functools import cache
from typing import Any

import torch
from torch import Tensor

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


class _Pickler(pickle.Pickler):
    def __init__(self, stream: io.BytesIO, forbidden: tuple[type, ...]) -> None:
        super().__init__(stream, protocol=pickle.HIGHEST_PROTOCOL)
        self._forbidden = forbidden

    def reducer_override(self, value: Any) -> Any:
        if type(value) is Tensor:
            return _reduce_tensor(value)
        if type(value) is torch.Generator:
            return _generator_from_state, (value.get_state(), str(value.device))
        if self._forbidden and isinstance(value, self._forbidden):
            raise pickle.PicklingError(f"holds a {type(value).__name__}")
        return NotImplemented


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


def pack(value: Any, *, forbidden: tuple[type, ...] = ()) -> bytes:
    """Bytes of `value`.

    Args:
        value: Anything that can be pickled.
        forbidden: Types that must not be inside: packing them would drag half the trainer along.

    Raises:
        pickle.PicklingError: A forbidden type is inside, or the value can't be pickled (other pickling errors too).
    """
    return _packer(forbidden).pack(value)


def unpack(data: bytes) -> Any:
    """Inverse of `pack`."""
    return pickle.loads(data)
