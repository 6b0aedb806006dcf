"""Kernels of the erasure code: parity of pages, its change with a chunk, lost pages from what is left.

Bytes moved and products a word, for P pages and H outputs of W words: `_encode_fft` reads 4 P W (8 P W and 4 H W for a
chunk) and writes 4 H W, 2 products a data word; `_apply_matrix` the same with H products, and reads the pages once
for every TILE outputs; `_reconstruct_fft` reads 4 (P + 16) W, writes 4 E W, 2 products a word and 16 a lost one.
"""

import triton
import triton.language as tl

from leto_strategy.triton_kernels._field_kernels import (
    accumulate,
    fft16,
    inverse_fft16,
    reduce_product,
    xor16,
    zeros16,
)
from leto_strategy.triton_kernels._memory_kernels import load_block16, load_page, page_ptr

# Compiled once whatever the alignment of small arrays is: pages are aligned, and only they are read in vectors.
POINTERS = ["pages_ptr", "bases_ptr", "present_ptr", "before_pages_ptr", "before_bases_ptr", "before_present_ptr"]
POINTERS += ["factors_ptr", "parity_ptr", "out_ptr", "solution_ptr", "matrix_ptr", "addend_ptr"]


@triton.jit
def _block_sums(
    pages_ptr, bases_ptr, present_ptr, before_pages_ptr, before_bases_ptr, before_present_ptr, factors_ptr, num_blocks,
    offsets, page_words, DELTA: tl.constexpr, LAYOUT: tl.constexpr, CLMAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sum over blocks of the inverse FFT of their words, or of their change: 16 words of [BLOCK]."""
    total = zeros16(BLOCK)
    for block in range(num_blocks):
        d = load_block16(pages_ptr, bases_ptr, present_ptr, block, offsets, page_words, LAYOUT)
        if DELTA:
            d = xor16(
                d,
                load_block16(
                    before_pages_ptr, before_bases_ptr, before_present_ptr, block, offsets, page_words, LAYOUT
                ),
            )
        total = xor16(total, inverse_fft16(d, factors_ptr + block * 4, CLMAD))
    return total


@triton.jit(do_not_specialize=["num_blocks"], do_not_specialize_on_alignment=POINTERS)
def _encode_fft(
    pages_ptr, bases_ptr, present_ptr, before_pages_ptr, before_bases_ptr, before_present_ptr, factors_ptr,
    parity_ptr, out_ptr, num_blocks, page_words, DELTA: tl.constexpr, LAYOUT: tl.constexpr, CLMAD: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """out_j = sum_i C[i, j] pages_i, or out_j = parity_j + sum_i C[i, j] (pages_i + before_i) with DELTA; 16 j."""
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = _block_sums(
        pages_ptr, bases_ptr, present_ptr, before_pages_ptr, before_bases_ptr, before_present_ptr, factors_ptr,
        num_blocks, offsets, page_words, DELTA, LAYOUT, CLMAD, BLOCK,
    )  # fmt: skip
    parity = fft16(total, CLMAD)
    for j in tl.static_range(16):
        word = parity[j]
        if DELTA:
            word = word ^ tl.load(page_ptr(parity_ptr, j, tl.int32) + offsets)
        tl.store(page_ptr(out_ptr, j, tl.int32) + offsets, word)


@triton.jit(do_not_specialize=["num_blocks", "num_lost"], do_not_specialize_on_alignment=POINTERS)
def _reconstruct_fft(
    pages_ptr, bases_ptr, present_ptr, factors_ptr, parity_ptr, solution_ptr, out_ptr, num_blocks, num_lost, page_words,
    LAYOUT: tl.constexpr, CLMAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out_o = sum_j solution[o, j] (parity_j + sum_i C[i, j] pages_i); lost pages and lost parity read as zeros."""
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = _block_sums(
        pages_ptr, bases_ptr, present_ptr, pages_ptr, bases_ptr, present_ptr, factors_ptr,
        num_blocks, offsets, page_words, False, LAYOUT, CLMAD, BLOCK,
    )  # fmt: skip
    total = fft16(total, CLMAD)
    syndromes = (total[0] ^ load_page(parity_ptr, 0, offsets, tl.int32),)
    for j in tl.static_range(1, 16):
        syndromes = syndromes + (total[j] ^ load_page(parity_ptr, j, offsets, tl.int32),)
    for lost in range(num_lost):
        product = tl.zeros((BLOCK,), tl.uint64)
        for j in tl.static_range(16):
            product = accumulate(product, syndromes[j], tl.load(solution_ptr + lost * 16 + j), CLMAD)
        tl.store(page_ptr(out_ptr, lost, tl.int32) + offsets, reduce_product(product, CLMAD))


@triton.jit(do_not_specialize=["num_pages", "num_outputs"], do_not_specialize_on_alignment=POINTERS)
def _apply_matrix(
    pages_ptr, before_pages_ptr, matrix_ptr, addend_ptr, out_ptr, num_pages, num_outputs, DELTA: tl.constexpr,
    ADD: tl.constexpr, CLMAD: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out_j = [addend_j +] sum_i matrix[i, j] (pages_i [+ before_i]) for TILE outputs from TILE * program_id(1)."""
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    first = tl.program_id(1) * TILE
    total = (tl.zeros((BLOCK,), tl.uint64),)
    for _ in tl.static_range(1, TILE):
        total = total + (tl.zeros((BLOCK,), tl.uint64),)
    for i in range(num_pages):
        word = load_page(pages_ptr, i, offsets, tl.int32)
        if DELTA:
            word = word ^ load_page(before_pages_ptr, i, offsets, tl.int32)
        row_ptr = matrix_ptr + i * num_outputs + first
        after = (accumulate(total[0], word, tl.load(row_ptr), CLMAD),)
        for j in tl.static_range(1, TILE):
            factor = tl.load(row_ptr + j, mask=first + j < num_outputs, other=0)
            after = after + (accumulate(total[j], word, factor, CLMAD),)
        total = after
    for j in tl.static_range(TILE):
        here = (offsets >= 0) & (first + j < num_outputs)
        word = reduce_product(total[j], CLMAD)
        # A tile's last outputs may not exist; then its first one's address stands in and nothing is stored.
        output = tl.where(first + j < num_outputs, first + j, first)
        if ADD:
            word = word ^ tl.load(page_ptr(addend_ptr, output, tl.int32) + offsets, mask=here, other=0)
        tl.store(page_ptr(out_ptr, output, tl.int32) + offsets, word, mask=here)


@triton.jit(do_not_specialize=["num_pages"], do_not_specialize_on_alignment=POINTERS)
def _xor_pages(pages_ptr, out_ptr, num_pages, BLOCK: tl.constexpr):
    """Out = sum of all pages; reads 4 P W bytes, writes 4 W."""
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.int32)
    for i in range(num_pages):
        total = total ^ load_page(pages_ptr, i, offsets, tl.int32)
    tl.store(page_ptr(out_ptr, 0, tl.int32) + offsets, total)
