"""One product, to see that what was compiled runs and is right."""

import triton
import triton.language as tl

from leto_strategy.triton_kernels._field_kernels import multiply_add


@triton.jit(do_not_specialize=["word", "factor", "addend"])
def _multiply(out_ptr, word, factor, addend, CLMAD: tl.constexpr):
    """Out = word * factor + addend."""
    zero = tl.zeros((32,), tl.int32)
    value = multiply_add(zero + word, factor.to(tl.int64), zero + addend, CLMAD)
    tl.store(out_ptr + tl.arange(0, 32), value, mask=tl.arange(0, 32) == 0)
