"""How a trainer publishes its word: at once, or in the order of its GPU's stream.

On the CPU an operation has ended when its call returns, so a store says what is true. On a GPU the host runs ahead: the
stream itself stores the word, behind every operation that the word speaks of, and a kill at any moment leaves a word
that is not ahead of memory. Rules R4, T2, T9.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from datetime import timedelta

import torch

from leto_strategy.errors import RecordError
from leto_strategy.memory.libcuda import CudaDriver
from leto_strategy.progress import COPY_OFFSETS_BYTES, Marker, ProgressPage, encode

_LOOK_AGAIN_SECONDS = 50e-6


class Words(ABC):
    """The words of one rank, as its trainer writes them. Markers only grow."""

    @property
    @abstractmethod
    def newest(self) -> Marker | None:
        """The last marker that was published, whether or not it is stored yet."""

    @abstractmethod
    def publish(self, marker: Marker) -> None:
        """Let the marker be stored when everything that came before is done."""

    @abstractmethod
    def wait_until(self, condition: Callable[[Marker | None], bool], timeout: timedelta) -> bool:
        """Return once the stored marker satisfies a condition; whether that took a wait."""


class HostWords(Words):
    """Stores at once.

    Args:
        page: The rank's progress page.
    """

    def __init__(self, page: ProgressPage) -> None:
        self._page = page

    @property
    def newest(self) -> Marker | None:
        """What is stored."""
        return self._page.marker

    def publish(self, marker: Marker) -> None:
        """Store both copies."""
        self._page.publish(marker)

    def wait_until(self, condition: Callable[[Marker | None], bool], timeout: timedelta) -> bool:
        """What was published is stored already."""
        assert condition(self._page.marker), f"nothing will change {self._page.marker}"
        return False


class StreamWords(Words):
    """Lets the current stream of a device store.

    Args:
        page: The rank's progress page.
        address: Of the page, in memory that is registered with the driver.
        driver: The device's.
        device: The device.
    """

    def __init__(self, page: ProgressPage, address: int, driver: CudaDriver, device: torch.device) -> None:
        self._page, self._address, self._driver, self._device = page, address, driver, device
        self._newest = page.marker

    @property
    def newest(self) -> Marker | None:
        """The last that was handed to the stream."""
        return self._newest

    def publish(self, marker: Marker) -> None:
        """Store copy A, then copy B, in the stream; some 6 microseconds of the host's time."""
        assert self._newest is None or self._newest <= marker, f"{marker} would take back {self._newest}"
        self._newest = marker
        word, stream = encode(marker), torch.cuda.current_stream(self._device).cuda_stream
        for offset in COPY_OFFSETS_BYTES:
            self._driver.write_in_stream(stream, self._address + offset, word)

    def wait_until(self, condition: Callable[[Marker | None], bool], timeout: timedelta) -> bool:
        """Look again and again, and ask the stream each time, which raises if the device has failed."""
        if condition(self._page.marker):
            return False
        deadline = time.monotonic() + timeout.total_seconds()
        stream = torch.cuda.current_stream(self._device)
        while not condition(self._page.marker):
            stream.query()
            if time.monotonic() > deadline:
                raise RecordError(f"the GPU has not gone on from {self._page.marker} in {timeout}")
            time.sleep(_LOOK_AGAIN_SECONDS)
        return True
