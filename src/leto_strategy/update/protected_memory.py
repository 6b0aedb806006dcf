"""Where the pages of one rank's protection lie: state, gradients, undo, and parity on the device and in host memory.

Built by every trainer, also by a shadow over read-only mappings: it writes nothing. Paper, sections 4.1 and 5.2.
"""

from dataclasses import replace

import torch
from torch import Tensor

from leto_strategy.erasure.code import PAGE_QUANTUM_BYTES, ErasureCode
from leto_strategy.erasure.pages import ZERO_PAGE, PageTable
from leto_strategy.erasure.second_tier import TwoTierCode
from leto_strategy.erasures import NUM_DEVICE_BUFFERS, Page, PageKind
from leto_strategy.marks import SHAPE_REGION, WORDS_REGION, ProtectionWords
from leto_strategy.memory.backend import Kind, Region, RegionSpec
from leto_strategy.memory.dlpack import bytes_at
from leto_strategy.memory.pool import ResilientMemoryPool
from leto_strategy.update.layout import StateLayout
from leto_strategy.update.paging import pages_of
from leto_strategy.update.state import RetainedState

FIRST_REGION = "parity/first"
SECOND_REGION = "parity/second"
DEVICE_REGION = "parity/device"
GRADIENT_REGION = "parity/gradients"


