"""Where a rank keeps the notes of its first step for its shadows, and whether a rehearsal of them went well.

A rehearsal that ends its process is not tried again: the next shadow finds it begun and not ended.
"""

from collections.abc import Iterator

import torch

from leto_strategy.memory.backend import Kind, RegionSpec
from leto_strategy.memory.pool import ResilientMemoryPool
from leto_strategy.strategy.rehearsal.kernels import rehearse

_NOTES = "rehearsal"
_STATE, _LENGTH = 0, 1
_WRITTEN, _BEGUN = 1, 2
_LOOK_AGAIN_SECONDS = 0.1


class RehearsalScript:
    """The notes of one rank.

    Args:
        pool: Its retained memory.
    """

    def __init__(self, pool: ResilientMemoryPool) -> None:
        self._pool = pool
        (region,) = pool.allocate([RegionSpec(_NOTES, 4096, Kind.RECORD)])
        self._words = pool.buffer(region, writable=True).cast("Q")

    def write(self, notes: bytes) -> None:
        """Keep the notes."""
        (region,) = self._pool.allocate([RegionSpec(f"{_NOTES}.{len(notes)}", len(notes), Kind.RECORD)])
        self._pool.buffer(region)[:] = notes
        self._words[_LENGTH] = len(notes)
        self._words[_STATE] = _WRITTEN

    def rehearse(self, device: torch.device) -> Iterator[float]:
        """Wait for the notes and run what they hold; yields for how many seconds something else may be waited for."""
        while self._words[_STATE] == 0:
            yield _LOOK_AGAIN_SECONDS
        if self._words[_STATE] == _BEGUN:
            return
        notes = bytes(self._pool.buffer(self._pool.attach(f"{_NOTES}.{self._words[_LENGTH]}")))
        self._words[_STATE] = _BEGUN
        try:
            for _ in rehearse(notes, device):
                yield 0.0
        finally:  # also when it is ended early; a process that dies does not come here
            self._words[_STATE] = _WRITTEN
