"""Which backend makes and maps the memory of a rank: host memory for everything, or HBM for what a GPU trains.

A device is named as in messages: an empty dict is the CPU, ``{"ordinal": 0, "handle_bytes": 33554432}`` a GPU.
"""

from typing import Any

from leto_strategy.errors import ProtocolError
from leto_strategy.memory.backend import Backends, Place
from leto_strategy.memory.cuda import CudaBackend
from leto_strategy.memory.memfd import MemfdBackend
from leto_strategy.memory.registered import RegisteredBackend
from leto_strategy.system import allow_many_files

HANDLE_BYTES = 32 << 20
"""Default size of a handle of protected device memory: H1 pages of 2 MiB, what one protection group may lose."""


def device_of(name: str, *, handle_bytes: int = HANDLE_BYTES) -> dict[str, Any]:
    """What managers and pools are told about a device.

    Args:
        name: As torch writes it: "cpu" or "cuda:N", N counted among the visible devices.
        handle_bytes: See `CudaBackend`.
    """
    return {} if name == "cpu" else {"ordinal": int(name.removeprefix("cuda:")), "handle_bytes": handle_bytes}


def name_of(device: dict[str, Any]) -> str:
    """The inverse of `device_of`."""
    return f"cuda:{device['ordinal']}" if device else "cpu"


def owner_backends(device: dict[str, Any]) -> Backends:
    """Backends of a state manager, which never maps.

    Raises:
        ProtocolError: Not a device.
        ResourceError: There is no such GPU.
    """
    host = MemfdBackend()
    if not device:
        return {Place.HOST: host, Place.DEVICE: host}
    allow_many_files()
    return {Place.HOST: host, Place.DEVICE: _cuda(device)}


def trainer_backends(device: dict[str, Any]) -> Backends:
    """Backends of a trainer. On a GPU its host memory is registered, so that streams can write to it.

    Raises:
        ProtocolError: Not a device.
        ResourceError: There is no such GPU.
    """
    if not device:
        return owner_backends(device)
    cuda = _cuda(device)
    allow_many_files()
    return {Place.HOST: RegisteredBackend(cuda.driver), Place.DEVICE: cuda}


def _cuda(device: dict[str, Any]) -> CudaBackend:
    ordinal, handle_bytes = device.get("ordinal"), device.get("handle_bytes")
    if type(ordinal) is not int or type(handle_bytes) is not int:
        raise ProtocolError(f"{device!r:.80} is not a device")
    return CudaBackend(ordinal, handle_bytes=handle_bytes)
