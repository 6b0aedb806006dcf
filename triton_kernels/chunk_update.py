"""The update of a chunk on the GPU: undo copies, tile flags, Adam, the change of the parity (paper, 5.2; T2, T7, T8).

Two ways to the same bytes: `update_pages` and then `parity.update` over old and new pages, for any code; or
`fused_update`, one pass over blocks of 16 page triples, for 16 parity pages. A triple is a page of parameters with the
pages of their two moments. `update_chunk` takes the faster one that fits. Both ways write a tile's undo copy, then two
copies of its flag, then its data, so that after a crash in the middle either copy of the flag says where the tile's
old content is; `restore` brings it back.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from leto_strategy.triton_kernels import _chunk_update_kernels as kernels
from leto_strategy.triton_kernels import parity as parity_kernels
from leto_strategy.triton_kernels.adam import NUM_COEFFICIENTS, AdamStep
from leto_strategy.triton_kernels.chunk_pages import ChunkPages
from leto_strategy.triton_kernels.compiler import INTERPRETED, has_clmad, launch, say_once
from leto_strategy.triton_kernels.factors import BLOCK_PAGES, factors_on
from leto_strategy.triton_kernels.launch_shapes import (
    PAGE_TILE_WORDS,
    FusedShape,
    Way,
    fused_options,
    pages_options,
    restore_options,
)
from leto_strategy.triton_kernels.pages import PageTable, check_pages
from leto_strategy.triton_kernels.tile_flags import TileFlags


@dataclass(frozen=True, eq=False)
class ChunkCode:
    """Where a chunk's pages are in the erasure code.

    Args:
        first_pages: For parameters, first and second moments: index in the group of the first page of each block of
            16, a multiple of 16. For 16 parity pages.
        matrix_PH: For any number of parity pages: rows of the generator matrix, int64 [3 * pages, parity pages], for
            the pages of parameters, then first, then second moments.

    Raises:
        ValueError: Not exactly one of them is given.
    """

    first_pages: tuple[Sequence[int], Sequence[int], Sequence[int]] | None = None
    matrix_PH: Tensor | None = None

    def __post_init__(self) -> None:
        if (self.first_pages is None) == (self.matrix_PH is None):
            raise ValueError("either first_pages or matrix_PH must be given")


def way_of(chunk: ChunkPages, code: ChunkCode, *, shape: FusedShape | None = None) -> Way:
    """Which way `update_chunk` takes. It depends on the assembler too: keep it beside the number of the update."""
    shape = shape or FusedShape()
    whole = chunk.block_rows is not None and code.first_pages is not None
    if not whole or chunk.param.page_words % shape.block:
        return Way.PAGES
    return Way.FUSED if has_clmad(chunk.param.device) or INTERPRETED else Way.PAGES


def update_chunk(
    chunk: ChunkPages, code: ChunkCode, parity: PageTable, out: PageTable, coefficients: Tensor, clip: Tensor,
    flags: TileFlags, number: int, step: AdamStep, *, way: Way | None = None, shape: FusedShape | None = None,
) -> None:  # fmt: skip
    """Do all of a chunk's update: undo copies, flags, Adam, and out = parity + what changed. One pass where it fits.

    Args:
        chunk: The pages.
        code: Where they are in the group.
        parity: The group's parity pages in force.
        out: Where the next parity goes; must not overlap `parity` or the chunk (T2).
        coefficients: fp32 [8] on the device, written by `AdamStep.write`.
        clip: fp32 [1] on the device; gradients are multiplied by it as they are read.
        flags: At least `num_tiles` each.
        number: From `TileNumbers`, never used before (T7).
        step: Says which form of Adam; its numbers come from `coefficients`.
        way: As found by `way_of`, which is asked where it is not given.
        shape: How the fused pass is cut; for measurements.

    Raises:
        ValueError: An argument does not fit.
    """
    way = way or way_of(chunk, code, shape=shape)
    if way is Way.FUSED:
        fused_update(chunk, code, parity, out, coefficients, clip, flags, number, step, shape=shape)
        return
    if code.first_pages is not None and not INTERPRETED:
        say_once(
            "event=unfused_update Chunks are updated in two passes, about 1.3 times slower: the fused one needs clmad "
            "and whole blocks of 16 pages that lie back to back"
        )
    _check_out(chunk, parity, out)
    update_pages(chunk, coefficients, clip, flags, number, step)
    if code.matrix_PH is not None:
        before, after = chunk.change_unfilled
        parity_kernels.update(before, after, parity, out, matrix_PH=code.matrix_PH)
    else:
        before, after = chunk.change
        parity_kernels.update(before, after, parity, out, first_page=_first_pages(chunk, code))


def update_pages(
    chunk: ChunkPages, coefficients: Tensor, clip: Tensor, flags: TileFlags, number: int, step: AdamStep
) -> None:  # fmt: skip
    """Save a chunk's old content tile by tile and update it; the parity is left to `parity.update`.

    Arguments as for `update_chunk`.

    Raises:
        ValueError: An argument does not fit.
    """
    _check(chunk, coefficients, clip)
    flags.check(num_tiles(chunk, Way.PAGES), number, chunk.param.device)
    args = (chunk.page_rows, coefficients, clip, flags.flags, flags.other_flags, number)
    grid = (chunk.param.page_words // PAGE_TILE_WORDS, chunk.page_rows.shape[0])
    launch(kernels._update_pages, grid, args, pages_options(rotates=chunk.rotates, **_types(chunk), step=step))


def fused_update(
    chunk: ChunkPages, code: ChunkCode, parity: PageTable, out: PageTable, coefficients: Tensor, clip: Tensor,
    flags: TileFlags, number: int, step: AdamStep, *, shape: FusedShape | None = None,
) -> None:  # fmt: skip
    """Do all of a chunk's update in one pass, for 16 parity pages and whole blocks of 16 pages that lie back to back.

    Arguments as for `update_chunk`.

    Raises:
        ValueError: An argument does not fit.
    """
    shape = shape or FusedShape()
    if chunk.block_rows is None or chunk.param.page_words % shape.block:
        raise ValueError("chunk must consist of whole blocks of 16 pages that lie back to back; use update_chunk")
    _check(chunk, coefficients, clip)
    flags.check(num_tiles(chunk, Way.FUSED, shape), number, chunk.param.device)
    check_pages(parity, "parity", like=chunk.param, num_pages=BLOCK_PAGES)
    check_pages(out, "out", like=chunk.param, num_pages=BLOCK_PAGES)
    _check_out(chunk, parity, out)
    by_column = _first_pages(chunk, code)
    triples = tuple(page for triple in zip(*_thirds(by_column), strict=True) for page in triple)
    args = (
        chunk.block_rows, factors_on(triples, chunk.param.device), parity.pages, out.pages, coefficients, clip,
        flags.flags, flags.other_flags, number, chunk.block_rows.shape[0], chunk.param.page_words,
    )  # fmt: skip
    options = fused_options(
        shape, rotates=chunk.rotates, **_types(chunk), step=step, clmad=has_clmad(chunk.param.device)
    )
    launch(kernels._fused_update, (chunk.param.page_words // shape.block,), args, options)


def restore(
    chunk: ChunkPages, flags: TileFlags, number: int, way: Way, *, shape: FusedShape | None = None
) -> None:  # fmt: skip
    """Bring a chunk whose update was cut off back to what it was, whatever part of it was written (T7).

    A tile is restored if either copy of its flag holds `number`; one that was not saved has not changed. Lost undo
    pages must have been filled again, and lost flag pages zeroed. Moments that rotate were never overwritten. The bf16
    copy stays as it is: the update that follows, under a new number, writes all of it.

    Args:
        chunk: The pages, as the update had them.
        flags: As the update had them.
        number: Of the update that was cut off.
        way: By which it was made.
        shape: How it was cut, where it was given.

    Raises:
        ValueError: An argument does not fit.
    """
    shape = shape or FusedShape()
    rows = chunk.block_rows if way is Way.FUSED else chunk.page_rows
    if rows is None:
        raise ValueError("chunk has no whole blocks: it can't have been updated in one pass")
    flags.check(num_tiles(chunk, way, shape), number, chunk.param.device)
    options = restore_options(way, shape, rotates=chunk.rotates)
    args = (rows, flags.flags, flags.other_flags, number, chunk.param.page_words)
    launch(kernels._restore_tiles, (chunk.param.page_words // options["BLOCK"], rows.shape[0]), args, options)


def num_tiles(chunk: ChunkPages, way: Way, shape: FusedShape | None = None) -> int:
    """Flags that an update needs."""
    if way is Way.PAGES:
        return chunk.page_rows.shape[0] * (chunk.param.page_words // PAGE_TILE_WORDS)
    return chunk.param.num_blocks * (chunk.param.page_words // (shape or FusedShape()).block)


def _types(chunk: ChunkPages) -> dict[str, bool]:
    return {"bf16_grad": chunk.grad.page_bytes != chunk.param.page_bytes, "bf16_copy": chunk.copy is not None}


def _first_pages(chunk: ChunkPages, code: ChunkCode) -> tuple[int, ...]:
    """First page of each block, of all three columns one after the other."""
    columns = code.first_pages
    if columns is None or len(columns) != 3 or any(len(column) != chunk.param.num_blocks for column in columns):
        raise ValueError(f"first_pages must be three sequences of {chunk.param.num_blocks} indices")
    return tuple(page for column in columns for page in column)


def _thirds(pages: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    length = len(pages) // 3
    return tuple(pages[start : start + length] for start in range(0, len(pages), length))


def _check_out(chunk: ChunkPages, parity: PageTable, out: PageTable) -> None:
    if out.overlaps(parity) or any(out.overlaps(table) for _, table in chunk.columns()):
        raise ValueError("out must not overlap parity or pages of the chunk")


def _check(chunk: ChunkPages, coefficients: Tensor, clip: Tensor) -> None:
    for name, tensor, size in (("coefficients", coefficients, NUM_COEFFICIENTS), ("clip", clip, 1)):
        if tensor.shape != (size,) or tensor.dtype != torch.float32 or tensor.device != chunk.param.device:
            raise ValueError(f"{name} must be fp32 [{size}] on {chunk.param.device}")
