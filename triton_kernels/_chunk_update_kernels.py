"""Kernels of the update of a chunk: undo copies, tile flags, Adam, and the change of the parity (rules T2, T7, T8).

A row of the table describes one page triple (`_update_pages`) or one triple of blocks of 16 pages (`_fused_update`):
byte addresses of parameters, first and second moments, where the new moments go, undo copies, gradients, the bf16 copy.
With ROTATE the new moments go elsewhere and the old ones are their own undo copy: what is stored there needs no order.

Bytes a parameter, fp32 gradients: 16 read and 12 written, 12 for undo copies (4 with ROTATE), 2 for the bf16 copy.
`_fused_update` adds 8 H W a chunk for the parity and 6 products a parameter; `_update_pages` adds nothing, and leaves
the parity to a pass of its own over old and new pages.
"""

import triton
import triton.language as tl

from leto_strategy.triton_kernels._adam_kernels import adam_step, clipped, load_coefficients, rounded_to_bf16
from leto_strategy.triton_kernels._field_kernels import fft16, inverse_fft16, xor16, zeros16
from leto_strategy.triton_kernels._memory_kernels import fence, mark_saved, page_ptr

ROW = tl.constexpr(10)
PARAM, EXP_AVG, EXP_AVG_SQ = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
EXP_AVG_OUT, EXP_AVG_SQ_OUT = tl.constexpr(3), tl.constexpr(4)
UNDO_PARAM, UNDO_EXP_AVG, UNDO_EXP_AVG_SQ = tl.constexpr(5), tl.constexpr(6), tl.constexpr(7)
GRAD, COPY = tl.constexpr(8), tl.constexpr(9)

TWO_FENCES, FENCE_FIRST, FENCE_LAST = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)

# Compiled once whatever the alignment of small arrays is: pages are aligned, and only they are read in vectors.
POINTERS = ["table_ptr", "factors_ptr", "parity_ptr", "out_ptr", "coefficients_ptr", "clip_ptr", "flags_ptr"]
POINTERS += ["other_flags_ptr"]


@triton.jit
def _floats(words):
    return words.to(tl.float32, bitcast=True)


@triton.jit
def _words(floats):
    return floats.to(tl.int32, bitcast=True)


