"""Which GPU of the machine torch's `cuda:N` is: a pure reading of CUDA_VISIBLE_DEVICES.

NVML counts all GPUs by their place on the bus and knows nothing of that variable.
"""

from collections.abc import Mapping, Sequence

VISIBLE_VARIABLE = "CUDA_VISIBLE_DEVICES"
ORDER_VARIABLE = "CUDA_DEVICE_ORDER"


class AmbiguousDeviceError(ValueError):
    """Torch's number of a GPU can't be turned into the machine's; the message says why and what to write instead."""


def visible_gpus(environ: Mapping[str, str], *, uuids: Sequence[str], models: Sequence[str]) -> list[int]:
    """Machine-wide indices of the GPUs that a process with this environment sees, in CUDA's order.

    As CUDA does, the list ends at its first entry that names no GPU.

    Args:
        environ: Environment of the process that uses CUDA.
        uuids: Of all GPUs, "GPU-...", in NVML's order.
        models: Their names.

    Raises:
        AmbiguousDeviceError: MIG instances; or numbers that depend on which GPU is the fastest.
    """
    value = environ.get(VISIBLE_VARIABLE)
    if value is None:
        _require_bus_order(environ, models)
        return list(range(len(uuids)))
    found: list[int] = []
    for entry in (part.strip() for part in value.split(",")):
        if entry.upper().startswith("MIG"):
            raise AmbiguousDeviceError(
                f"{VISIBLE_VARIABLE}={value} names a MIG instance, which can't be watched: use whole GPUs"
            )
        if entry.isascii() and entry.isdecimal():
            _require_bus_order(environ, models)
            index = int(entry)
        else:
            # Any beginning of an identifier will do, as long as it fits only one.
            fitting = [i for i, uuid in enumerate(uuids) if entry.startswith("GPU-") and uuid.startswith(entry)]
            index = fitting[0] if len(fitting) == 1 else len(uuids)
        if index >= len(uuids):
            break
        if index in found:
            raise AmbiguousDeviceError(f"{VISIBLE_VARIABLE}={value} names a GPU twice: CUDA then sees none")
        found.append(index)
    return found


def _require_bus_order(environ: Mapping[str, str], models: Sequence[str]) -> None:
    if len(set(models)) > 1 and environ.get(ORDER_VARIABLE) != "PCI_BUS_ID":
        raise AmbiguousDeviceError(
            f"CUDA counts GPUs of different models ({', '.join(sorted(set(models)))}) by speed, the driver by their "
            f"place: set {ORDER_VARIABLE}=PCI_BUS_ID"
        )
