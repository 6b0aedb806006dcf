"""Device functions of GF(2^32) = GF(2)[x]/(x^32 + x^7 + x^3 + x^2 + 1): products, and the additive FFT over 16 words.

A symbol is a 32-bit word, held as int32. Products come in two forms with the same value: `clmad`, the carry-less
multiply-add of PTX 9.3 (sm_80 and later), and 16 integer products of operands masked to every fourth bit, whose sums
can't carry into a neighbour. `CLMAD` picks one when a kernel is compiled.
"""

import triton
import triton.language as tl

POLYNOMIAL = tl.constexpr(0x1_0000_008D)
# floor(x^64 / polynomial), for Barrett's reduction: equal to the polynomial, whose second term has so low a degree.
RECIPROCAL = tl.constexpr(0x1_0000_008D)

# Normalised subspace polynomials s_1 at 4 and 8, s_2 at 8: what distinguishes the butterflies of a level in one block.
LEVEL1_AT_4, LEVEL1_AT_8, LEVEL2_AT_8 = 0x06, 0x1C, 0x16


@triton.jit
def _widen(word):
    return word.to(tl.uint32, bitcast=True).to(tl.uint64)


@triton.jit
def _clmad_low(a, b, c):
    return tl.inline_asm_elementwise(
        "clmad.lo.u64 $0, $1, $2, $3;", "=l,l,l,l", [a, b, c], dtype=tl.uint64, is_pure=True, pack=1
    )


@triton.jit
def _clmad_high(a, b):
    return tl.inline_asm_elementwise(
        "clmad.hi.u64 $0, $1, $2, 0;", "=l,l,l", [a, b], dtype=tl.uint64, is_pure=True, pack=1
    )


@triton.jit
def _wide_product(a, b):
    return a.to(tl.uint64) * b.to(tl.uint64)


@triton.jit
def _carryless_product(a, b):
    """32 x 32 -> 64 bits from 16 integer products. In each at most 8 ones meet, which three spare bits can hold."""
    a0, a1, a2, a3 = a & 0x11111111, a & 0x22222222, a & 0x44444444, a & 0x88888888
    b0, b1, b2, b3 = b & 0x11111111, b & 0x22222222, b & 0x44444444, b & 0x88888888
    c0 = _wide_product(a0, b0) ^ _wide_product(a1, b3) ^ _wide_product(a2, b2) ^ _wide_product(a3, b1)
    c1 = _wide_product(a0, b1) ^ _wide_product(a1, b0) ^ _wide_product(a2, b3) ^ _wide_product(a3, b2)
    c2 = _wide_product(a0, b2) ^ _wide_product(a1, b1) ^ _wide_product(a2, b0) ^ _wide_product(a3, b3)
    c3 = _wide_product(a0, b3) ^ _wide_product(a1, b2) ^ _wide_product(a2, b1) ^ _wide_product(a3, b0)
    low = (c0 & 0x1111111111111111) | (c1 & 0x2222222222222222)
    return low | (c2 & 0x4444444444444444) | (c3 & 0x8888888888888888)


@triton.jit
def reduce_product(product, CLMAD: tl.constexpr):
    """Residue of a polynomial of degree below 64: uint64 -> int32."""
    if CLMAD:
        quotient = _clmad_high(product, tl.full([1], RECIPROCAL, tl.uint64))
        rest = _clmad_low(quotient, tl.full([1], POLYNOMIAL, tl.uint64), product)
        return rest.to(tl.uint32).to(tl.int32, bitcast=True)
    else:
        low = product.to(tl.uint32)
        high = (product >> 32).to(tl.uint32)
        high = high ^ (high >> 30) ^ (high >> 29) ^ (high >> 25)
        return (low ^ high ^ (high << 2) ^ (high << 3) ^ (high << 7)).to(tl.int32, bitcast=True)


