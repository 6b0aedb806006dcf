"""Numbers and flags that say which tiles of a chunk were saved (T7, T8).

A flag holds the number of the update that last saved its tile. Numbers come from a retained counter, are never 0 and
never given out twice, so a flag that is left over, or was zeroed with its page, says nothing about a later update.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

NUMBER_MAX = 2**63 - 1


@dataclass(frozen=True, eq=False)
class TileFlags:
    """Two copies of the tiles' flags, on different pages; zeroed at allocation and when remapped, never lent.

    Args:
        flags: int64, at least one for each tile.
        other_flags: The other copy, of the same size.

    Raises:
        ValueError: Shape, type or device differ.
    """

    flags: Tensor
    other_flags: Tensor

    def __post_init__(self) -> None:
        for name, tensor in (("flags", self.flags), ("other_flags", self.other_flags)):
            if tensor.dtype != torch.int64 or tensor.dim() != 1 or not tensor.is_contiguous():
                raise ValueError(f"{name} must be contiguous int64 of one dimension")
        if self.flags.shape != self.other_flags.shape or self.flags.device != self.other_flags.device:
            raise ValueError("flags and other_flags must have one size and device")

    def check(self, num_tiles: int, number: int, device: torch.device) -> None:
        """Check that these flags can say that `number` saved some of `num_tiles`.

        Raises:
            ValueError: There are too few, they are elsewhere, or the number can't be one.
        """
        if self.flags.numel() < num_tiles or self.flags.device != device:
            raise ValueError(f"flags must be {num_tiles} or more on {device}, not {self.flags.numel()}")
        if not 0 < number <= NUMBER_MAX:
            raise ValueError(f"number must be positive and below 2^63, not {number}")


class TileNumbers:
    """The counter that numbers come from, kept in retained host memory, in two copies.

    Args:
        counter: int64 [2] on the CPU, zeros when it is new. Whatever crashes, no number is given out twice: both
            copies are stored before a number is known to anybody, and the larger one counts.

    Raises:
        ValueError: Shape, type or device differ.
    """

    def __init__(self, counter: Tensor) -> None:
        if counter.shape != (2,) or counter.dtype != torch.int64 or counter.device.type != "cpu":
            raise ValueError("counter must be int64 [2] in host memory")
        self._counter = counter

    def next(self) -> int:
        """A number that was never given out.

        Raises:
            OverflowError: All 2^63 - 1 are used.
        """
        number = int(self._counter.max()) + 1
        if number > NUMBER_MAX:
            raise OverflowError("the counter of tile numbers is at its end")
        self._counter[0] = number
        self._counter[1] = number
        return number
