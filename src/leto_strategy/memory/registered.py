"""Host memory that a GPU's streams read and write: memfd segments, mapped and then registered with the driver.

Registration needs a writable mapping. So words and records are writable in a shadow from the start; nothing but Leto's
own code has their addresses. It is done in pieces, so that one lost page makes one piece be registered again.
"""

from collections.abc import Sequence

from leto_strategy.memory.libcuda import CudaDriver
from leto_strategy.memory.memfd import MemfdBackend

PIECE_BYTES = 64 << 20


class RegisteredBackend(MemfdBackend):
    """Segments of host memory that are registered wherever they are mapped.

    Args:
        driver: Of the device. A CUDA context must be current when a segment is mapped.
    """

    def __init__(self, driver: CudaDriver) -> None:
        self._driver = driver

    def map(self, handles: Sequence[int], size_bytes: int, *, address_hint: int, writable: bool) -> int:
        """Map writable, and register."""
        address = super().map(handles, size_bytes, address_hint=address_hint, writable=True)
        for begin in range(0, size_bytes, PIECE_BYTES):
            self._driver.register(address + begin, min(PIECE_BYTES, size_bytes - begin))
        return address

    def protect(self, address: int, size_bytes: int, *, writable: bool) -> None:
        """Nothing to do: it is writable."""

    def unmap(self, address: int, size_bytes: int) -> None:
        """Unregister, and unmap."""
        for begin in range(0, size_bytes, PIECE_BYTES):
            self._driver.unregister(address + begin)
        super().unmap(address, size_bytes)
