"""Random pages, and patterns of lost ones."""

import random

import torch
from torch import Tensor

POISON = 0x5A5A5A5B


def random_pages(num_pages: int, num_words: int, rng: random.Random) -> Tensor:
    """int32 [num_pages, num_words], all bits random."""
    if num_pages == 0:
        return torch.zeros((0, num_words), dtype=torch.int32)
    data = rng.randbytes(4 * num_pages * num_words)
    return torch.frombuffer(bytearray(data), dtype=torch.int32).view(num_pages, num_words)


def split_points(points: list[int], num_parity: int) -> tuple[list[int], list[int]]:
    """Points of a code word as indices of data pages and of parity pages."""
    return [point - num_parity for point in points if point >= num_parity], [p for p in points if p < num_parity]
