"""What NVIDIA's management library says of the GPU that is measured. It needs no CUDA context of anybody."""

import os
import time

from leto_strategy.devices.nvml import open_nvml

MIB = 1 << 20
SETTLE_SECONDS, SETTLE_SECONDS_MAX = 0.5, 8.0


class MeasuredGpu:
    """The GPU that CUDA calls number 0.

    Raises:
        RuntimeError: There is none, or no NVML.
    """

    def __init__(self) -> None:
        self._nvml = open_nvml()
        visible = self._nvml.visible(os.environ)
        if not visible:
            raise RuntimeError(f"NVML knows of no GPU: {self._nvml.problem or 'none is visible'}")
        self._gpu = visible[0]

    def used_bytes(self) -> int:
        """Memory that is taken, by whomever."""
        memory = self._gpu.memory()
        if memory is None:
            raise RuntimeError("NVML does not say how much memory is taken")
        return memory.used

    def settled_used_bytes(self) -> int:
        """Memory that is taken when that has not changed for a moment; after some seconds as it is."""
        deadline = time.monotonic() + SETTLE_SECONDS_MAX
        used, since = self.used_bytes(), time.monotonic()
        while time.monotonic() < min(deadline, since + SETTLE_SECONDS):
            time.sleep(0.02)
            if (now := self.used_bytes()) != used:
                used, since = now, time.monotonic()
        return used

    def context_pids(self) -> frozenset[int]:
        """Processes that have a context, as the driver numbers them: in a container by other numbers."""
        return self._gpu.compute_pids() or frozenset()

    def describe(self) -> dict[str, str | None]:
        """Model and driver."""
        return {"gpu": self._gpu.name(), "driver": self._nvml.driver_version()}
