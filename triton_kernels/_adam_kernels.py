"""Adam and AdamW on tiles of fp32 state, in the order of rounding of the torch step that they replace.

Kernels that call these are compiled with `enable_fp_fusion=False`: a product and a sum are contracted where `tl.fma`
says so and nowhere else, as nvcc did in torch.
"""

import triton
import triton.language as tl


@triton.jit
def load_coefficients(coefficients_ptr, clip_ptr):
    """The eight numbers of `adam.AdamCoefficients`, then the clip coefficient."""
    out = (tl.load(coefficients_ptr),)
    for i in tl.static_range(1, 8):
        out = out + (tl.load(coefficients_ptr + i),)
    return out + (tl.load(clip_ptr),)


@triton.jit
def rounded_to_bf16(value, NATIVE: tl.constexpr):
    """fp32 to bf16, to nearest, ties to even, as torch's `.bfloat16()`.

    Triton's interpreter cuts the low half off where the hardware rounds, so it gets the rounding in integers.
    """
    if NATIVE:
        return value.to(tl.bfloat16)
    else:
        bits = value.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        rounded = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC0, rounded)
        return rounded.to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _widened(value):
    """bf16 to fp32 by its bits: the interpreter loses subnormal numbers otherwise."""
    return (value.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def clipped(grad, clip, NATIVE: tl.constexpr):
    """The gradient as an in-place product with the clip coefficient would have left it, as fp32."""
    if grad.dtype == tl.bfloat16:
        return _widened(rounded_to_bf16(_widened(grad) * clip, NATIVE))
    else:
        return grad * clip


@triton.jit
def adam_step(param, exp_avg, exp_avg_sq, grad, c, FOREACH: tl.constexpr, DECOUPLED: tl.constexpr):
    """One step; all fp32. FOREACH: the rounding of torch's foreach step, else that of its fused kernel."""
    decays = c[7] != 0.0
    if FOREACH:
        if DECOUPLED:
            param = tl.where(decays, param * c[3], param)
        else:
            grad = tl.where(decays, tl.fma(param, c[3], grad), grad)
        change = grad - exp_avg
        exp_avg = tl.where(tl.abs(c[0]) < 0.5, tl.fma(c[0], change, exp_avg), tl.fma(-change, 1.0 - c[0], grad))
        exp_avg_sq = tl.fma(c[2], grad * grad, exp_avg_sq * c[1])
        denominator = tl.div_rn(tl.sqrt_rn(exp_avg_sq), c[6]) + c[4]
        param = tl.fma(c[5], tl.div_rn(exp_avg, denominator), param)
    else:
        if DECOUPLED:
            param = tl.where(decays, tl.fma(-c[3], param, param), param)
        else:
            grad = tl.where(decays, tl.fma(param, c[3], grad), grad)
        square = grad * grad
        exp_avg = tl.fma(c[0], exp_avg, tl.fma(-c[0], grad, grad))
        exp_avg_sq = tl.fma(c[1], exp_avg_sq, tl.fma(-c[1], square, square))
        denominator = tl.div_rn(tl.sqrt_rn(exp_avg_sq), c[6]) + c[4]
        param = param - tl.div_rn(c[5] * exp_avg, denominator)
    return param, exp_avg, exp_avg_sq
