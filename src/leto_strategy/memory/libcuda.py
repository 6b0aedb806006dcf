"""The calls of CUDA's driver that Leto makes itself, through ctypes: virtual memory, registered memory, stream writes.

No torch and no runtime API, so that a process without a CUDA context (a state manager) can own device memory.
"""

import ctypes
import errno
from ctypes import byref, c_int, c_size_t, c_uint, c_uint64, c_void_p
from typing import Any

from leto_strategy.errors import ResourceError

LIBRARY = "libcuda.so.1"

_OUT_OF_MEMORY = 2
_PINNED = 1  # CU_MEM_ALLOCATION_TYPE_PINNED
_POSIX_FD = 1  # CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
_ON_DEVICE = 1  # CU_MEM_LOCATION_TYPE_DEVICE
_READ, _READ_WRITE = 1, 3  # CU_MEM_ACCESS_FLAGS_PROT_*
_REGISTER_PORTABLE_AND_MAPPED = 3

_SIGNATURES: dict[str, list[Any]] = {
    "cuInit": [c_uint],
    "cuDeviceGet": [c_void_p, c_int],
    "cuGetErrorName": [c_int, c_void_p],
    "cuMemCreate": [c_void_p, c_size_t, c_void_p, c_uint64],
    "cuMemRelease": [c_uint64],
    "cuMemExportToShareableHandle": [c_void_p, c_uint64, c_int, c_uint64],
    "cuMemImportFromShareableHandle": [c_void_p, c_void_p, c_int],
    "cuMemAddressReserve": [c_void_p, c_size_t, c_size_t, c_uint64, c_uint64],
    "cuMemAddressFree": [c_uint64, c_size_t],
    "cuMemMap": [c_uint64, c_size_t, c_size_t, c_uint64, c_uint64],
    "cuMemUnmap": [c_uint64, c_size_t],
    "cuMemSetAccess": [c_uint64, c_size_t, c_void_p, c_size_t],
    "cuMemHostRegister_v2": [c_void_p, c_size_t, c_uint],
    "cuMemHostUnregister": [c_void_p],
    "cuMemcpyDtoHAsync_v2": [c_void_p, c_uint64, c_size_t, c_void_p],
    "cuStreamWriteValue64_v2": [c_void_p, c_uint64, c_uint64, c_uint],
    "cuModuleLoadData": [c_void_p, ctypes.c_char_p],
    "cuModuleGetFunction": [c_void_p, c_void_p, ctypes.c_char_p],
    "cuLaunchKernel": [c_void_p, *([c_uint] * 7), c_void_p, c_void_p, c_void_p],
}


class _Location(ctypes.Structure):
    _fields_ = [("type", c_int), ("id", c_int)]


class _AllocationFlags(ctypes.Structure):
    _fields_ = [
        ("compression", ctypes.c_ubyte), ("rdma", ctypes.c_ubyte), ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    ]  # fmt: skip


class _AllocationProperties(ctypes.Structure):
    _fields_ = [
        ("type", c_int), ("handle_types", c_int), ("location", _Location), ("security", c_void_p),
        ("flags", _AllocationFlags),
    ]  # fmt: skip


class _Access(ctypes.Structure):
    _fields_ = [("location", _Location), ("flags", c_int)]


class CudaDriverError(ResourceError):
    """A call of the driver failed.

    Args:
        call: Its name.
        code: What it returned, a CUresult.
        name: The name of that code.
    """

    def __init__(self, call: str, code: int, name: str) -> None:
        self.code = code
        memory = code == _OUT_OF_MEMORY
        remedy = "; free memory of the GPU or train a smaller model" if memory else ""
        super().__init__(errno.ENOMEM if memory else errno.EIO, f"{call}: {name} ({code}){remedy}")