class ProtectedMemory:
    """Tables of pages, by group.

    Args:
        layout: A plan with protection groups.
        state: Its tensors.
        pool: Connected pool; regions of parity and words are allocated in it, or found.
    """

    def __init__(self, layout: StateLayout, state: RetainedState, pool: ResilientMemoryPool) -> None:
        assert layout.paging is not None, "the layout has no protection groups"
        assert layout.shape is not None, "the layout has no protection groups"
        self.shape, self.paging = layout.shape, layout.paging
        self._layout, self._state, self._pool = layout, state, pool
        num_groups, num_gradient_groups = len(self.shape.groups), len(self.shape.gradient_groups)
        first, second = self.shape.num_parity, self.shape.num_second
        sizes = {
            FIRST_REGION: (num_groups * first, Kind.PARITY),
            SECOND_REGION: (num_groups * second, Kind.PARITY),
            DEVICE_REGION: (NUM_DEVICE_BUFFERS * first, Kind.RETAINED),
            GRADIENT_REGION: (num_gradient_groups * first, Kind.RETAINED),
        }
        specs = [RegionSpec(name, pages * self.paging.page_bytes, kind) for name, (pages, kind) in sizes.items()]
        specs.append(RegionSpec(WORDS_REGION, ProtectionWords.size_bytes(self.shape), Kind.RECORD))
        self._shape_text = self.shape.to_json().encode()
        specs.append(RegionSpec(SHAPE_REGION, len(self._shape_text), Kind.RECORD))
        regions = dict(zip([*sizes, WORDS_REGION, SHAPE_REGION], pool.allocate(specs), strict=True))
        self._words_region, self._shape_region = regions[WORDS_REGION], regions[SHAPE_REGION]

        code = ErasureCode(1, first, self.paging.page_bytes)
        self.code = TwoTierCode(code, second)
        self.codes = [code.with_num_data(group.num_pages) for group in self.shape.groups]
        self.gradient_codes = [code.with_num_data(group.num_pages) for group in self.shape.gradient_groups]
        self.first = [self._parity(regions[FIRST_REGION], index, first) for index in range(num_groups)]
        self.second = [self._parity(regions[SECOND_REGION], index, second) for index in range(num_groups)]
        self.device = [self._parity(regions[DEVICE_REGION], index, first) for index in range(NUM_DEVICE_BUFFERS)]
        self.gradient_parity = [
            self._parity(regions[GRADIENT_REGION], index, first) for index in range(num_gradient_groups)
        ]
        self.data, self.gradients = self._data(), self._gradients()
        undo = state.undo()
        self.undo = self._table([undo.data_ptr() + k * self.paging.page_bytes for k in range(self.shape.num_undo)])

    def prepare(self) -> None:
        """Load what computes parity and its coefficients, before they are needed; no memory of the rank is read."""
        num_data = max((group.num_pages for group in self.shape.groups), default=1)
        for code in (self.code.first.with_num_data(num_data), self.code.second):
            small = replace(code, page_bytes=PAGE_QUANTUM_BYTES)
            small.encode(PageTable((ZERO_PAGE,) * small.num_data, small.num_words))

    def words(self) -> ProtectionWords:
        """The words, over memory that is writable once the pool is."""
        return ProtectionWords(self._pool.buffer(self._words_region), self.shape)

    def publish_shape(self) -> None:
        """Tell whoever maps the words what they are about."""
        self._pool.buffer(self._shape_region)[:] = self._shape_text

    def address(self, page: Page) -> int:
        """Where a page lies in this process."""
        return self.table(page.kind, page.group).addresses[page.place]

    def table(self, kind: PageKind, group: int) -> PageTable:
        """All pages of one kind of a group, or of a buffer."""
        tables = {
            PageKind.DATA: self.data,
            PageKind.FIRST: self.first,
            PageKind.SECOND: self.second,
            PageKind.DEVICE: self.device,
            PageKind.UNDO: [self.undo],
            PageKind.GRADIENT: self.gradients,
            PageKind.GRADIENT_PARITY: self.gradient_parity,
        }
        return tables[kind][group]

    def content(self, page: Page) -> Tensor:
        """The bytes of a page."""
        on_host = page.kind in (PageKind.FIRST, PageKind.SECOND)
        return bytes_at(self.address(page), self.paging.page_bytes, "cpu" if on_host else self._pool.device)

    def parity_bytes(self, kind: PageKind, group: int) -> Tensor:
        """All parity pages of a group, or of a buffer, as one range."""
        table = self.table(kind, group)
        on_host = kind in (PageKind.FIRST, PageKind.SECOND)
        size_bytes = len(table) * self.paging.page_bytes
        return bytes_at(table.addresses[0], size_bytes, "cpu" if on_host else self._pool.device)

    def _parity(self, region: Region, group: int, num_pages: int) -> PageTable:
        address = self._pool.address(region) + group * num_pages * self.paging.page_bytes
        device = "cpu" if region.spec.kind is Kind.PARITY else self._pool.device
        return self._table([address + k * self.paging.page_bytes for k in range(num_pages)], device)

    def _data(self) -> list[PageTable]:
        chunks = []
        for chunk in self._layout.chunks:
            addresses: list[int] = []
            for span in chunk.spans:
                run = self._layout.runs[span.run]
                for what in run.tensors:
                    start = self._state.run_address(run, what) + span.start * run.dtype.itemsize
                    addresses += self._pages_from(start, span.num_elements * run.dtype.itemsize)
            chunks.append(addresses)
        frozen: list[int] = []
        for dtype in dict.fromkeys(slot.dtype for slot in self._layout.frozen if slot.num_elements):
            end = self._state.arena(f"frozen/{str(dtype).removeprefix('torch.')}")
            frozen += self._pages_from(self._pool.address(end) - end.offset_bytes, end.offset_bytes)
        tables = []
        for group in self.shape.groups:
            addresses = [address for chunk in group.chunks for address in chunks[chunk]]
            if not group.chunks:
                addresses, frozen = frozen[: group.num_pages], frozen[group.num_pages :]
            assert len(addresses) == group.num_pages, f"{len(addresses)} pages in a group of {group.num_pages}"
            tables.append(self._table(addresses))
        assert not frozen, f"{len(frozen)} pages of frozen parameters are in no group"
        return tables

    def _gradients(self) -> list[PageTable]:
        tables = []
        for group in self.shape.gradient_groups:
            addresses: list[int] = []
            for chunk in group.chunks:
                for span in self._layout.chunks[chunk].spans:
                    run = self._layout.runs[span.run]
                    start = self._state.run_address(run, "gradient") + span.start * run.dtype.itemsize
                    addresses += self._pages_from(start, span.num_elements * run.dtype.itemsize)
            assert len(addresses) == group.num_pages, f"{len(addresses)} pages in a group of {group.num_pages}"
            tables.append(self._table(addresses))
        return tables

    def _pages_from(self, address: int, size_bytes: int) -> list[int]:
        return [address + k * self.paging.page_bytes for k in range(pages_of(size_bytes, self.paging))]

    def _table(self, addresses: list[int], device: str | None = None) -> PageTable:
        where = torch.device(self._pool.device if device is None else device)
        return PageTable(tuple(addresses), self.paging.page_bytes // 4, where)
