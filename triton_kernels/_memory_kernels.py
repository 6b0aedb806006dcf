"""Device functions that read and write pages through tables of addresses, and order stores for whoever comes after.

A table holds byte addresses as int64; 0 stands for a page that is not there, which reads as zeros. Pages are whole
multiples of 4 KiB and aligned to 16 bytes, so that a block of words never crosses an edge.
"""

import triton
import triton.language as tl


@triton.jit
def page_ptr(table_ptr, index, DTYPE: tl.constexpr):
    """Pointer to the first element of a page."""
    return tl.multiple_of(tl.load(table_ptr + index).to(tl.pointer_type(DTYPE)), 16)


@triton.jit
def load_page(table_ptr, index, offsets, DTYPE: tl.constexpr):
    """Elements of a page; zeros where the page is not there."""
    address = tl.load(table_ptr + index)
    ptr = tl.multiple_of(address.to(tl.pointer_type(DTYPE)), 16)
    return tl.load(ptr + offsets, mask=(offsets >= 0) & (address != 0), other=0)


@triton.jit
def load_block16(pages_ptr, bases_ptr, present_ptr, block, offsets, page_words, LAYOUT: tl.constexpr):
    """The words at `offsets` of the 16 pages of a block.

    LAYOUT 0: every page by its address. 1: pages back to back from the block's base, a bit each says which are
    present. 2: the same, all present.
    """
    if LAYOUT == 0:
        out = (load_page(pages_ptr, block * 16, offsets, tl.int32),)
        for i in tl.static_range(1, 16):
            out = out + (load_page(pages_ptr, block * 16 + i, offsets, tl.int32),)
    elif LAYOUT == 1:
        base = page_ptr(bases_ptr, block, tl.int32)
        present = tl.load(present_ptr + block)
        out = (tl.load(base + offsets, mask=(offsets >= 0) & ((present & 1) != 0), other=0),)
        for i in tl.static_range(1, 16):
            here = (offsets >= 0) & ((present & (1 << i)) != 0)
            out = out + (tl.load(base + i * page_words + offsets, mask=here, other=0),)
    else:
        base = page_ptr(bases_ptr, block, tl.int32)
        out = (tl.load(base + offsets),)
        for i in tl.static_range(1, 16):
            out = out + (tl.load(base + i * page_words + offsets),)
    return out


@triton.jit
def fence(NATIVE: tl.constexpr):
    """All stores that this thread made before are performed before all that it makes after, as seen by the GPU."""
    if NATIVE:
        tl.inline_asm_elementwise(
            "fence.acq_rel.gpu; mov.u32 $0, $1;", "=r,r", [tl.program_id(0)], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def mark_saved(flags_ptr, other_flags_ptr, index, number, NATIVE: tl.constexpr):
    """Rule T8: all undo words of the tile, then both copies of its flag, then whatever is stored next.

    Invariant: a flag that holds `number` proves the tile's undo words; a tile whose data changed has both flags. So
    either copy alone decides where the old content is.
    """
    fence(NATIVE)
    tl.debug_barrier()
    tl.store(flags_ptr + index, number)
    tl.store(other_flags_ptr + index, number)
    fence(NATIVE)
    tl.debug_barrier()
