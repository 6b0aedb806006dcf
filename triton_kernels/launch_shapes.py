"""How the kernels of a chunk's update are cut into tiles and programs, and ordered; what they are compiled with."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from leto_strategy.triton_kernels import _chunk_update_kernels as kernels
from leto_strategy.triton_kernels.adam import AdamStep, Rounding
from leto_strategy.triton_kernels.compiler import INTERPRETED
from leto_strategy.triton_kernels.factors import BLOCK_PAGES

PAGE_TILE_WORDS = 1024
"""Words of a tile of `update_pages`: every page has a whole number of them."""


class Way(StrEnum):
    """How a chunk is updated; the tiles that the flags speak of differ."""

    FUSED = "fused"
    PAGES = "pages"


class Order(StrEnum):
    """How `fused_update` orders undo copies, flags and data of a tile; see `_fused_update`."""

    TWO_FENCES = "two_fences"
    FENCE_FIRST = "fence_first"
    FENCE_LAST = "fence_last"


@dataclass(frozen=True)
class FusedShape:
    """How `fused_update` is cut into programs and ordered; the defaults were fastest on one H200.

    Args:
        block: Words of a page that a program works on: the width of a tile.
        num_warps: Warps of a program.
        maxnreg: Most registers a thread; None for no limit.
        order: Where moments rotate. In place there are always two fences.
    """

    block: int = 1024 if INTERPRETED else 128
    num_warps: int = 4
    maxnreg: int | None = 168
    order: Order = Order.TWO_FENCES


def pages_options(*, rotates: bool, bf16_grad: bool, bf16_copy: bool, step: AdamStep) -> dict[str, Any]:
    """Compile-time constants and launch options of `_update_pages`."""
    return {
        "ROTATE": rotates, "BF16_GRAD": bf16_grad, "BF16_COPY": bf16_copy,
        "FOREACH": step.rounding is Rounding.FOREACH, "DECOUPLED": step.decoupled, "NATIVE": not INTERPRETED,
        "BLOCK": PAGE_TILE_WORDS, "num_warps": 4, "enable_fp_fusion": False,
    }  # fmt: skip


def fused_options(
    shape: FusedShape, *, rotates: bool, bf16_grad: bool, bf16_copy: bool, step: AdamStep, clmad: bool
) -> dict[str, Any]:
    """Compile-time constants and launch options of `_fused_update`."""
    order = shape.order if rotates else Order.TWO_FENCES
    options = pages_options(rotates=rotates, bf16_grad=bf16_grad, bf16_copy=bf16_copy, step=step)
    options |= {"ORDER": getattr(kernels, order.name).value, "CLMAD": clmad, "BLOCK": shape.block}
    options |= {"num_warps": shape.num_warps} | ({} if shape.maxnreg is None else {"maxnreg": shape.maxnreg})
    return options


def restore_options(way: Way, shape: FusedShape, *, rotates: bool) -> dict[str, Any]:
    """Compile-time constants and launch options of `_restore_tiles`."""
    pages, block = (BLOCK_PAGES, shape.block) if way is Way.FUSED else (1, PAGE_TILE_WORDS)
    return {"ROTATE": rotates, "PAGES": pages, "BLOCK": block, "num_warps": 4}
