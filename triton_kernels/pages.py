"""Where the pages are that a kernel reads or writes: tables of addresses, checked once when they are made.

A page is a multiple of 4 KiB and aligned to 16 bytes. Address 0 stands for a page that is not there: it reads as zeros.
Blocks of 16 pages that lie back to back are recognised, since kernels need one address instead of 16 for such a block.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from leto_strategy.triton_kernels.factors import BLOCK_PAGES

PAGE_BYTES_UNIT = 4096
HALF_PAGE_BYTES_UNIT = 2048
"""Of the pages with bf16 elements that belong to a page of fp32 ones."""

ALIGNMENT_BYTES = 16

SCATTERED, PARTIAL, WHOLE = 0, 1, 2
"""Layouts of a table's blocks: pages anywhere; back to back, some missing; back to back and complete."""


@dataclass(frozen=True, eq=False)
class PageTable:
    """Addresses of pages in order. Make one with `of_tensor`, `of_tensors` or `of_addresses`.

    Whoever makes a table from addresses keeps the memory alive and in place while the table is used.
    """

    page_bytes: int
    addresses: tuple[int, ...]
    device: torch.device
    layout: int
    pages: Tensor
    """Addresses, int64 [16 * num_blocks], 0 from `num_pages` on."""
    bases: Tensor
    """Address of each block's first page, int64 [num_blocks]; meaningless when SCATTERED."""
    present: Tensor
    """Bit i of a block: its page i is there; int64 [num_blocks]."""
    extents: tuple[tuple[int, int], ...]
    """Ranges of bytes that the pages take, sorted."""
    owner: Any = field(default=None, repr=False)

    @classmethod
    def of_addresses(
        cls, addresses: Sequence[int], *, page_bytes: int, device: torch.device | str, owner: Any = None
    ) -> "PageTable":
        """Pages at byte addresses of a device, 0 for one that is not there.

        Raises:
            ValueError: `addresses` is empty or not aligned, or `page_bytes` is not a multiple of 2 KiB.
        """
        if page_bytes <= 0 or page_bytes % HALF_PAGE_BYTES_UNIT:
            raise ValueError(f"page_bytes must be a multiple of {HALF_PAGE_BYTES_UNIT}, not {page_bytes}")
        if not addresses:
            raise ValueError("addresses must name at least one page")
        if any(address % ALIGNMENT_BYTES or address < 0 for address in addresses):
            raise ValueError(f"addresses must be multiples of {ALIGNMENT_BYTES}")
        padded = [*addresses, *[0] * (-len(addresses) % BLOCK_PAGES)]
        blocks = [padded[start : start + BLOCK_PAGES] for start in range(0, len(padded), BLOCK_PAGES)]
        bases = [_base(block, page_bytes) for block in blocks]
        present = [sum((address != 0) << i for i, address in enumerate(block)) for block in blocks]
        if None in bases:
            layout = SCATTERED
        else:
            layout = WHOLE if all(bits == (1 << BLOCK_PAGES) - 1 for bits in present) else PARTIAL
        rows = torch.tensor([*padded, *(base or 0 for base in bases), *present], dtype=torch.int64).to(device)
        pages, bases_B, present_B = rows.split([len(padded), len(blocks), len(blocks)])
        extents = _extents(addresses, page_bytes)
        return cls(page_bytes, tuple(addresses), rows.device, layout, pages, bases_B, present_B, extents, owner)

    @classmethod
    def of_tensor(cls, tensor: Tensor, *, page_bytes: int) -> "PageTable":
        """The pages of a contiguous tensor, back to back.

        Raises:
            ValueError: `tensor` is not contiguous, or not a whole number of pages.
        """
        size = tensor.numel() * tensor.element_size()
        if not tensor.is_contiguous() or page_bytes <= 0 or size % page_bytes or not size:
            raise ValueError(f"tensor must be contiguous and a whole number of pages of {page_bytes} bytes")
        addresses = range(tensor.data_ptr(), tensor.data_ptr() + size, page_bytes)
        return cls.of_addresses(addresses, page_bytes=page_bytes, device=tensor.device, owner=tensor)

    @classmethod
    def of_tensors(cls, tensors: Sequence[Tensor]) -> "PageTable":
        """Pages of one tensor each, all of one size on one device.

        Raises:
            ValueError: They differ in size or device, or are not contiguous.
        """
        if not tensors:
            raise ValueError("tensors must name at least one page")
        sizes = {tensor.numel() * tensor.element_size() for tensor in tensors}
        devices = {tensor.device for tensor in tensors}
        if len(sizes) > 1 or len(devices) > 1 or not all(tensor.is_contiguous() for tensor in tensors):
            raise ValueError("tensors must be contiguous, of one size and on one device")
        addresses = [tensor.data_ptr() for tensor in tensors]
        return cls.of_addresses(addresses, page_bytes=sizes.pop(), device=devices.pop(), owner=list(tensors))

    @property
    def num_pages(self) -> int:
        """Pages of the table, missing ones included."""
        return len(self.addresses)

    @property
    def num_blocks(self) -> int:
        """Blocks of 16 pages, the last one filled up with missing pages."""
        return self.bases.numel()

    @property
    def page_words(self) -> int:
        """32-bit words of a page."""
        return self.page_bytes // 4

    def without(self, lost: Iterable[int]) -> "PageTable":
        """The same table with some pages marked as not there.

        Raises:
            ValueError: An index is out of range.
        """
        lost = set(lost)
        if not lost <= set(range(self.num_pages)):
            raise ValueError(f"lost must be page indices below {self.num_pages}")
        addresses = [0 if index in lost else address for index, address in enumerate(self.addresses)]
        return PageTable.of_addresses(addresses, page_bytes=self.page_bytes, device=self.device, owner=self.owner)

    def overlaps(self, other: "PageTable") -> bool:
        """Whether a byte belongs to a page of both."""
        mine, others, i, j = self.extents, other.extents, 0, 0
        while i < len(mine) and j < len(others):
            if mine[i][0] < others[j][1] and others[j][0] < mine[i][1]:
                return True
            if mine[i][1] <= others[j][1]:
                i += 1
            else:
                j += 1
        return False

    def missing(self) -> list[int]:
        """Indices of the pages that are not there."""
        return [index for index, address in enumerate(self.addresses) if not address]


