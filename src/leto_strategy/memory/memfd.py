"""Host memory in memfd segments: the backend of CPU runs, and of records and parity in every run.

No file system is involved (not /dev/shm): a memfd lives exactly as long as somebody holds its fd or maps it. Segments
are sealed against shrinking, so that no holder can turn another's access into SIGBUS. Mappings are made by libc rather
than by the `mmap` module, whose objects unmap when they are collected.
"""

import ctypes
import errno
import fcntl
import mmap
import os
from collections.abc import Sequence

from leto_strategy.errors import ResourceError
from leto_strategy.memory.backend import MemoryBackend
from leto_strategy.memory.capacity import available_host_bytes

_MFD_NOEXEC_SEAL = 8  # Linux 6.3; an older kernel says EINVAL
_MADV_HUGEPAGE = 14
_MADV_POPULATE_WRITE = 23  # Linux 5.14
_MAP_FAILED = ctypes.c_void_p(-1).value
_HUGE_PAGE_BYTES = 2 << 20

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class MemfdBackend(MemoryBackend):
    """Segments of one memfd each."""

    @property
    def granularity_bytes(self) -> int:
        """A base page."""
        return mmap.PAGESIZE

    def available_bytes(self) -> tuple[int, str]:
        """MemAvailable or what the cgroup leaves."""
        return available_host_bytes()

    def committed_bytes(self, handles: Sequence[int], size_bytes: int) -> int:
        """Pages that were touched."""
        return sum(os.fstat(fd).st_blocks * 512 for fd in handles)

    def create(self, size_bytes: int, *, label: str, protected: bool = False) -> list[int]:
        """One sealed memfd, zeroed; no page is taken yet."""
        try:
            fd = _memfd(f"leto-{label}"[:200])
        except OSError as error:
            raise _out_of(error, "make a memory segment") from None
        try:
            os.ftruncate(fd, size_bytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        except OSError as error:
            os.close(fd)
            raise _out_of(error, f"make a memory segment of {size_bytes} bytes") from None
        return [fd]

    def map(self, handles: Sequence[int], size_bytes: int, *, address_hint: int, writable: bool) -> int:
        """A shared mapping of the memfd."""
        (fd,) = handles
        address = _libc.mmap(address_hint, size_bytes, _protection(writable), mmap.MAP_SHARED, fd, 0)
        if address is None or address == _MAP_FAILED:
            raise _out_of(_last_error(), f"map {size_bytes} bytes")
        if size_bytes >= _HUGE_PAGE_BYTES:
            # Fewer faults and shorter page tables where /sys/kernel/mm/transparent_hugepage/shmem_enabled allows it.
            _libc.madvise(address, size_bytes, _MADV_HUGEPAGE)
        return int(address)

    def protect(self, address: int, size_bytes: int, *, writable: bool) -> None:
        """One mprotect."""
        if _libc.mprotect(address, size_bytes, _protection(writable)) != 0:
            raise _out_of(_last_error(), f"change the protection of {size_bytes} bytes")

    def unmap(self, address: int, size_bytes: int) -> None:
        """One munmap."""
        if _libc.munmap(address, size_bytes) != 0:
            raise _last_error()

    def populate(self, address: int, size_bytes: int) -> None:
        """MADV_POPULATE_WRITE; a kernel without it leaves the pages to the first touch."""
        if _libc.madvise(address, size_bytes, _MADV_POPULATE_WRITE) != 0:
            error = _last_error()
            if error.errno != errno.EINVAL:
                raise _out_of(error, f"take {size_bytes} bytes of host memory")


def _memfd(name: str) -> int:
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        return os.memfd_create(name, flags | _MFD_NOEXEC_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.memfd_create(name, flags)


def _protection(writable: bool) -> int:
    return mmap.PROT_READ | mmap.PROT_WRITE if writable else mmap.PROT_READ


def _last_error() -> OSError:
    code = ctypes.get_errno()
    return OSError(code, os.strerror(code))


def _out_of(error: OSError, what: str) -> ResourceError:
    remedies = {
        errno.EMFILE: "raise the limit of open files (`ulimit -n`)",
        errno.ENFILE: "the system has no file descriptors left (fs.file-max)",
        errno.ENOMEM: "free host memory, or raise the container's memory limit or vm.max_map_count",
    }
    remedy = remedies.get(error.errno or 0, "check the limits of this machine or container")
    return ResourceError(error.errno, f"can't {what}: {error.strerror}; {remedy}")
