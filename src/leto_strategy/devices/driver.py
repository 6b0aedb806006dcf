"""What CUDA's driver library says about GPUs, through ctypes and without a context.

Only questions: the calls that make and map memory belong to the memory backend. `hold_context` is the one exception,
the body of a short-lived process whose context others look for.
"""

import ctypes
import sys
from ctypes import byref, c_char_p, c_int, c_void_p
from dataclasses import dataclass
from typing import Any

LIBRARY = "libcuda.so.1"

_COMPUTE_MODE = 20
_CAPABILITY_MAJOR, _CAPABILITY_MINOR = 75, 76
_VIRTUAL_MEMORY, _POSIX_HANDLES = 102, 103
"""CU_DEVICE_ATTRIBUTE_*: VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED."""


@dataclass(frozen=True, slots=True)
class CudaDevice:
    """One GPU as CUDA sees it.

    Args:
        name: The model.
        capability: Compute capability, such as (9, 0).
        virtual_memory: Physical memory can be made, mapped and exported apart from each other.
        posix_handles: Such memory can be passed on as a file descriptor.
        compute_mode: CUcomputemode: 0 default, 2 prohibited, 3 one process only.
    """

    name: str
    capability: tuple[int, int]
    virtual_memory: bool
    posix_handles: bool
    compute_mode: int


@dataclass(frozen=True, slots=True)
class DriverReport:
    """The driver, or why there is none.

    Args:
        version: Newest CUDA version it supports, such as (13, 0); (0, 0) without a driver.
        devices: GPUs that CUDA_VISIBLE_DEVICES leaves, in CUDA's order.
        problem: Why it can't be used; empty where it can.
    """

    version: tuple[int, int] = (0, 0)
    devices: tuple[CudaDevice, ...] = ()
    problem: str = ""


def cuda_driver(library: Any = None) -> DriverReport:
    """Ask the driver; costs `cuInit`, 50 ms to seconds.

    Args:
        library: The loaded libcuda; None loads it.
    """
    try:
        cuda = library or ctypes.CDLL(LIBRARY)
        version = c_int()
        _check(cuda, cuda.cuDriverGetVersion(byref(version)), "cuDriverGetVersion")
        pair = (version.value // 1000, version.value % 1000 // 10)
    except (OSError, AttributeError, CudaError) as error:
        return DriverReport(problem=str(error))
    try:
        _check(cuda, cuda.cuInit(0), "cuInit")
        count = c_int()
        _check(cuda, cuda.cuDeviceGetCount(byref(count)), "cuDeviceGetCount")
        return DriverReport(pair, tuple(_device(cuda, ordinal) for ordinal in range(count.value)))
    except CudaError as error:
        return DriverReport(pair, problem=str(error))


def hold_context(library: Any = None) -> None:
    """Make a context on the first GPU, say so on standard output, and keep it until standard input ends."""
    cuda = library or ctypes.CDLL(LIBRARY)
    device, context = c_int(), c_void_p()
    _check(cuda, cuda.cuInit(0), "cuInit")
    _check(cuda, cuda.cuDeviceGet(byref(device), 0), "cuDeviceGet")
    _check(cuda, cuda.cuDevicePrimaryCtxRetain(byref(context), device), "cuDevicePrimaryCtxRetain")
    print("ready", flush=True)
    sys.stdin.read()


class CudaError(Exception):
    """A call of the driver failed; the message has its name and the error's."""


def _check(cuda: Any, code: int, call: str) -> None:
    if code != 0:
        name = c_char_p()
        cuda.cuGetErrorName(code, byref(name))
        raise CudaError(f"{call}: {(name.value or b'unknown error').decode()} ({code})")


def _device(cuda: Any, ordinal: int) -> CudaDevice:
    device, name = c_int(), ctypes.create_string_buffer(256)
    _check(cuda, cuda.cuDeviceGet(byref(device), ordinal), "cuDeviceGet")
    _check(cuda, cuda.cuDeviceGetName(name, 256, device), "cuDeviceGetName")

    def attribute(number: int) -> int:
        value = c_int()
        _check(cuda, cuda.cuDeviceGetAttribute(byref(value), number, device), "cuDeviceGetAttribute")
        return value.value

    return CudaDevice(
        name.value.decode(),
        (attribute(_CAPABILITY_MAJOR), attribute(_CAPABILITY_MINOR)),
        bool(attribute(_VIRTUAL_MEMORY)),
        bool(attribute(_POSIX_HANDLES)),
        attribute(_COMPUTE_MODE),
    )
