"""What each step of a large model was, bit for bit, without a wait for the device: rows of numbers in a shared file.

A row is written in the order of the device's stream, so that what is in it has happened, and it stays when its writer
is killed. A digest of weights is made of sums of integers, which no order of summation changes.
"""

import mmap
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

_ROW = struct.Struct("<4q")  # step + 1, bits of the loss, digest of sample numbers, digest of weights
STEPS_MAX = 1 << 12


def rows_path(out: Path, rank: int) -> Path:
    """The file of a rank; on a GPU it has to lie in memory (tmpfs), where it can be registered."""
    return out / f"exact.r{rank}.bin"


def read_rows(out: Path, rank: int) -> dict[int, dict[str, Any]]:
    """Steps that are over on the device, and what they were; none where the file is not there."""
    path = rows_path(out, rank)
    if not path.exists() or not path.stat().st_size:
        return {}
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as content:
        rows = list(_ROW.iter_unpack(content[:]))
    return {
        index: {"loss": loss, "ids": ids, "weights": weights}
        for index, (step, loss, ids, weights) in enumerate(rows)
        if step == index + 1
    }


class ExactRows:
    """Writes the rows of this process's rank.

    Args:
        out: Directory of the run.
        rank: The rank.
        on_gpu: Register the file's memory, so that the stream writes to it.
    """

    def __init__(self, out: Path, rank: int, *, on_gpu: bool) -> None:
        import torch

        words = STEPS_MAX * _ROW.size // 8
        self._rows = torch.from_file(str(rows_path(out, rank)), shared=True, size=words, dtype=torch.int64)
        self._rows = self._rows.view(STEPS_MAX, -1)
        if on_gpu:
            error = torch.cuda.cudart().cudaHostRegister(self._rows.data_ptr(), words * 8, 0)
            if int(error):
                raise RuntimeError(f"{rows_path(out, rank)} can't be registered: error {int(error)}")

    def write(self, step: int, loss: "Tensor", ids: "Tensor", parameters: "Iterable[Tensor]") -> None:
        """Let the stream write a row."""
        import torch

        bits = loss.detach().float().view(torch.int32).long()
        row = torch.stack((torch.full_like(bits, step + 1), bits, _weighed(ids), digest(parameters)))
        self._rows[step].copy_(row, non_blocking=True)


def digest(parameters: "Iterable[Tensor]") -> "Tensor":
    """One 64-bit number of the bits of fp32 tensors, and of their order, as a scalar on their device."""
    import torch

    sums = []
    for parameter in parameters:
        bits = parameter.detach().reshape(-1).view(torch.int32)
        sums += [bits.sum(dtype=torch.int64), (bits ^ (bits >> 15)).mul_(0x2C1B3C6D).sum(dtype=torch.int64)]
    return _weighed(torch.stack(sums))


def _weighed(numbers: "Tensor") -> "Tensor":
    import torch

    return (numbers * torch.arange(1, 2 * len(numbers), 2, device=numbers.device)).sum()
