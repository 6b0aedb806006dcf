"""`ErasureCode`: encode, update, verify and reconstruct one protection group of pages.

Shapes: D data pages, H parity pages, W words a page, all int32. Leto paper, section 4.3; docs/erasure_code.md.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar, overload

import torch
from torch import Tensor

from leto_strategy.erasure.backend import Backend
from leto_strategy.erasure.backends import backend_for, default_threads
from leto_strategy.erasure.field import FIELD_SIZE, SYMBOL_BYTES
from leto_strategy.erasure.pages import Pages, PageTable, page_table, require_disjoint, require_same_device
from leto_strategy.erasure.solve import checked_indices, solve

Out = TypeVar("Out", Tensor, Sequence[Tensor], PageTable)

PAGE_QUANTUM_BYTES = 4096
NUM_PARITY_MAX = 64


@dataclass(frozen=True)
class ErasureCode:
    """A systematic MDS code over GF(2^32): any H lost pages of D + H, data or parity, can be rebuilt.

    The bytes of the parity depend on data, D, H and the place of each page alone, never on the backend. A group with
    fewer pages has the same bytes as one whose further pages are zeros (`with_num_data`).

    Args:
        num_data: Data pages of a group, D.
        num_parity: Parity pages, H, 1 to 64. With 16 and with 1 there are fast ways; others cost H products a word.
        page_bytes: Size of a page, a multiple of 4096.

    Raises:
        ValueError: A number is out of range; the message names it.
    """

    num_data: int = 1024
    num_parity: int = 16
    page_bytes: int = 2 << 20

    def __post_init__(self) -> None:
        if not 1 <= self.num_parity <= NUM_PARITY_MAX:
            raise ValueError(f"num_parity must lie in 1 to {NUM_PARITY_MAX}, got {self.num_parity}")
        if not 1 <= self.num_data <= FIELD_SIZE - self.num_parity:
            raise ValueError(f"num_data must be positive and leave a point for each page, got {self.num_data}")
        if self.page_bytes <= 0 or self.page_bytes % PAGE_QUANTUM_BYTES:
            raise ValueError(f"page_bytes must be a positive multiple of {PAGE_QUANTUM_BYTES}, got {self.page_bytes}")

    @property
    def num_words(self) -> int:
        """Words of a page, W."""
        return self.page_bytes // SYMBOL_BYTES

    def with_num_data(self, num_data: int) -> "ErasureCode":
        """The code of a group with another number of data pages, such as the ragged last one."""
        return replace(self, num_data=num_data)

    @overload
    def encode(
        self, data_DW: Pages, *, out: None = None, threads: int | None = None, backend: Backend | None = None
    ) -> Tensor: ...

    @overload
    def encode(
        self, data_DW: Pages, *, out: Out, threads: int | None = None, backend: Backend | None = None
    ) -> Out: ...

    def encode(
        self, data_DW: Pages, *, out: Pages | None = None, threads: int | None = None, backend: Backend | None = None
    ) -> Pages:
        """Compute the parity.

        Args:
            data_DW: All data pages (`pages.Pages`).
            out: Where the parity goes; None: a new tensor [H, W].
            threads: Cores to use; None: all of this process.
            backend: None: the fastest one for the device.

        Returns:
            `out`.

        Raises:
            ValueError: Pages have a wrong shape, dtype, layout or device, or `out` overlaps what is read.
        """
        data = self._table(data_DW, self.num_data, "data")
        out = self._empty_parity(data.device) if out is None else out
        written = self._table(out, self.num_parity, "out")
        self._run(written, range(self.num_data), data, None, None, threads, backend)
        return out

    @overload
    def update(
        self,
        parity_HW: Pages,
        *,
        indices: Iterable[int],
        new: Pages,
        old: Pages | None = None,
        out: None = None,
        threads: int | None = None,
        backend: Backend | None = None,
    ) -> Tensor: ...

    @overload
    def update(
        self,
        parity_HW: Pages,
        *,
        indices: Iterable[int],
        new: Pages,
        old: Pages | None = None,
        out: Out,
        threads: int | None = None,
        backend: Backend | None = None,
    ) -> Out: ...

    def update(
        self,
        parity_HW: Pages,
        *,
        indices: Iterable[int],
        new: Pages,
        old: Pages | None = None,
        out: Pages | None = None,
        threads: int | None = None,
        backend: Backend | None = None,
    ) -> Pages:
        """Bring the parity up to date after some data pages have changed, from those pages alone.

        Args:
            parity_HW: The parity of the old content.
            indices: Which data pages changed, each once, ascending.
            new: Their content now; with `old` None, the XOR of the content before and now.
            old: Their content before.
            out: Where the new parity goes; None: a new tensor. May be `parity_HW` itself. Never so in a transaction:
                a failure in the middle would leave neither the old parity nor the new one.
            threads: Cores to use; None: all of this process.
            backend: None: the fastest one for the device.

        Returns:
            `out`.

        Raises:
            ValueError: As `encode`; or indices are out of range, twice there or not ascending.
        """
        changed = tuple(indices)
        if checked_indices(changed, self.num_data, "indices") != changed:
            raise ValueError(f"indices must ascend, got {list(changed)}")
        base = self._table(parity_HW, self.num_parity, "parity")
        new_pages = self._table(new, len(changed), "new")
        old_pages = None if old is None else self._table(old, len(changed), "old")
        out = self._empty_parity(base.device) if out is None else out
        written = self._table(out, self.num_parity, "out")
        self._run(written, changed, new_pages, old_pages, base, threads, backend)
        return out

    def verify(
        self, data_DW: Pages, parity_HW: Pages, *, threads: int | None = None, backend: Backend | None = None
    ) -> tuple[int, ...]:
        """Compare the parity with the data.

        Returns:
            The parity pages that differ from what `encode` would make; none if all is well. One corrupt data page
            makes all H differ, one corrupt parity page only itself.

        Raises:
            ValueError: As `encode`.
        """
        data = self._table(data_DW, self.num_data, "data")
        parity = self._table(parity_HW, self.num_parity, "parity")
        differs = torch.zeros(self.num_parity, dtype=torch.bool, device=data.device)
        for start, stop, scratch_HW in self._strips(data, backend):
            written = self._table_of_strip(scratch_HW)
            pages, base = data.words(start, stop), parity.words(start, stop)
            self._run(written, range(self.num_data), pages, None, base, threads, backend)
            differs |= (scratch_HW != 0).any(dim=1)
        return tuple(row for row, wrong in enumerate(differs.tolist()) if wrong)

    def reconstruct(
        self,
        data_DW: Pages,
        parity_HW: Pages,
        *,
        lost_data: Iterable[int] = (),
        lost_parity: Iterable[int] = (),
        threads: int | None = None,
        backend: Backend | None = None,
    ) -> None:
        """Rebuild lost pages in place. What the tables hold at the lost places is overwritten and never read.

        Args:
            data_DW: All data pages, with fresh memory at the lost ones.
            parity_HW: All parity pages, with fresh memory at the lost ones.
            lost_data: Lost data pages.
            lost_parity: Lost parity pages.
            threads: Cores to use; None: all of this process.
            backend: None: the fastest one for the device.

        Raises:
            TooManyErasures: More than H pages are lost. Nothing was written.
            ValueError: As `encode`; or indices are out of range or twice there.
        """
        solution = solve(lost_data, lost_parity, num_data=self.num_data, num_parity=self.num_parity)
        data = self._table(data_DW, self.num_data, "data")
        parity = self._table(parity_HW, self.num_parity, "parity")
        device = require_same_device([data, parity])
        chosen = backend or backend_for(device)
        lost_pages = data.select(solution.lost_data), parity.select(solution.lost_parity)
        lost = PageTable(lost_pages[0].addresses + lost_pages[1].addresses, self.num_words, device, lost_pages)
        if not lost.addresses:
            return
        data, parity = data.blanked(solution.lost_data), parity.blanked(solution.lost_parity)
        require_disjoint(lost, [data, parity], "a lost page")
        for start, stop, scratch_HW in self._strips(data, chosen):
            written = self._table_of_strip(scratch_HW)
            pages, base = data.words(start, stop), parity.words(start, stop)
            self._run(written, range(self.num_data), pages, None, base, threads, chosen)
            syndromes = written.select(solution.syndrome_rows)
            rebuilt = lost.words(start, stop)
            chosen.combine(rebuilt, matrix=solution.matrix, pages=syndromes, threads=threads or default_threads())

    def _run(
        self,
        out: PageTable,
        indices: Iterable[int],
        new: PageTable,
        old: PageTable | None,
        base: PageTable | None,
        threads: int | None,
        backend: Backend | None,
    ) -> None:
        sources = [table for table in (new, old) if table is not None]
        device = require_same_device([out, *sources, *([base] if base else [])])
        chosen = backend or backend_for(device)
        # Parity may be updated where it lies; otherwise it must not be touched.
        bases = [] if base is None or base.addresses == out.addresses else [base]
        require_disjoint(out, [*sources, *bases], "out")
        chosen.parity(out, indices=tuple(indices), new=new, old=old, base=base, threads=threads or default_threads())

    def _table(self, pages: Pages, num_pages: int, name: str) -> PageTable:
        return page_table(pages, num_pages=num_pages, num_words=self.num_words, name=name)

    def _table_of_strip(self, scratch_HW: Tensor) -> PageTable:
        num_pages, num_words = scratch_HW.shape
        return page_table(scratch_HW, num_pages=num_pages, num_words=num_words, name="scratch")

    def _empty_parity(self, device: torch.device) -> Tensor:
        return torch.empty((self.num_parity, self.num_words), dtype=torch.int32, device=device)

    def _strips(self, data: PageTable, backend: Backend | None) -> Iterator[tuple[int, int, Tensor]]:
        """Ranges of words, each with scratch for the parity of that range, which the next one uses again."""
        width = min(self.num_words, (backend or backend_for(data.device)).strip_words)
        scratch_HW = torch.empty((self.num_parity, width), dtype=torch.int32, device=data.device)
        for start in range(0, self.num_words, width):
            stop = min(start + width, self.num_words)
            yield start, stop, scratch_HW[:, : stop - start]
