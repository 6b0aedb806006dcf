"""What is stored by the host on the CPU and by the stream on a GPU, and a fault that only a GPU's stream can have."""

from collections.abc import Callable

import torch

from leto_strategy.memory.backend import Region
from leto_strategy.memory.pool import ResilientMemoryPool
from leto_strategy.progress import ProgressPage
from leto_strategy.update.words import HostWords, StreamWords, Words

_TRAP = b""".version 7.0
.target sm_80
.address_size 64
.visible .entry leto_trap() { trap; }
"""


def words_of(page: ProgressPage, pool: ResilientMemoryPool, region: Region) -> Words:
    """How this rank publishes its words.

    Args:
        page: The rank's progress page.
        pool: Its retained memory.
        region: Where the page lies.
    """
    if pool.driver is None:
        return HostWords(page)
    return StreamWords(page, pool.address(region), pool.driver, torch.device(pool.device))


def trap_of(pool: ResilientMemoryPool) -> Callable[[], None] | None:
    """Puts a kernel of one instruction, a trap, into the stream: memory stays as what came before it has left it."""
    driver = pool.driver
    if driver is None:
        return None
    return lambda: driver.launch(_TRAP, b"leto_trap", torch.cuda.current_stream(pool.device).cuda_stream)
