"""Device memory through CUDA's virtual-memory API: owned without a context, mapped wherever it is needed.

The owner creates handles and exports them as file descriptors; these alone keep the memory, through the death of
whoever created or mapped it. Paper, section 4.3.
"""

from collections.abc import Sequence
from contextlib import suppress

from leto_strategy.errors import ResourceError
from leto_strategy.memory.backend import MemoryBackend
from leto_strategy.memory.holdings import close_fds
from leto_strategy.memory.libcuda import CudaDriver, CudaDriverError

GRANULARITY_BYTES = 2 << 20
_UNKNOWN_BYTES = 1 << 60


class CudaBackend(MemoryBackend):
    """Segments of one device's memory.

    The size of a handle is a compromise: attaching 8 GiB takes 1.5 ms as one handle and 332 ms in handles of 2 MiB,
    and small ones are slow to give back when a process dies; but memory is lost by the handle.

    Args:
        ordinal: Number of the device among the visible ones.
        handle_bytes: Largest handle of protected memory, a multiple of 2 MiB; other memory is one handle a segment.

    Raises:
        ResourceError: There is no such device.
    """

    def __init__(self, ordinal: int, *, handle_bytes: int) -> None:
        assert handle_bytes > 0
        assert handle_bytes % GRANULARITY_BYTES == 0, f"handles of {handle_bytes} bytes"
        self.driver = CudaDriver(ordinal)
        self._handle_bytes = handle_bytes

    @property
    def granularity_bytes(self) -> int:
        """2 MiB, the driver's large page."""
        return GRANULARITY_BYTES

    def available_bytes(self) -> tuple[int, str]:
        """Not asked: the driver takes all memory of a handle when it is created, or refuses."""
        return _UNKNOWN_BYTES, "the GPU's driver"

    def committed_bytes(self, handles: Sequence[int], size_bytes: int) -> int:
        """All of it."""
        return size_bytes

    def create(self, size_bytes: int, *, label: str, protected: bool) -> list[int]:
        """Handles, each exported and then released: the descriptors are all that is left."""
        num_handles = -(-size_bytes // self._handle_bytes) if protected else 1
        fds: list[int] = []
        try:
            for handle_bytes in handle_sizes(size_bytes, num_handles):
                handle = self.driver.create(handle_bytes)
                try:
                    fds.append(self.driver.export(handle))
                finally:
                    self.driver.release(handle)
        except ResourceError:
            close_fds(fds)
            raise
        return fds

    def map(self, handles: Sequence[int], size_bytes: int, *, address_hint: int, writable: bool) -> int:
        """Import all handles, back to back in one range of addresses."""
        address = self._reserve(size_bytes, address_hint)
        mapped_bytes = 0
        try:
            for fd, handle_bytes in zip(handles, handle_sizes(size_bytes, len(handles)), strict=True):
                handle = self.driver.take(fd)
                try:
                    self.driver.map(address + mapped_bytes, handle_bytes, handle)
                finally:
                    self.driver.release(handle)
                mapped_bytes += handle_bytes
            self.driver.set_access(address, size_bytes, writable=writable)
        except ResourceError:
            with suppress(ResourceError):
                if mapped_bytes:
                    self.driver.unmap(address, mapped_bytes)
                self.driver.give_back(address, size_bytes)
            raise
        return address

    def _reserve(self, size_bytes: int, address_hint: int) -> int:
        """A range at the hint, else anywhere: the driver may answer a range that is taken with an error."""
        try:
            return self.driver.reserve(size_bytes, address_hint)
        except CudaDriverError:
            return self.driver.reserve(size_bytes, 0)

    def protect(self, address: int, size_bytes: int, *, writable: bool) -> None:
        """One call for the whole range."""
        self.driver.set_access(address, size_bytes, writable=writable)

    def unmap(self, address: int, size_bytes: int) -> None:
        """Unmap and give the addresses back; nothing may be under way on the device."""
        self.driver.unmap(address, size_bytes)
        self.driver.give_back(address, size_bytes)

    def populate(self, address: int, size_bytes: int) -> None:
        """Nothing to do: the memory was taken when it was created."""


def handle_sizes(size_bytes: int, num_handles: int) -> list[int]:
    """Sizes of the handles of a segment, as equal as the granularity allows; both ends compute them."""
    pages, rest = divmod(size_bytes, GRANULARITY_BYTES)
    assert rest == 0, f"a segment of {size_bytes} bytes"
    assert 1 <= num_handles <= pages, f"{num_handles} handles for {pages} pages"
    small, num_large = divmod(pages, num_handles)
    return [GRANULARITY_BYTES * (small + (index < num_large)) for index in range(num_handles)]
