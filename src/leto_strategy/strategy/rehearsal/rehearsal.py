"""A rank's rehearsals: the active trainer notes its first step, its shadows run what was noted."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from leto_strategy.memory.pool import ResilientMemoryPool
from leto_strategy.strategy.flavour import Flavour
from leto_strategy.strategy.rehearsal.host import rehearse_device, rehearse_host
from leto_strategy.strategy.rehearsal.kernels import KernelNotes
from leto_strategy.strategy.rehearsal.script import RehearsalScript


class Rehearsal:
    """See the module.

    Args:
        pool: The rank's retained memory.
        module: The model. A compiled one is not noted: what the compiler sees would not be what runs later.
        wanted: Note and rehearse kernels, where there is a GPU.
    """

    def __init__(self, pool: ResilientMemoryPool, module: nn.Module, *, wanted: bool) -> None:
        self._device = torch.device(pool.device)
        self._script = RehearsalScript(pool) if wanted and pool.on_device and not _is_compiled(module) else None

    @contextmanager
    def noting(self, step: int) -> Iterator[None]:
        """Around everything of a step that runs kernels; only the very first step is noted."""
        if self._script is None or step > 0:
            yield
            return
        with KernelNotes() as notes:
            yield
        self._script.write(notes.to_bytes())

    def work(self, flavour: Flavour) -> Iterator[float]:
        """What a shadow does at its gate; yields seconds for which it may wait for something else."""
        rehearse_host(flavour)
        yield 0.0
        if self._device.type == "cuda":
            rehearse_device(self._device)
            yield 0.0
        if self._script is not None:
            yield from self._script.rehearse(self._device)


def _is_compiled(module: nn.Module) -> bool:
    return any(
        type(part).__name__ == "OptimizedModule" or getattr(part, "_compiled_call_impl", None) is not None
        for part in module.modules()
    )
