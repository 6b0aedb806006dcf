"""The backend for host memory with a C compiler: gf32.c through ctypes, which gives up the interpreter lock."""

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from leto_strategy.erasure.additive_fft import BLOCK_PAGES, blocks_of, closing_and_block_twiddles
from leto_strategy.erasure.backend import Backend
from leto_strategy.erasure.compiler import BuildError, Variant, library
from leto_strategy.erasure.field import multiply
from leto_strategy.erasure.generator import coefficient, coefficient_rows
from leto_strategy.erasure.pages import ZERO_PAGE, PageTable
from leto_strategy.erasure.threads import run_in_ranges

_Words = ctypes.Array[ctypes.c_uint32]
_Addresses = ctypes.Array[ctypes.c_void_p]


class NativeBackend(Backend):
    """The compiled library of one variant.

    Args:
        path: The library.
        name: Shown to users.

    Raises:
        BuildError: It can't be loaded, or computes something else than the reference.
    """

    strip_words = 1 << 16

    def __init__(self, path: Path, *, name: str) -> None:
        self.name = name
        try:
            loaded = ctypes.CDLL(str(path))
            self._encode, self._combine = loaded.leto_encode, loaded.leto_combine
        except (OSError, AttributeError) as error:
            raise BuildError(f"{path} can't be used: {error}") from error
        self._encode.restype = self._combine.restype = None
        if not self._is_right():
            raise BuildError(f"{path} computes wrong sums: the compiler is at fault")

    @classmethod
    def build(cls, variant: Variant) -> "NativeBackend":
        """Build a variant, or take it from the cache.

        Raises:
            BuildError: That is not possible.
        """
        return cls(library(variant), name=f"C, {variant.name}")

    def parity(
        self,
        out: PageTable,
        *,
        indices: Sequence[int],
        new: PageTable,
        old: PageTable | None,
        base: PageTable | None,
        threads: int,
    ) -> None:
        """See `Backend.parity`."""
        if len(out) != BLOCK_PAGES:
            self._run_combine(out, coefficient_rows(indices, len(out)), new, old, base, threads)
            return
        blocks = blocks_of(indices)
        factors = _words(closing_and_block_twiddles(list(blocks)))
        places = [place for block in blocks.values() for place in block]
        tables = _in_places(new, places), _in_places(old, places), _addresses(base), _addresses(out)
        run_in_ranges(
            lambda start, stop: self._encode(
                ctypes.c_long(len(blocks)), factors, *tables, ctypes.c_long(start), ctypes.c_long(stop)
            ),
            out.num_words,
            threads=threads,
        )

    def combine(self, out: PageTable, *, matrix: Sequence[Sequence[int]], pages: PageTable, threads: int) -> None:
        """See `Backend.combine`."""
        self._run_combine(out, matrix, pages, None, None, threads)

    def _run_combine(
        self,
        out: PageTable,
        matrix: Sequence[Sequence[int]],
        new: PageTable,
        old: PageTable | None,
        base: PageTable | None,
        threads: int,
    ) -> None:
        sizes = ctypes.c_long(len(out)), ctypes.c_long(len(new))
        factors = _words([value for row in matrix for value in row])
        tables = _addresses(new), _addresses(old), _addresses(base), _addresses(out)
        run_in_ranges(
            lambda start, stop: self._combine(*sizes, factors, *tables, ctypes.c_long(start), ctypes.c_long(stop)),
            out.num_words,
            threads=threads,
        )

    def _is_right(self) -> bool:
        """Compare both functions with the definition, for one page that has one value everywhere."""
        num_words, value, index = 1024, 0x9E3779B9, 21
        page, sums = (ctypes.c_uint32 * num_words)(*[value] * num_words), (ctypes.c_uint32 * (16 * num_words))()
        table = PageTable((ctypes.addressof(page),), num_words, owner=page)
        out = PageTable(
            tuple(ctypes.addressof(sums) + 4 * num_words * row for row in range(BLOCK_PAGES)), num_words, owner=sums
        )
        wanted = [multiply(coefficient(index, row, num_parity=BLOCK_PAGES), value) for row in range(BLOCK_PAGES)]
        self.parity(out, indices=[index], new=table, old=None, base=None, threads=1)
        encoded = list(sums) == [value for value in wanted for _ in range(num_words)]
        ctypes.memset(sums, 0, ctypes.sizeof(sums))
        self._run_combine(out, coefficient_rows([index], BLOCK_PAGES), table, None, None, 1)
        return encoded and list(sums) == [value for value in wanted for _ in range(num_words)]


def _words(values: Sequence[int]) -> _Words:
    return (ctypes.c_uint32 * len(values))(*values)


def _addresses(table: PageTable | None) -> _Addresses | None:
    return None if table is None else (ctypes.c_void_p * len(table))(*table.addresses)


def _in_places(table: PageTable | None, places: Sequence[int | None]) -> _Addresses | None:
    """Addresses of pages in blocks, zero pages where the group has none."""
    if table is None:
        return None
    addresses: Any = [ZERO_PAGE if place is None else table.addresses[place] for place in places]
    return (ctypes.c_void_p * len(places))(*addresses)
