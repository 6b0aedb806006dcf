"""Where kernels are checked and what they are given: a GPU, or the CPU with Triton's interpreter."""

from dataclasses import dataclass

import torch
from torch import Tensor

from leto_strategy.erasure.generator import generator
from leto_strategy.triton_kernels.pages import PageTable

POISON = 0x5AA5C33C


@dataclass(frozen=True)
class Place:
    """A device and the size of pages there."""

    device: torch.device
    words: int = 1024

    def random_words(self, *shape: int) -> Tensor:
        """Random int32 pages, with words of ones and zeros among them."""
        words = torch.randint(-(2**31), 2**31, (*shape, self.words), dtype=torch.int64, device=self.device)
        words[..., 0], words[..., 1] = -1, 0
        return words.to(torch.int32)

    def poisoned(self, *shape: int) -> Tensor:
        """Scratch pages that no kernel may leave as they are."""
        return torch.full((*shape, self.words), POISON, dtype=torch.int32, device=self.device)

    def matrix(self, num_data: int, num_parity: int, *, first: int = 0) -> Tensor:
        """Rows of the generator matrix on the device."""
        return generator(first + num_data, num_parity)[first:].contiguous().to(self.device)


def table(tensor: Tensor) -> PageTable:
    """The pages that the rows of a tensor are."""
    return PageTable.of_tensor(tensor, page_bytes=tensor.shape[1] * tensor.element_size())
