"""Which backend computes: by device, and on the CPU by whether a C compiler is there."""

import os
import warnings
from functools import cache

import torch

from leto_strategy.erasure.backend import Backend
from leto_strategy.erasure.bitsliced import BitslicedBackend
from leto_strategy.erasure.compiler import BuildError, usable_variants
from leto_strategy.erasure.native import NativeBackend


def default_threads() -> int:
    """The cores this process may use."""
    return len(os.sched_getaffinity(0))


def backend_for(device: torch.device) -> Backend:
    """The fastest backend for pages on `device`.

    Raises:
        ValueError: There is none for this kind of device.
    """
    if device.type == "cpu":
        return cpu_backend()
    raise ValueError(f"no erasure code backend for pages on {device}: they must be in host memory")


@cache
def cpu_backend() -> Backend:
    """The fastest backend for host memory; the first call may compile (half a second), and says if it can't."""
    try:
        return NativeBackend.build(usable_variants()[0])
    except BuildError as error:
        warnings.warn(
            f"leto: parity in host memory is computed by numpy, about ten times slower than by compiled code: {error}",
            stacklevel=2,
        )
        return BitslicedBackend()
