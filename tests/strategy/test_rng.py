"""The random state: what follows a restore is what followed the capture, for every generator and every spare number."""

import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch

from leto_strategy.strategy.capture.packing import pack, unpack
from leto_strategy.strategy.capture.rng import _numpy, _python, capture_rng, restore_rng

DRAWS: dict[str, Callable[[], Any]] = {
    "torch": lambda: torch.rand(3).tolist(),
    "torch normal": lambda: torch.randn(1).item(),
    "random": random.random,
    "random gauss": lambda: random.gauss(0, 1),
    "numpy": lambda: numpy.random.rand(3).tolist(),
    "numpy normal": lambda: numpy.random.randn(),
    "shuffle": lambda: random.sample(range(50), 10),
}


def test_the_raw_memory_of_both_generators_is_found() -> None:
    """Else every step reads them the slow way: still right, but measurable."""
    assert _python._memory() is not None
    assert _numpy._memory() is not None


def test_looking_for_the_memory_leaves_the_generator_as_it_was() -> None:
    from leto_strategy.strategy.capture.rng import _numpy_memory

    numpy.random.seed(3)
    numpy.random.randn()  # leaves a spare normal variate
    before = numpy.random.get_state()
    _numpy_memory()
    assert repr(numpy.random.get_state()) == repr(before)


@pytest.mark.parametrize("seed", range(20))
def test_what_follows_a_restore_is_what_followed_the_capture(seed: int, pytestconfig: pytest.Config) -> None:
    plan = random.Random(pytestconfig.getoption("seed") * 100 + seed)
    names = sorted(DRAWS)
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed), random.seed(seed), numpy.random.seed(seed)
    for _ in range(plan.randrange(6)):
        DRAWS[plan.choice(names)]()
        capture_rng([generator])  # remembers, and must forget at the next draw
    state = unpack(pack(capture_rng([generator])))
    order = [plan.choice(names) for _ in range(8)]
    first = [DRAWS[name]() for name in order] + torch.rand(2, generator=generator).tolist()
    restore_rng(state, [generator])
    assert [DRAWS[name]() for name in order] + torch.rand(2, generator=generator).tolist() == first


def test_a_spare_normal_variate_alone_is_noticed() -> None:
    """The second of a pair leaves words and position of the generator untouched."""
    for draw in (DRAWS["numpy normal"], DRAWS["random gauss"]):
        draw()
        capture_rng()
        draw()
        state = capture_rng()
        following = draw()
        restore_rng(state)
        assert draw() == following
