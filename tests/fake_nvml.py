"""A stand-in for the module `pynvml`: GPUs as plain data, which a test changes while it is asked.

With a file, what the GPUs say is read from it at each question, so that a test can speak to another process's NVML.
"""

# ruff: noqa: N802 -- the functions have the names of the library's
import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import SimpleNamespace


class NVMLError(Exception):
    """As in pynvml: carries NVML's code."""

    def __init__(self, value):
        super().__init__(f"NVML error {value}")
        self.value = value


NOT_SUPPORTED, LOST = 3, 15


@dataclass
class FakeGpu:
    """One GPU. A value None is "not supported"."""

    uuid: str = "GPU-aaaa"
    name: str = "H200"
    pids: list = field(default_factory=list)
    action: int | None = 0
    errors: int | None = 0
    rows: tuple | None = (0, 0, 0, 0)
    mode: int = 0
    mig: int = 0
    persistent: int = 1
    lost: bool = False
    hangs: float = 0.0
    """Seconds until it answers who computes on it."""


class FakeNvml:
    """Behaves like the module, as far as Leto uses it."""

    NVMLError = NVMLError

    def __init__(self, *gpus, driver="580.95.05", init_error=None, file=None):
        self._gpus = list(gpus)
        self._driver = driver
        self._init_error = init_error
        self._file = None if file is None else Path(file)
        self.calls = []

    @staticmethod
    def write(file, *gpus):
        """Say what the GPUs of a file are, at once."""
        partial = Path(f"{file}.new")
        partial.write_text(json.dumps([asdict(gpu) for gpu in gpus]))
        partial.rename(file)

    def _gpu(self, handle, function):
        self.calls.append(function)
        gpus = self._gpus if self._file is None else [FakeGpu(**gpu) for gpu in json.loads(self._file.read_text())]
        gpu = gpus[handle.index]
        if gpu.lost:
            raise NVMLError(LOST)
        return gpu

    @staticmethod
    def _supported(value):
        if value is None:
            raise NVMLError(NOT_SUPPORTED)
        return value

    def nvmlInit(self):
        self.calls.append("init")
        if self._init_error is not None:
            raise NVMLError(self._init_error)

    def nvmlSystemGetDriverVersion(self):
        return self._driver

    def nvmlDeviceGetCount(self):
        return len(self._gpus if self._file is None else json.loads(self._file.read_text()))

    def nvmlDeviceGetHandleByIndex(self, index):
        return SimpleNamespace(index=index)

    def nvmlDeviceGetUUID(self, handle):
        return self._gpu(handle, "uuid").uuid

    def nvmlDeviceGetName(self, handle):
        return self._gpu(handle, "name").name

    def nvmlDeviceGetMigMode(self, handle):
        return [self._gpu(handle, "mig").mig, 0]

    def nvmlDeviceGetComputeRunningProcesses(self, handle):
        gpu = self._gpu(handle, "processes")
        time.sleep(gpu.hangs)
        return [SimpleNamespace(pid=pid, usedGpuMemory=1 << 20) for pid in self._supported(gpu.pids)]

    def nvmlDeviceGetMemoryInfo(self, handle):
        self._gpu(handle, "memory")
        return SimpleNamespace(total=1 << 37, free=1 << 36, used=1 << 36)

    def nvmlDeviceGetComputeMode(self, handle):
        return self._gpu(handle, "mode").mode

    def nvmlDeviceGetPersistenceMode(self, handle):
        return self._gpu(handle, "persistence").persistent

    def nvmlDeviceGetFieldValues(self, handle, fields):
        gpu = self._gpu(handle, "fields")
        assert fields == [230]
        code = 0 if gpu.action is not None else NOT_SUPPORTED
        return [SimpleNamespace(nvmlReturn=code, value=SimpleNamespace(uiVal=gpu.action or 0))]

    def nvmlDeviceGetTotalEccErrors(self, handle, kind, counter):
        assert (kind, counter) == (1, 0), "uncorrected, volatile"
        return self._supported(self._gpu(handle, "errors").errors)

    def nvmlDeviceGetRemappedRows(self, handle):
        return self._supported(self._gpu(handle, "rows").rows)
