"""The pages of a chunk: state, gradients, undo copies, and where new moments and the working copy go."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from leto_strategy.triton_kernels import _chunk_update_kernels as kernels
from leto_strategy.triton_kernels.factors import BLOCK_PAGES
from leto_strategy.triton_kernels.pages import WHOLE, PageTable, check_pages


@dataclass(frozen=True, eq=False)
class ChunkPages:
    """The pages of a chunk, column by column; all columns have as many pages.

    Args:
        param: Parameters, fp32.
        exp_avg: First moments, fp32.
        exp_avg_sq: Second moments, fp32.
        grad: Gradients of the parameters of each page: fp32 pages, or bf16 ones of half the size.
        undo_param: Undo copies of `param`.
        undo_exp_avg: Undo copies of `exp_avg`; None where the moments rotate.
        undo_exp_avg_sq: Undo copies of `exp_avg_sq`; likewise.
        exp_avg_out: Where the new first moments go. None: in place, and undo copies are needed. Else the old moments
            stay as they are and are their own undo copy.
        exp_avg_sq_out: Likewise.
        copy: bf16 working copy of the parameters, pages of half the size, or None.

    Raises:
        ValueError: A column does not fit `param`, columns overlap, or half of a rotation is given.
    """

    param: PageTable
    exp_avg: PageTable
    exp_avg_sq: PageTable
    grad: PageTable
    undo_param: PageTable
    undo_exp_avg: PageTable | None = None
    undo_exp_avg_sq: PageTable | None = None
    exp_avg_out: PageTable | None = None
    exp_avg_sq_out: PageTable | None = None
    copy: PageTable | None = None
    page_rows: Tensor = field(init=False, repr=False)
    """A row of the kernels' table for each page triple that is there."""
    block_rows: Tensor | None = field(init=False, repr=False)
    """A row for each triple of blocks; None where a block is not whole, or its pages are not back to back."""

    def __post_init__(self) -> None:
        missing = self.param.missing()
        for name, table in self.columns():
            half = name in ("grad", "copy") and table.page_bytes * 2 == self.param.page_bytes
            if not half or table.device != self.param.device:
                check_pages(table, name, like=self.param, whole=False)
            if table.num_pages != self.param.num_pages or table.missing() != missing:
                raise ValueError(f"{name} must have the pages that param has")
        rotation = (self.exp_avg_out, self.exp_avg_sq_out)
        if (rotation[0] is None) != (rotation[1] is None):
            raise ValueError("exp_avg_out and exp_avg_sq_out must be given together")
        if rotation[0] is None and (self.undo_exp_avg is None or self.undo_exp_avg_sq is None):
            raise ValueError("undo_exp_avg and undo_exp_avg_sq are needed where the moments are updated in place")
        if self.copy is not None and self.copy.page_bytes * 2 != self.param.page_bytes:
            raise ValueError("copy must have pages of half the size of param's: it is bf16")
        _check_apart(self.columns())
        object.__setattr__(self, "page_rows", self._rows(blocks=False))
        whole = all(table.layout == WHOLE for _, table in self.columns())
        object.__setattr__(self, "block_rows", self._rows(blocks=True) if whole else None)

    @property
    def rotates(self) -> bool:
        """The new moments go elsewhere."""
        return self.exp_avg_out is not None

    @cached_property
    def change(self) -> tuple[PageTable, PageTable]:
        """Old and new pages of all three columns one after the other, each filled up to whole blocks."""
        return self._change(filled=True)

    @cached_property
    def change_unfilled(self) -> tuple[PageTable, PageTable]:
        """The same, with nothing between the columns."""
        return self._change(filled=False)

    def _change(self, *, filled: bool) -> tuple[PageTable, PageTable]:
        old_avg, old_sq = (self.exp_avg, self.exp_avg_sq) if self.rotates else (self.undo_exp_avg, self.undo_exp_avg_sq)
        new_avg, new_sq = self.exp_avg_out or self.exp_avg, self.exp_avg_sq_out or self.exp_avg_sq
        tables = []
        for columns in ((self.undo_param, old_avg, old_sq), (self.param, new_avg, new_sq)):
            addresses: list[int] = []
            for column in columns:
                assert column is not None, "checked when the chunk was made"
                addresses += column.addresses
                addresses += [0] * (-len(addresses) % BLOCK_PAGES if filled else 0)
            tables.append(
                PageTable.of_addresses(
                    addresses, page_bytes=self.param.page_bytes, device=self.param.device, owner=columns
                )
            )
        return tables[0], tables[1]

    def columns(self) -> list[tuple[str, PageTable]]:
        """Name and table of each column that is given."""
        names = (
            "param", "exp_avg", "exp_avg_sq", "exp_avg_out", "exp_avg_sq_out", "undo_param", "undo_exp_avg",
            "undo_exp_avg_sq", "grad", "copy",
        )  # fmt: skip
        return [(name, table) for name in names if (table := getattr(self, name)) is not None]

    def _rows(self, *, blocks: bool) -> Tensor:
        """One row a page triple, or a triple of blocks, in the order of columns that the kernels know."""
        columns = [
            self.param, self.exp_avg, self.exp_avg_sq, self.exp_avg_out or self.exp_avg,
            self.exp_avg_sq_out or self.exp_avg_sq, self.undo_param, self.undo_exp_avg, self.undo_exp_avg_sq, self.grad,
            self.copy,
        ]  # fmt: skip
        number = self.param.num_blocks if blocks else self.param.num_pages
        rows = torch.zeros((number, kernels.ROW.value), dtype=torch.int64, device=self.param.device)
        for column, table in enumerate(columns):
            if table is not None:
                rows[:, column] = table.bases if blocks else table.pages[:number]
        return rows if blocks else rows[rows[:, 0] != 0].contiguous()


def _check_apart(columns: Sequence[tuple[str, PageTable]]) -> None:
    taken = sorted(
        (address, address + table.page_bytes, name) for name, table in columns for address in table.addresses if address
    )
    for (_, end, first), (start, _, second) in pairwise(taken):
        if start < end:
            raise ValueError(f"pages of {first} and {second} overlap")