@triton.jit(do_not_specialize=["number"], do_not_specialize_on_alignment=POINTERS)
def _update_pages(
    table_ptr, coefficients_ptr, clip_ptr, flags_ptr, other_flags_ptr, number: "i64", ROTATE: tl.constexpr,
    BF16_GRAD: tl.constexpr, BF16_COPY: tl.constexpr, FOREACH: tl.constexpr, DECOUPLED: tl.constexpr,
    NATIVE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One tile of one page triple: undo copies and flags, then the step. Tiles are independent."""
    column, page = tl.program_id(0), tl.program_id(1)
    offsets = column * BLOCK + tl.arange(0, BLOCK)
    row_ptr = table_ptr + page * ROW
    grad_dtype: tl.constexpr = tl.bfloat16 if BF16_GRAD else tl.float32
    param_ptr = page_ptr(row_ptr, PARAM, tl.int32) + offsets
    old_param = tl.load(param_ptr)
    old_avg = tl.load(page_ptr(row_ptr, EXP_AVG, tl.int32) + offsets)
    old_sq = tl.load(page_ptr(row_ptr, EXP_AVG_SQ, tl.int32) + offsets)
    grad = tl.load(page_ptr(row_ptr, GRAD, grad_dtype) + offsets)
    tl.store(page_ptr(row_ptr, UNDO_PARAM, tl.int32) + offsets, old_param)
    if not ROTATE:
        tl.store(page_ptr(row_ptr, UNDO_EXP_AVG, tl.int32) + offsets, old_avg)
        tl.store(page_ptr(row_ptr, UNDO_EXP_AVG_SQ, tl.int32) + offsets, old_sq)
    mark_saved(flags_ptr, other_flags_ptr, page * tl.num_programs(0) + column, number, NATIVE)
    c = load_coefficients(coefficients_ptr, clip_ptr)
    param, exp_avg, exp_avg_sq = adam_step(
        _floats(old_param), _floats(old_avg), _floats(old_sq), clipped(grad, c[8], NATIVE), c, FOREACH, DECOUPLED
    )
    tl.store(param_ptr, _words(param))
    tl.store(page_ptr(row_ptr, EXP_AVG_OUT, tl.int32) + offsets, _words(exp_avg))
    tl.store(page_ptr(row_ptr, EXP_AVG_SQ_OUT, tl.int32) + offsets, _words(exp_avg_sq))
    if BF16_COPY:
        tl.store(page_ptr(row_ptr, COPY, tl.bfloat16) + offsets, rounded_to_bf16(param, NATIVE))


@triton.jit(do_not_specialize=["number"], do_not_specialize_on_alignment=POINTERS)
def _restore_tiles(
    table_ptr, flags_ptr, other_flags_ptr, number: "i64", page_words, ROTATE: tl.constexpr, PAGES: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Bring back the old content of a tile of PAGES page triples if either copy of its flag says that it was saved."""
    column, row = tl.program_id(0), tl.program_id(1)
    offsets = column * BLOCK + tl.arange(0, BLOCK)
    row_ptr = table_ptr + row * ROW
    tile = row * tl.num_programs(0) + column
    if (tl.load(flags_ptr + tile) == number) | (tl.load(other_flags_ptr + tile) == number):
        for i in range(PAGES):
            at = i * page_words + offsets
            old = tl.load(page_ptr(row_ptr, UNDO_PARAM, tl.int32) + at)
            tl.store(page_ptr(row_ptr, PARAM, tl.int32) + at, old)
            if not ROTATE:
                old = tl.load(page_ptr(row_ptr, UNDO_EXP_AVG, tl.int32) + at)
                tl.store(page_ptr(row_ptr, EXP_AVG, tl.int32) + at, old)
                old = tl.load(page_ptr(row_ptr, UNDO_EXP_AVG_SQ, tl.int32) + at)
                tl.store(page_ptr(row_ptr, EXP_AVG_SQ, tl.int32) + at, old)


@triton.jit
def _load_pages(base, offsets, page_words):
    """The elements at `offsets` of the 16 pages of a block."""
    out = (tl.load(base + offsets),)
    for i in tl.static_range(1, 16):
        out = out + (tl.load(base + i * page_words + offsets),)
    return out


@triton.jit
def _store_pages(base, values, offsets, page_words):
    for i in tl.static_range(16):
        tl.store(base + i * page_words + offsets, values[i])


@triton.jit
def _mark_and_store(
    flags_ptr, other_flags_ptr, tile, number, waiting_ptr, waiting, triple, offsets, page_words, NATIVE: tl.constexpr
):  # fmt: skip
    """A fence; then this tile's flags, and the parameters of the tile before, whose flags were stored before it."""
    fence(NATIVE)
    tl.debug_barrier()
    tl.store(flags_ptr + tile, number)
    tl.store(other_flags_ptr + tile, number)
    if triple > 0:
        _store_pages(waiting_ptr, waiting, offsets, page_words)


@triton.jit(do_not_specialize=["number", "num_triples"], do_not_specialize_on_alignment=POINTERS)
def _fused_update(
    table_ptr, factors_ptr, parity_ptr, out_ptr, coefficients_ptr, clip_ptr, flags_ptr, other_flags_ptr,
    number: "i64", num_triples, page_words, ROTATE: tl.constexpr, ORDER: tl.constexpr, BF16_GRAD: tl.constexpr,
    BF16_COPY: tl.constexpr, FOREACH: tl.constexpr, DECOUPLED: tl.constexpr, CLMAD: tl.constexpr, NATIVE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """A column of tiles through all block triples of a chunk; out = parity + the parity of what changed.

    Rule T8 for each tile: undo copy, fence, both flags, fence, data. ORDER says how. TWO_FENCES: as it stands. Else,
    with ROTATE, one fence a tile does both jobs: it stands between the undo copy of this tile and its flags, and
    between the flags of the tile before and that one's parameters, which wait for it in registers. FENCE_FIRST: ahead
    of the step. FENCE_LAST: behind the products, when the undo copy has had its time to reach memory.
    """
    column = tl.program_id(0)
    num_columns = tl.num_programs(0)
    offsets = column * BLOCK + tl.arange(0, BLOCK)
    grad_dtype: tl.constexpr = tl.bfloat16 if BF16_GRAD else tl.float32
    c = load_coefficients(coefficients_ptr, clip_ptr)
    total = zeros16(BLOCK)
    waiting = zeros16(BLOCK)
    for triple in range(num_triples):
        row_ptr = table_ptr + triple * ROW
        # All addresses of the row at once: after the first store the compiler would have to read them again.
        param_ptr = page_ptr(row_ptr, PARAM, tl.int32)
        avg_ptr = page_ptr(row_ptr, EXP_AVG, tl.int32)
        sq_ptr = page_ptr(row_ptr, EXP_AVG_SQ, tl.int32)
        grad_ptr = page_ptr(row_ptr, GRAD, grad_dtype)
        undo_param_ptr = page_ptr(row_ptr, UNDO_PARAM, tl.int32)
        avg_out_ptr = page_ptr(row_ptr, EXP_AVG_OUT, tl.int32)
        sq_out_ptr = page_ptr(row_ptr, EXP_AVG_SQ_OUT, tl.int32)
        if not ROTATE:
            undo_avg_ptr = page_ptr(row_ptr, UNDO_EXP_AVG, tl.int32)
            undo_sq_ptr = page_ptr(row_ptr, UNDO_EXP_AVG_SQ, tl.int32)
        if ORDER != TWO_FENCES:
            waiting_ptr = page_ptr(table_ptr + tl.maximum(triple - 1, 0) * ROW, PARAM, tl.int32)
        if BF16_COPY:
            copy_ptr = page_ptr(row_ptr, COPY, tl.bfloat16)
        old_param = _load_pages(param_ptr, offsets, page_words)
        old_avg = _load_pages(avg_ptr, offsets, page_words)
        old_sq = _load_pages(sq_ptr, offsets, page_words)
        grad = _load_pages(grad_ptr, offsets, page_words)
        _store_pages(undo_param_ptr, old_param, offsets, page_words)
        if not ROTATE:
            _store_pages(undo_avg_ptr, old_avg, offsets, page_words)
            _store_pages(undo_sq_ptr, old_sq, offsets, page_words)
        tile = triple * num_columns + column
        if ORDER == TWO_FENCES:
            mark_saved(flags_ptr, other_flags_ptr, tile, number, NATIVE)
        if ORDER == FENCE_FIRST:
            _mark_and_store(
                flags_ptr, other_flags_ptr, tile, number, waiting_ptr, waiting, triple, offsets, page_words, NATIVE
            )
        for i in tl.static_range(16):
            param, exp_avg, exp_avg_sq = adam_step(
                _floats(old_param[i]), _floats(old_avg[i]), _floats(old_sq[i]), clipped(grad[i], c[8], NATIVE), c,
                FOREACH, DECOUPLED,
            )  # fmt: skip
            at = i * page_words + offsets
            if BF16_COPY:
                tl.store(copy_ptr + at, rounded_to_bf16(param, NATIVE))
            tl.store(avg_out_ptr + at, _words(exp_avg))
            tl.store(sq_out_ptr + at, _words(exp_avg_sq))
            if ORDER == TWO_FENCES:
                tl.store(param_ptr + at, _words(param))
            if i == 0:
                new_param = (_words(param),)
                param_change = (_words(param) ^ old_param[i],)
                avg_change = (_words(exp_avg) ^ old_avg[i],)
                sq_change = (_words(exp_avg_sq) ^ old_sq[i],)
            else:
                new_param = new_param + (_words(param),)
                param_change = param_change + (_words(param) ^ old_param[i],)
                avg_change = avg_change + (_words(exp_avg) ^ old_avg[i],)
                sq_change = sq_change + (_words(exp_avg_sq) ^ old_sq[i],)
        total = xor16(total, inverse_fft16(param_change, factors_ptr + triple * 12, CLMAD))
        total = xor16(total, inverse_fft16(avg_change, factors_ptr + triple * 12 + 4, CLMAD))
        total = xor16(total, inverse_fft16(sq_change, factors_ptr + triple * 12 + 8, CLMAD))
        if ORDER == FENCE_LAST:
            _mark_and_store(
                flags_ptr, other_flags_ptr, tile, number, waiting_ptr, waiting, triple, offsets, page_words, NATIVE
            )
        if ORDER != TWO_FENCES:
            waiting = new_param
    if ORDER != TWO_FENCES:
        fence(NATIVE)
        tl.debug_barrier()
        last_ptr = page_ptr(table_ptr + (num_triples - 1) * ROW, PARAM, tl.int32)
        _store_pages(last_ptr, waiting, offsets, page_words)
    parity = fft16(total, CLMAD)
    for j in tl.static_range(16):
        old = tl.load(page_ptr(parity_ptr, j, tl.int32) + offsets)
        tl.store(page_ptr(out_ptr, j, tl.int32) + offsets, parity[j] ^ old)
