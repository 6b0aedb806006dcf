"""How the global random generators begin: in all trainers of a script as in the user's process.

A script that seeds nothing draws its data and networks from generators that the operating system has seeded. Each
trainer runs that script again; were it to draw others, the one that takes over would train on other data.
What torch and numpy draw is also what the user's process has drawn; `random` may differ there, because modules that are
imported ahead of the script have drawn from it. Only generators whose module is loaded are looked at.
"""

import sys
from collections.abc import Callable
from typing import Any

_RANK_STRIDE = 0x9E3779B97F4A7C15
_HASH_SEEDS = 1 << 32

Beginnings = dict[str, Any]
"""State by module; of torch the seed, since nothing has been drawn from it yet."""

_noted: Beginnings = {}


def begin(wanted: Beginnings | None, *, rank: int) -> None:
    """Note how the generators begin here, or let them begin as `wanted`; a module is looked at once, when it is there.

    Args:
        wanted: What `beginnings` returned in the user's process, in a trainer; None in other processes.
        rank: The trainer's rank. Only rank 0 draws the same numbers as the user's process: as with processes that are
            started one by one, ranks differ where nothing is seeded.
    """
    for name, generator in _GENERATORS.items():
        module = sys.modules.get(name)
        if module is None or name in _noted:
            continue
        read, restore, seed = generator
        if wanted is None:
            _noted[name] = read(module)
            continue
        _noted[name] = wanted.get(name)
        if rank == 0 and name in wanted:
            restore(module, wanted[name])
        else:
            seed(module, (wanted["torch"] + rank * _RANK_STRIDE) % (1 << 63))


def beginnings() -> Beginnings:
    """How they began in this process."""
    return dict(_noted)


def hash_seed() -> str:
    """A value of PYTHONHASHSEED for all trainers: sets of strings have the same order in all of them."""
    return str(_noted["torch"] % (_HASH_SEEDS - 1) + 1)


def seed_anew() -> None:
    """In a forked process: seed them from the operating system, as a new interpreter has them, and forget what was."""
    _noted.clear()
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.seed()
    # `random` seeds itself after a fork.


_Generator = tuple[Callable[[Any], Any], Callable[[Any, Any], None], Callable[[Any, int], None]]
_GENERATORS: dict[str, _Generator] = {
    "random": (
        lambda module: module.getstate(),
        lambda module, state: module.setstate(state),
        lambda module, seed: module.seed(seed),
    ),
    "numpy": (
        lambda module: module.random.get_state(),
        lambda module, state: module.random.set_state(state),
        lambda module, seed: module.random.seed(seed % _HASH_SEEDS),
    ),
    "torch": (
        lambda module: module.default_generator.initial_seed(),
        lambda module, seed: module.default_generator.manual_seed(seed),
        lambda module, seed: module.default_generator.manual_seed(seed),
    ),
}
