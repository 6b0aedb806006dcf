"""Parity of pages on the GPU: encode, update by a chunk's change, rebuild, second tier.

Data page i has the point H + i, parity page j the point j. With 16 parity pages and whole blocks of 16 data pages the
same bytes come from an additive FFT with 2 products a word instead of 16; every other shape takes a matrix. Every
wrapper checks its arguments and raises ValueError with the argument's name.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from leto_strategy.triton_kernels import _parity_kernels as kernels
from leto_strategy.triton_kernels.compiler import INTERPRETED, has_clmad, launch
from leto_strategy.triton_kernels.factors import BLOCK_PAGES, factors_on
from leto_strategy.triton_kernels.pages import PageTable, check_pages

OUTPUTS_MAX = 64
TILE_MAX = 16
"""Outputs that one program of `_apply_matrix` holds in registers."""

XOR_OPTIONS = {"BLOCK": 1024, "num_warps": 4}


def encode(
    pages: PageTable, out: PageTable, *, first_page: int | Sequence[int] = 0, matrix_PH: Tensor | None = None
) -> None:
    """Write the parity of data pages: out_j = sum over i of C[first_page + i, j] pages_i.

    Args:
        pages: Data pages; missing ones count as zeros.
        out: Parity pages, 1 to 64.
        first_page: Index in its group of the first of `pages`; or one of each block of 16, each a multiple of 16.
        matrix_PH: Rows of the generator matrix for `pages`, int64. Without it, 16 parity pages and first pages that
            are multiples of 16 are needed, and the FFT makes the same bytes.

    Raises:
        ValueError: A table or the matrix does not fit.
    """
    check_pages(out, "out", like=pages)
    if matrix_PH is not None:
        apply_matrix(pages, matrix_PH, out)
        return
    launch(*_fft_launch(pages, None, None, out, first_page))


def update(
    before: PageTable, after: PageTable, parity: PageTable, out: PageTable, *, first_page: int | Sequence[int] = 0,
    matrix_PH: Tensor | None = None,
) -> None:  # fmt: skip
    """Write the parity that follows from a change of pages: out = parity + RS(before + after), never in place (T2).

    Args:
        before: The pages as they were, in an undo copy.
        after: The same pages as they are.
        parity: Parity pages in force.
        out: Where the next parity goes; must not overlap `parity`.
        first_page: As for `encode`.
        matrix_PH: As for `encode`.

    Raises:
        ValueError: A table or the matrix does not fit, or `out` overlaps `parity`.
    """
    check_pages(before, "before", like=after, num_pages=after.num_pages, whole=False)
    check_pages(out, "out", like=after)
    check_pages(parity, "parity", like=after, num_pages=out.num_pages)
    if before.missing() != after.missing():
        raise ValueError("before and after must miss the same pages")
    if out.overlaps(parity):
        raise ValueError("out must not overlap parity: a crash in the middle would leave neither")
    if matrix_PH is not None:
        apply_matrix(after, matrix_PH, out, before=before, addend=parity)
        return
    launch(*_fft_launch(after, before, parity, out, first_page))


def apply_matrix(
    pages: PageTable, matrix_PH: Tensor, out: PageTable, *, before: PageTable | None = None,
    addend: PageTable | None = None,
) -> None:  # fmt: skip
    """Write out_j = [addend_j +] sum over i of matrix[i, j] (pages_i [+ before_i]), all outputs in one pass.

    Args:
        pages: Input pages; missing ones count as zeros.
        matrix_PH: Symbols, int64 [num_pages, num_outputs], on the device of the pages.
        out: 1 to 64 output pages; must not overlap the inputs.
        before: Added to `pages` first.
        addend: Added to the result.

    Raises:
        ValueError: A table or the matrix does not fit, or `out` overlaps an input.
    """
    check_pages(out, "out", like=pages)
    if not 1 <= out.num_pages <= OUTPUTS_MAX:
        raise ValueError(f"out must have 1 to {OUTPUTS_MAX} pages, not {out.num_pages}")
    if matrix_PH.shape != (pages.num_pages, out.num_pages):
        raise ValueError(f"matrix_PH must be {pages.num_pages} x {out.num_pages}, not {tuple(matrix_PH.shape)}")
    if matrix_PH.dtype != torch.int64 or not matrix_PH.is_contiguous() or matrix_PH.device != pages.device:
        raise ValueError(f"matrix_PH must be contiguous int64 on {pages.device}")
    for table, name in ((before, "before"), (addend, "addend")):
        if table is not None:
            number = pages.num_pages if name == "before" else out.num_pages
            check_pages(table, name, like=pages, num_pages=number, whole=name == "addend")
    if any(out.overlaps(table) for table in (pages, before, addend) if table is not None):
        raise ValueError("out must not overlap pages, before or addend")
    options = {"DELTA": before is not None, "ADD": addend is not None}
    options |= matrix_options(out.num_pages, has_clmad(pages.device))
    args = (
        pages.pages, (before or pages).pages, matrix_PH, (addend or out).pages, out.pages, pages.num_pages,
        out.num_pages,
    )  # fmt: skip
    grid = (pages.page_words // options["BLOCK"], -(-out.num_pages // options["TILE"]))
    launch(kernels._apply_matrix, grid, args, options)


def reconstruct(
    pages: PageTable, parity: PageTable, solution_EH: Tensor, out: PageTable, *, first_page: int | Sequence[int] = 0
) -> None:  # fmt: skip
    """Rebuild lost data pages of a group with 16 parity pages in one pass over what is left.

    out_o = sum over j of solution[o, j] (parity_j + sum over i of C[i, j] pages_i).

    Args:
        pages: The group's data pages, lost ones missing.
        parity: The 16 parity pages, lost ones missing.
        solution_EH: The inverse of the lost pages' part of the generator matrix, int64 [num_lost, 16]; 0 in the
            columns of parity pages that are not used.
        out: Where the lost pages go, in the order of the rows.
        first_page: Index in its group of the first of `pages`; or one of each block of 16, each a multiple of 16.

    Raises:
        ValueError: A table or the matrix does not fit, or `out` overlaps an input.
    """
    check_pages(out, "out", like=pages)
    check_pages(parity, "parity", like=pages, num_pages=BLOCK_PAGES, whole=False)
    if solution_EH.shape != (out.num_pages, BLOCK_PAGES):
        raise ValueError(f"solution_EH must be {out.num_pages} x {BLOCK_PAGES}, not {tuple(solution_EH.shape)}")
    if solution_EH.dtype != torch.int64 or not solution_EH.is_contiguous() or solution_EH.device != pages.device:
        raise ValueError(f"solution_EH must be contiguous int64 on {pages.device}")
    if out.overlaps(pages) or out.overlaps(parity):
        raise ValueError("out must not overlap pages or parity")
    clmad = has_clmad(pages.device)
    shape = fft_shape(clmad)
    args = (
        pages.pages, pages.bases, pages.present, _factors_on(first_page, pages), parity.pages, solution_EH, out.pages,
        pages.num_blocks, out.num_pages, pages.page_words,
    )  # fmt: skip
    options = {"LAYOUT": pages.layout, "CLMAD": clmad, **shape}
    launch(kernels._reconstruct_fft, (pages.page_words // shape["BLOCK"],), args, options)


def xor(pages: PageTable, out: PageTable) -> None:
    """Write the sum of pages: the second tier for one page, or its change when old and new pages are given.

    Raises:
        ValueError: `out` is not one page of the same size, or overlaps an input.
    """
    check_pages(out, "out", like=pages, num_pages=1)
    if out.overlaps(pages):
        raise ValueError("out must not overlap pages")
    grid = (pages.page_words // XOR_OPTIONS["BLOCK"],)
    launch(kernels._xor_pages, grid, (pages.pages, out.pages, pages.num_pages), XOR_OPTIONS)


def _fft_launch(
    pages: PageTable,
    before: PageTable | None,
    parity: PageTable | None,
    out: PageTable,
    first_page: int | Sequence[int],
) -> tuple[Any, tuple[int, ...], tuple[Any, ...], dict[str, Any]]:
    if out.num_pages != BLOCK_PAGES:
        raise ValueError(f"matrix_PH is needed for {out.num_pages} parity pages: the FFT makes {BLOCK_PAGES}")
    for table, name in ((pages, "pages"), (before, "before")):
        if table is not None and out.overlaps(table):
            raise ValueError(f"out must not overlap {name}")
    clmad = has_clmad(pages.device)
    shape = fft_shape(clmad)
    old = before or pages
    args = (
        pages.pages, pages.bases, pages.present, old.pages, old.bases, old.present, _factors_on(first_page, pages),
        (parity or out).pages, out.pages, pages.num_blocks, pages.page_words,
    )  # fmt: skip
    constants = {"DELTA": before is not None, "LAYOUT": min(pages.layout, old.layout), "CLMAD": clmad}
    return kernels._encode_fft, (pages.page_words // shape["BLOCK"],), args, {**constants, **shape}


def fft_shape(clmad: bool) -> dict[str, int]:
    """Words a program and warps that were fastest on one H200 (benchmarks/results/update_kernels_notes.md)."""
    if INTERPRETED:
        return {"BLOCK": 1024, "num_warps": 4}
    return {"BLOCK": 256, "num_warps": 4} if clmad else {"BLOCK": 128, "num_warps": 4}


def matrix_options(num_outputs: int, clmad: bool) -> dict[str, Any]:
    """How `_apply_matrix` is cut for a number of outputs."""
    num_tiles = -(-num_outputs // TILE_MAX)
    block = 1024 if INTERPRETED else 512 if clmad else 128
    return {"CLMAD": clmad, "TILE": -(-num_outputs // num_tiles), "BLOCK": block, "num_warps": 4}


def _factors_on(first_page: int | Sequence[int], pages: PageTable) -> Tensor:
    if isinstance(first_page, int):
        first_page = range(first_page, first_page + BLOCK_PAGES * pages.num_blocks, BLOCK_PAGES)
    if len(first_page) != pages.num_blocks:
        raise ValueError(f"first_page must be an index, or one for each of {pages.num_blocks} blocks")
    return factors_on(tuple(first_page), pages.device)
