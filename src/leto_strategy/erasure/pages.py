"""Tables of pages: where the words of each page lie, whoever owns them, contiguous or not.

The operations of `code.py` take pages in any of three forms and turn them into a `PageTable`:

- a tensor [N, W], int32, whose rows are contiguous: the fast path, whatever the distance between rows;
- a sequence of N tensors [W], int32 and contiguous, all on one device: pages of several segments;
- a `PageTable`, which may be made from addresses: pages of mapped memory that no tensor describes.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from leto_strategy.erasure.field import SYMBOL_BYTES

CPU = torch.device("cpu")

ZERO_PAGE = 0
"""The address that stands for a page of zeros; only where pages are read."""


@dataclass(frozen=True)
class PageTable:
    """Pages by address.

    Args:
        addresses: First byte of each page, a multiple of 4; `ZERO_PAGE` reads as zeros.
        num_words: Words of a page, W.
        device: Where the pages are.
        owner: What keeps the memory; held as long as the table.
    """

    addresses: tuple[int, ...]
    num_words: int
    device: torch.device = CPU
    owner: object = None

    def __len__(self) -> int:
        """Number of pages."""
        return len(self.addresses)

    def select(self, indices: Iterable[int]) -> "PageTable":
        """The pages at `indices`, in that order."""
        return PageTable(tuple(self.addresses[i] for i in indices), self.num_words, self.device, self.owner)

    def blanked(self, indices: Iterable[int]) -> "PageTable":
        """The same table with pages of zeros at `indices`."""
        addresses = list(self.addresses)
        for index in indices:
            addresses[index] = ZERO_PAGE
        return PageTable(tuple(addresses), self.num_words, self.device, self.owner)

    def words(self, start: int, stop: int) -> "PageTable":
        """Only the words `start` to `stop` of each page."""
        offset = start * SYMBOL_BYTES
        addresses = tuple(address and address + offset for address in self.addresses)
        return PageTable(addresses, stop - start, self.device, self.owner)


Pages = Tensor | Sequence[Tensor] | PageTable


def page_table(pages: Pages, *, num_pages: int, num_words: int, name: str) -> PageTable:
    """Check pages and tell where they lie.

    Args:
        pages: In one of the forms above.
        num_pages: How many there must be.
        num_words: How many words each must have.
        name: What to call them in a message.

    Raises:
        ValueError: Number, size, dtype, layout or device is wrong; the message says which.
    """
    if isinstance(pages, PageTable):
        table = pages
        if table.num_words != num_words:
            raise ValueError(f"{name} must have {num_words} words a page, this table says {table.num_words}")
        if any(address % SYMBOL_BYTES for address in table.addresses):
            raise ValueError(f"{name} must lie at multiples of {SYMBOL_BYTES} bytes")
    elif isinstance(pages, Tensor):
        table = _of_tensor(pages, num_words, name)
    else:
        table = _of_tensors(pages, num_words, name)
    if len(table) != num_pages:
        raise ValueError(f"{name} must have {num_pages} pages, got {len(table)}")
    return table


def require_disjoint(written: PageTable, read: Iterable[PageTable], name: str) -> None:
    """See that no written page overlaps another one, or one that is read.

    Raises:
        ValueError: One does, or a written page has no address.
    """
    if ZERO_PAGE in written.addresses:
        raise ValueError(f"{name}: a page of zeros can't be written")
    num_bytes = written.num_words * SYMBOL_BYTES
    outputs = set(written.addresses)
    ordered = sorted([*written.addresses, *{a for table in read for a in table.addresses if a != ZERO_PAGE}])
    for before, after in pairwise(ordered):
        if after - before < num_bytes and (before in outputs or after in outputs):
            raise ValueError(f"{name} overlaps pages that are read, or itself")


def require_same_device(tables: Sequence[PageTable]) -> torch.device:
    """The device of all tables.

    Raises:
        ValueError: They lie on several.
    """
    devices = {table.device for table in tables}
    if len(devices) > 1:
        raise ValueError(f"all pages must be on one device, got {sorted(map(str, devices))}")
    return devices.pop()


def _of_tensor(pages: Tensor, num_words: int, name: str) -> PageTable:
    _require_int32(pages, name)
    if pages.dim() != 2 or pages.shape[1] != num_words:
        raise ValueError(f"{name} must have the shape [pages, {num_words}], got {list(pages.shape)}")
    if pages.stride(1) != 1:
        raise ValueError(f"the words of each page of {name} must be contiguous, their stride is {pages.stride(1)}")
    start, step = pages.data_ptr(), pages.stride(0) * SYMBOL_BYTES
    return PageTable(tuple(start + step * i for i in range(pages.shape[0])), num_words, pages.device, pages)


def _of_tensors(pages: Sequence[Tensor], num_words: int, name: str) -> PageTable:
    kept = tuple(pages)
    for page in kept:
        _require_int32(page, name)
        if page.shape != (num_words,) or not page.is_contiguous():
            raise ValueError(
                f"each page of {name} must be contiguous with the shape [{num_words}], got {list(page.shape)} "
                f"with the stride {page.stride()}"
            )
    if len({page.device for page in kept}) > 1:
        raise ValueError(f"all pages of {name} must be on one device")
    device = kept[0].device if kept else CPU
    return PageTable(tuple(page.data_ptr() for page in kept), num_words, device, kept)


def _require_int32(tensor: Tensor, name: str) -> None:
    if tensor.dtype != torch.int32:
        raise ValueError(f"{name} must be int32 (use tensor.view(torch.int32)), got {tensor.dtype}")
