"""Tensors that share a version counter: one number tells whether any of them was written.

Every write in place through torch raises a tensor's counter. A detached alias shares the counter of the tensor that it
came from, and keeps it when it is given other data; so any number of unrelated tensors can be made to share one.
"""

import torch
from torch import Tensor


class SharedVersion:
    """One version counter for many tensors."""

    def __init__(self) -> None:
        self._origins: dict[torch.device, Tensor] = {}  # a tensor can't be given data of another device

    def alias(self, tensor: Tensor) -> Tensor:
        """Return another tensor over the same storage, whose writes raise this counter instead of `tensor`'s."""
        origin = self._origins.setdefault(tensor.device, torch.empty(0, device=tensor.device))
        shared = origin.detach()
        shared.data = tensor
        return shared

    @property
    def number(self) -> int:
        """The counter; equal to an earlier one where nothing was written since: each device's only grows."""
        return sum([origin._version for origin in self._origins.values()])
