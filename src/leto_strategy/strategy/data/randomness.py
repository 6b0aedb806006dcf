"""Seeds that follow from a state without drawing from it, and fetches that draw from a stream of their own."""

import random
from types import TracebackType
from typing import Any

import numpy
import torch

from leto_strategy.strategy.capture.rng import RngState

_MASK = (1 << 64) - 1


def mix(seed: int, number: int) -> int:
    """A well spread 64-bit seed (the finaliser of SplitMix64)."""
    value = (seed + (number + 1) * 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def seed_of(rng: RngState, generator: torch.Generator | None = None) -> int:
    """A seed that follows from a random state without drawing from it.

    Args:
        rng: The global state.
        generator: Where a loader has a generator of its own: that one decides, as it does for torch's workers.
    """
    state = rng[0] if generator is None else generator.get_state().numpy().tobytes()
    words = state[:64] + state[-64:]
    seed = 0
    for k in range(0, len(words), 8):
        seed = mix(seed ^ int.from_bytes(words[k : k + 8], "little"), k)
    return seed


def seed_worker(seed: int) -> None:
    """Seed the global generators of a worker process."""
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed & 0xFFFFFFFF)


class OwnStream:
    """Inside, the global generators of torch, `random` and NumPy are a stream that starts at `seed`; then as before."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def __enter__(self) -> None:
        self._kept: tuple[Any, Any, Any] = (
            torch.default_generator.get_state(),
            random.getstate(),
            numpy.random.get_state(),
        )
        torch.default_generator.manual_seed(self._seed)
        random.seed(self._seed)
        numpy.random.seed(self._seed & 0xFFFFFFFF)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        torch_state, python_state, numpy_state = self._kept
        torch.default_generator.set_state(torch_state)
        random.setstate(python_state)
        numpy.random.set_state(numpy_state)
