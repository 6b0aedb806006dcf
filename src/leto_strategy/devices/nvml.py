"""NVML through `pynvml`: who computes on a GPU, how much memory is free, and how healthy the GPU is.

No method raises: what the library, the driver or a GPU does not say is None, "unknown". None of them makes a CUDA
context. A call takes 0.1 to 4 ms on a healthy GPU, and on a broken one may never return: whoever must not wait asks
from a thread (`processes.device_watch`).
"""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from leto_strategy.devices.health import DeviceHealth
from leto_strategy.devices.visible import AmbiguousDeviceError, visible_gpus

_RECOVERY_ACTION_FIELD = 230  # NVML_FI_DEV_GET_GPU_RECOVERY_ACTION
_UNCORRECTED, _VOLATILE = 1, 0  # NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC
_GONE = {15, 16}  # NVML_ERROR_GPU_IS_LOST, NVML_ERROR_RESET_REQUIRED
COMPUTE_MODES = {0: "default", 1: "exclusive thread", 2: "prohibited", 3: "exclusive process"}


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Memory of a GPU, in bytes."""

    total: int
    free: int
    used: int


class Nvml:
    """An initialised NVML, or the reason why there is none.

    Args:
        library: The module `pynvml`, or what behaves like it. None: it is not installed.
    """

    def __init__(self, library: Any) -> None:
        self._library = library
        self.problem = "nvidia-ml-py is not installed" if library is None else ""
        """Why everything is unknown; empty where NVML works."""
        if library is not None:
            try:
                library.nvmlInit()
            except Exception as error:
                self._library, self.problem = None, str(error) or type(error).__name__

    def driver_version(self) -> str | None:
        """Such as "580.95.05"."""
        return _text(self._ask("nvmlSystemGetDriverVersion"))

    def num_gpus(self) -> int:
        """GPUs of the machine that this process may see; 0 where that is unknown."""
        return int(self._ask("nvmlDeviceGetCount") or 0)

    def gpus(self) -> list["Gpu"]:
        """All GPUs of the machine, in NVML's order."""
        handles = [self._ask("nvmlDeviceGetHandleByIndex", index) for index in range(self.num_gpus())]
        return [Gpu(self._ask, handle) for handle in handles]

    def visible(self, environ: Mapping[str, str]) -> list["Gpu"]:
        """What a process with this environment knows as cuda:0, cuda:1, ….

        Raises:
            AmbiguousDeviceError: See `visible_gpus`, or one of them is cut into MIG instances.
        """
        gpus = self.gpus()
        uuids, models = [gpu.uuid() or "" for gpu in gpus], [gpu.name() or "" for gpu in gpus]
        chosen = [gpus[index] for index in visible_gpus(environ, uuids=uuids, models=models)]
        if any(gpu.is_partitioned() for gpu in chosen):
            raise AmbiguousDeviceError("a GPU is cut into MIG instances, which can't be watched: switch MIG off")
        return chosen

    def _ask(self, function: str, *arguments: Any) -> Any:
        if self._library is None:
            return None
        try:
            return getattr(self._library, function)(*arguments)
        except Exception as error:
            return _Gone() if getattr(error, "value", None) in _GONE else None


class _Gone:
    """NVML's answer about a GPU that it can't reach; as false as None."""

    def __bool__(self) -> bool:
        return False


class Gpu:
    """One GPU. Each method asks anew.

    Args:
        ask: Calls a function of NVML by its name; returns something false where it fails.
        handle: NVML's handle.
    """

    def __init__(self, ask: Callable[..., Any], handle: Any) -> None:
        self._ask_nvml = ask
        self._handle = handle

    def uuid(self) -> str | None:
        """The identifier that CUDA_VISIBLE_DEVICES understands, "GPU-..."."""
        return _text(self._ask("nvmlDeviceGetUUID"))

    def name(self) -> str | None:
        """The model."""
        return _text(self._ask("nvmlDeviceGetName"))

    def is_partitioned(self) -> bool:
        """Whether MIG is on."""
        modes = self._ask("nvmlDeviceGetMigMode")
        return bool(modes) and modes[0] == 1

    def compute_pids(self) -> frozenset[int] | None:
        """Processes with a CUDA context on it, numbered as the driver counts processes."""
        listed = self._ask("nvmlDeviceGetComputeRunningProcesses")
        return frozenset(process.pid for process in listed) if isinstance(listed, list) else None

    def memory(self) -> DeviceMemory | None:
        """How much there is, is free and is used."""
        found = self._ask("nvmlDeviceGetMemoryInfo")
        return DeviceMemory(found.total, found.free, found.used) if found else None

    def compute_mode(self) -> str | None:
        """One of `COMPUTE_MODES`: how many processes may have a context."""
        mode = self._ask("nvmlDeviceGetComputeMode")
        return COMPUTE_MODES.get(mode) if isinstance(mode, int) else None

    def is_persistent(self) -> bool | None:
        """Whether the driver stays initialised while nobody uses the GPU."""
        mode = self._ask("nvmlDeviceGetPersistenceMode")
        return bool(mode) if isinstance(mode, int) else None

    def health(self) -> DeviceHealth:
        """The evidence of now; about 2 ms."""
        fields = self._ask("nvmlDeviceGetFieldValues", [_RECOVERY_ACTION_FIELD])
        errors = self._ask("nvmlDeviceGetTotalEccErrors", _UNCORRECTED, _VOLATILE)
        rows = self._ask("nvmlDeviceGetRemappedRows")
        return DeviceHealth(
            recovery_action=int(fields[0].value.uiVal) if fields and fields[0].nvmlReturn == 0 else None,
            uncorrectable_errors=errors if isinstance(errors, int) else None,
            remap_pending=bool(rows[2]) if rows else None,
            remap_failed=bool(rows[3]) if rows else None,
            lost=any(isinstance(answer, _Gone) for answer in (fields, errors, rows))
            or bool(fields and fields[0].nvmlReturn in _GONE),
        )

    def _ask(self, function: str, *arguments: Any) -> Any:
        if self._handle is None or isinstance(self._handle, _Gone):
            return self._handle
        return self._ask_nvml(function, self._handle, *arguments)


def open_nvml() -> Nvml:
    """NVML of this machine. Takes 25 ms for the import and 10 to 50 ms for the initialisation."""
    try:
        library = importlib.import_module("pynvml")
    except ImportError:
        library = None
    return Nvml(library)


def _text(value: Any) -> str | None:
    return value.decode() if isinstance(value, bytes) else value if isinstance(value, str) else None
