"""Lost memory pages as an injected fault, on the CPU: their bytes are destroyed for all, then the loss is marked.

A memory error takes content and says so at the next access. Host memory can't be made to do the second without root, so
here the mark stands for it: the bytes are gone from the memory that all processes share before it is set, and nothing
but the mark tells a recovery which they were.
"""

import os
import random

import torch

from leto_strategy.erasures import Page, PageKind
from leto_strategy.faults import Loss
from leto_strategy.update.protected_memory import ProtectedMemory


def destroy(memory: ProtectedMemory, loss: Loss) -> list[Page]:
    """Destroy pages at random, and mark them.

    Args:
        memory: Of this rank, writable.
        loss: How many of each group; no more than there are.

    Returns:
        The pages.
    """
    groups = range(len(memory.shape.groups)) if loss.group is None else [loss.group]
    pages: list[Page] = []
    for group in groups:
        if group < len(memory.shape.groups):
            pages += _some(PageKind.DATA, group, memory.shape.groups[group].num_pages, loss.data_pages)
            pages += _some(PageKind.FIRST, group, memory.shape.num_parity, loss.host_pages)
    for page in pages:
        content = memory.content(page)
        content.copy_(torch.frombuffer(bytearray(os.urandom(content.numel())), dtype=torch.uint8))
    memory.words().mark_lost(pages)
    return pages


def _some(kind: PageKind, group: int, num_pages: int, count: int) -> list[Page]:
    places = random.SystemRandom().sample(range(num_pages), min(count, num_pages))
    return [Page(kind, group, place) for place in places]