@triton.jit
def accumulate(total, word, factor, CLMAD: tl.constexpr):
    """Total + word * factor without reduction. total uint64, word int32, factor an int64 scalar below 2^32."""
    if CLMAD:
        return _clmad_low(_widen(word), factor.to(tl.uint64), total)
    else:
        return total ^ _carryless_product(word.to(tl.uint32, bitcast=True), factor.to(tl.uint32))


@triton.jit
def multiply_add(word, factor, addend, CLMAD: tl.constexpr):
    """Word * factor + addend. word and addend int32, factor an int64 scalar below 2^32."""
    if CLMAD:
        return reduce_product(_clmad_low(_widen(word), factor.to(tl.uint64), _widen(addend)), CLMAD)
    else:
        product = _carryless_product(word.to(tl.uint32, bitcast=True), factor.to(tl.uint32))
        return addend ^ reduce_product(product, CLMAD)


@triton.jit
def xor16(a, b):
    """Sum of two tuples of 16 words."""
    out = (a[0] ^ b[0],)
    for i in tl.static_range(1, 16):
        out = out + (a[i] ^ b[i],)
    return out


@triton.jit
def zeros16(BLOCK: tl.constexpr):
    """16 words of zeros."""
    zero = tl.zeros((BLOCK,), tl.int32)
    out = (zero,)
    for _ in tl.static_range(1, 16):
        out = out + (zero,)
    return out


@triton.constexpr_function
def _local(level, index):
    """What the butterfly of page `index` adds to its block's factor at a level."""
    if level == 0:
        return index & 14
    if level == 1:
        return (index >> 2 & 1) * LEVEL1_AT_4 ^ (index >> 3 & 1) * LEVEL1_AT_8
    return (index >> 3 & 1) * LEVEL2_AT_8 if level == 2 else 0


@triton.jit
def _inverse_level(d, factor, LEVEL: tl.constexpr, CLMAD: tl.constexpr):
    STRIDE: tl.constexpr = 1 << LEVEL
    out = (d[0] ^ d[STRIDE],)
    for i in tl.static_range(1, 16):
        if i & STRIDE == 0:
            out = out + (d[i] ^ d[i + STRIDE],)
        else:
            out = out + (multiply_add(d[i - STRIDE] ^ d[i], factor ^ _local(LEVEL, i), d[i], CLMAD),)
    return out


@triton.jit
def inverse_fft16(d, factors_ptr, CLMAD: tl.constexpr):
    """16 words, one of each page of a block, to the block's 16 partial sums.

    32 products. `factors_ptr` points to the block's four factors, int64: s_k at the block's first point.
    """
    for level in tl.static_range(4):
        d = _inverse_level(d, tl.load(factors_ptr + level), level, CLMAD)
    return d


@triton.jit
def _forward_upper(d, INDEX: tl.constexpr, STRIDE: tl.constexpr, LOCAL: tl.constexpr, CLMAD: tl.constexpr):
    if LOCAL == 0:
        return d[INDEX]
    else:
        return multiply_add(d[INDEX - STRIDE], tl.full([1], LOCAL, tl.int64), d[INDEX], CLMAD)


@triton.jit
def _forward_level(d, LEVEL: tl.constexpr, CLMAD: tl.constexpr):
    STRIDE: tl.constexpr = 1 << LEVEL
    out = (d[0] ^ d[STRIDE],)  # the first butterfly's factor is 0 at every level
    for i in tl.static_range(1, 16):
        if i & STRIDE == 0:
            out = out + (d[i] ^ _forward_upper(d, i + STRIDE, STRIDE, _local(LEVEL, i), CLMAD),)
        else:
            out = out + (_forward_upper(d, i, STRIDE, _local(LEVEL, i), CLMAD),)
    return out


@triton.jit
def fft16(d, CLMAD: tl.constexpr):
    """Sums of the blocks' partial sums to the 16 parity words, whose points are 0 to 15. 17 products."""
    for level in tl.static_range(4):
        d = _forward_level(d, 3 - level, CLMAD)
    return d