def _base(block: Sequence[int], page_bytes: int) -> int | None:
    """Where a block begins if its pages lie back to back, 0 if none is there, None if they don't."""
    bases = {address - i * page_bytes for i, address in enumerate(block) if address}
    if len(bases) > 1:
        return None
    return bases.pop() if bases else 0


def _extents(addresses: Iterable[int], page_bytes: int) -> tuple[tuple[int, int], ...]:
    """Ranges of bytes that pages take, sorted; pages back to back make one range."""
    found: list[tuple[int, int]] = []
    for address in sorted(addresses):
        if found and address <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], address + page_bytes))
        elif address:
            found.append((address, address + page_bytes))
    return tuple(found)


def check_pages(
    table: PageTable, name: str, *, like: PageTable, num_pages: int | None = None, whole: bool = True
) -> None:
    """Check that a table fits another one.

    Raises:
        ValueError: Page size, device or number differ, or pages are missing where `whole`.
    """
    if table.page_bytes % PAGE_BYTES_UNIT:
        raise ValueError(f"{name} must have pages of a multiple of {PAGE_BYTES_UNIT} bytes, not {table.page_bytes}")
    if table.page_bytes != like.page_bytes:
        raise ValueError(f"{name} must have pages of {like.page_bytes} bytes, not {table.page_bytes}")
    if table.device != like.device:
        raise ValueError(f"{name} must be on {like.device}, not on {table.device}")
    if num_pages is not None and table.num_pages != num_pages:
        raise ValueError(f"{name} must have {num_pages} pages, not {table.num_pages}")
    if whole and 0 in table.addresses:
        raise ValueError(f"{name} must have all its pages; missing: {table.missing()}")
