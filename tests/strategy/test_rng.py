"""The random state: what follows a restore is what followed the capture, for every generator and every spare number."""

import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch

from leto_strategy.strategy.capture.packing import pack, unpack
from leto_strategy.strategy.capture.rng import _numpy, _python, _torch, capture_rng, restore_rng

DRAWS: dict[str, Callable[[], Any]] = {
    "torch": lambda: torch.rand(3).tolist(),
    "torch normal": lambda: torch.randn(1).item(),
    "torch normal of double precision": lambda: torch.randn(1, dtype=torch.float64).item(),
    "torch normal in place": lambda: torch.empty(3).normal_().tolist(),
    "random": random.random,
    "random gauss": lambda: random.gauss(0, 1),
    "numpy": lambda: numpy.random.rand(3).tolist(),
    "numpy normal": lambda: numpy.random.randn(),
    "shuffle": lambda: random.sample(range(50), 10),
}


def test_the_raw_memory_of_all_generators_is_found() -> None:
    """Else every step reads them the slow way: still right, but measurable."""
    assert _torch._memory() is not None
    assert _python._memory() is not None
    assert _numpy._memory() is not None


def test_looking_for_the_memory_leaves_the_generator_as_it_was() -> None:
    from leto_strategy.strategy.capture.rng import _numpy_memory, _torch_memory

    numpy.random.seed(3)
    numpy.random.randn(), torch.randn(1)  # leave a spare normal variate
    before, of_torch = numpy.random.get_state(), torch.get_rng_state()
    _numpy_memory(), _torch_memory()
    assert repr(numpy.random.get_state()) == repr(before)
    assert torch.equal(torch.get_rng_state(), of_torch)


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
    for name in ("numpy normal", "random gauss", "torch normal", "torch normal of double precision"):
        draw = DRAWS[name]
        draw()
        capture_rng()
        draw()
        state = capture_rng()
        following = draw()
        restore_rng(state)
        assert draw() == following


def test_a_state_that_is_set_is_noticed() -> None:
    """Also one that differs from the last in a single place: a word that comes late, or the seed."""
    torch.manual_seed(1)
    state = torch.get_rng_state()
    for place in (0, 24 + 623 * 8, 24):
        capture_rng()
        other = state.clone()
        other[place] ^= 1
        torch.set_rng_state(other)
        assert capture_rng()[0] == torch.get_rng_state().numpy().tobytes() == other.numpy().tobytes()


@pytest.mark.parametrize("kind", ["MT19937", "PCG64", "Philox"])
def test_a_bit_generator_that_the_script_has_set_is_carried(kind: str) -> None:
    before = numpy.random.get_bit_generator()
    saved = numpy.random.get_state(legacy=False)
    try:
        _numpy.state()  # what was remembered is of the old one
        numpy.random.set_bit_generator(getattr(numpy.random, kind)(5))
        numpy.random.rand(3)
        captured = unpack(pack(capture_rng()))
        expected = numpy.random.rand(4).tolist()
        assert pack(capture_rng()[2]) != pack(captured[2]), "a draw shows"
        numpy.random.set_bit_generator(before)  # another process begins with NumPy's own
        restore_rng(captured)
        assert numpy.random.rand(4).tolist() == expected
    finally:
        numpy.random.set_bit_generator(before)
        numpy.random.set_state(saved)