class CudaDriver:
    """The driver library, for one device.

    Args:
        ordinal: Number of the device among the visible ones.

    Raises:
        ResourceError: There is no driver or no such device.
    """

    def __init__(self, ordinal: int) -> None:
        try:
            self._library = ctypes.CDLL(LIBRARY)
        except OSError as error:
            raise ResourceError(
                errno.ENODEV, f"NVIDIA's driver is not there ({error}): `leto doctor` says more"
            ) from None
        for name, arguments in _SIGNATURES.items():
            function = getattr(self._library, name)
            function.argtypes, function.restype = arguments, c_int
        self._call("cuInit", 0)
        device = c_int()
        self._call("cuDeviceGet", byref(device), ordinal)
        self._properties = _AllocationProperties(_PINNED, _POSIX_FD, _Location(_ON_DEVICE, device.value))
        self._location = _Location(_ON_DEVICE, device.value)

    def create(self, size_bytes: int) -> int:
        """A handle of physical memory."""
        handle = c_uint64()
        self._call("cuMemCreate", byref(handle), size_bytes, byref(self._properties), 0)
        return handle.value

    def export(self, handle: int) -> int:
        """A file descriptor that keeps the memory of a handle alive by itself."""
        fd = c_int(-1)
        self._call("cuMemExportToShareableHandle", byref(fd), handle, _POSIX_FD, 0)
        return fd.value

    def take(self, fd: int) -> int:
        """The inverse of `export`, in any process; the descriptor stays the caller's."""
        handle = c_uint64()
        self._call("cuMemImportFromShareableHandle", byref(handle), c_void_p(fd), _POSIX_FD)
        return handle.value

    def release(self, handle: int) -> None:
        """Give a handle up; mappings of its memory stay."""
        self._call("cuMemRelease", handle)

    def reserve(self, size_bytes: int, address_hint: int) -> int:
        """A range of addresses, at the hint if that is free."""
        address = c_uint64()
        self._call("cuMemAddressReserve", byref(address), size_bytes, 0, address_hint, 0)
        return address.value

    def give_back(self, address: int, size_bytes: int) -> None:
        """The inverse of `reserve`."""
        self._call("cuMemAddressFree", address, size_bytes)

    def map(self, address: int, size_bytes: int, handle: int) -> None:
        """Let a handle's memory appear at an address; nobody may access it yet."""
        self._call("cuMemMap", address, size_bytes, 0, handle, 0)

    def unmap(self, address: int, size_bytes: int) -> None:
        """The inverse of `map`."""
        self._call("cuMemUnmap", address, size_bytes)

    def set_access(self, address: int, size_bytes: int, *, writable: bool) -> None:
        """Let this process's kernels read, or read and write, mapped memory."""
        access = _Access(self._location, _READ_WRITE if writable else _READ)
        self._call("cuMemSetAccess", address, size_bytes, byref(access), 1)

    def register(self, address: int, size_bytes: int) -> None:
        """Pin host memory, so that streams reach it under its own address. Needs a CUDA context."""
        self._call("cuMemHostRegister_v2", address, size_bytes, _REGISTER_PORTABLE_AND_MAPPED)

    def unregister(self, address: int) -> None:
        """The inverse of `register`."""
        self._call("cuMemHostUnregister", address)

    def write_in_stream(self, stream: int, address: int, value: int) -> None:
        """Store a 64-bit value when everything ahead of it in the stream is done and visible to the whole system."""
        self._call("cuStreamWriteValue64_v2", stream, address, value, 0)

    def copy_to_host(self, stream: int, address: int, device_address: int, size_bytes: int) -> None:
        """Copy in stream to registered host memory."""
        self._call("cuMemcpyDtoHAsync_v2", address, device_address, size_bytes, stream)

    def launch(self, ptx: bytes, kernel: bytes, stream: int) -> None:
        """Launch one thread of a kernel without arguments."""
        module, function = c_void_p(), c_void_p()
        self._call("cuModuleLoadData", byref(module), ptx)
        self._call("cuModuleGetFunction", byref(function), module, kernel)
        self._call("cuLaunchKernel", function, 1, 1, 1, 1, 1, 1, 0, stream, None, None)

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            text = ctypes.c_char_p()
            self._library.cuGetErrorName(code, byref(text))
            raise CudaDriverError(name, code, (text.value or b"unknown").decode())
