"""Values of a record that are still to be computed when it is written: a GPU's stream brings them to the host.

All tensors of a record are put together by one kernel and copied by one transfer a copy, so that a record of dozens of
logged values costs the host some tens of microseconds, and no wait.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from leto_strategy.memory.libcuda import CudaDriver


class DeviceValues:
    """The tensors of one record, one after the other; a `StreamPart` once they are gathered.

    Args:
        device: The GPU.
        driver: Its driver.
    """

    def __init__(self, device: torch.device, driver: CudaDriver) -> None:
        self._device, self._driver = device, driver
        self._parts: list[Tensor] = []
        self._gathered: Tensor | None = None
        self.size_bytes = 0

    def take(self, tensor: Tensor) -> int:
        """Add a tensor; the offset of its bytes."""
        part = tensor.detach()
        if part.device != self._device:
            part = part.to(self._device)
        offset_bytes = self.size_bytes
        self._parts.append(part.contiguous().reshape(-1).view(torch.uint8))
        self.size_bytes += part.numel() * part.element_size()
        return offset_bytes

    def gather(self) -> "DeviceValues | None":
        """Put the bytes together, as they are at this place of the stream; None where there are none."""
        if not self.size_bytes:
            return None
        self._gathered = torch.cat(self._parts)
        return self

    def store(self, addresses: Sequence[int], done_address: int, done: int) -> None:
        """Copy to the host, in the stream. The caching allocator gives the memory away no earlier than the stream."""
        assert self._gathered is not None
        stream = torch.cuda.current_stream(self._device).cuda_stream
        for address in addresses:
            self._driver.copy_to_host(stream, address, self._gathered.data_ptr(), self.size_bytes)
        self._driver.write_in_stream(stream, done_address, done)
