"""A supervisor whose NVML is a stand-in: ``python supervisor_with_gpus.py GPUS TRACE --control-fd N``.

Every process of the trace has a context on each GPU while it lives, and beyond its end while the file ``GPUS.held`` is
there.
"""

# ruff: noqa: N802 -- the functions have the names of the library's
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from leto_strategy.devices.nvml import Nvml
from leto_strategy.processes import supervisor
from tests.fake_nvml import FakeNvml


class TracedNvml(FakeNvml):
    def __init__(self, file, trace):
        super().__init__(file=file)
        self._held, self._trace = Path(f"{file}.held"), Path(trace)

    def nvmlDeviceGetComputeRunningProcesses(self, handle):
        super().nvmlDeviceGetComputeRunningProcesses(handle)
        lines = self._trace.read_text().splitlines() if self._trace.exists() else []
        pids = {json.loads(line)["pid"] for line in lines}
        return [SimpleNamespace(pid=pid) for pid in pids if self._held.exists() or os.path.exists(f"/proc/{pid}")]


if __name__ == "__main__":
    gpus, trace, *arguments = sys.argv[1:]
    sys.exit(supervisor.main(arguments, open_nvml=lambda: Nvml(TracedNvml(gpus, trace))))
