"""Coefficients of Adam and AdamW for the update kernels, with the bits of the torch step that they replace.

Two roundings are known: `fused` is torch.optim.AdamW(fused=True) and Adam(fused=True), whose kernel takes every number
as fp32 and computes the bias corrections on the device; `foreach` is torch's default on CUDA, whose numbers are
computed in double precision on the host and rounded once. Both for torch 2.11 to 2.13 and fp32 state, without amsgrad,
maximize and capturable; benchmarks/kernel_checks.py compares every bit on the GPU where it runs.

`_update_pages` and `_fused_update` call the same `adam_step`, so they agree bit for bit with each other everywhere.
bf16 gradients are widened after the product with the clip coefficient was rounded to bf16, as an in-place product
leaves them. Before 2.11 torch's fused kernel computes the moments in double precision, with the betas in double: there
a moment differs by two roundings a step and by what fp32 makes of 1 - beta, which is off by up to 2^-25 / (1 - beta) of
itself, 3e-5 for 0.999. Triton's interpreter rounds the product of a multiply-add, and differs from a GPU by that.
"""

from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

NUM_COEFFICIENTS = 8


class Rounding(StrEnum):
    """Which of torch's steps is reproduced bit for bit."""

    FUSED = "fused"
    FOREACH = "foreach"


@dataclass(frozen=True)
class AdamStep:
    """Numbers of one step, as the optimizer's parameter group has them.

    Args:
        lr: Learning rate.
        betas: Decay of the first and second moment, each in [0, 1).
        eps: Added to the root of the second moment.
        weight_decay: 0 for none.
        step: Of this update, counted from 1.
        decoupled: AdamW; else Adam, whose decay is part of the gradient.
        rounding: Of which torch step.

    Raises:
        ValueError: A number is out of its range.
    """

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    step: int
    decoupled: bool = True
    rounding: Rounding = Rounding.FUSED

    def __post_init__(self) -> None:
        if self.lr < 0 or self.eps < 0 or self.weight_decay < 0:
            raise ValueError("lr, eps and weight_decay must not be negative")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas must be in [0, 1), not {self.betas}")
        if self.step < 1:
            raise ValueError(f"step must count from 1, not {self.step}")

    def write(self, out: Tensor) -> None:
        """Write the kernels' coefficients, on the device where they will be read, as torch computes them there.

        Args:
            out: fp32 [8]; retained, so that a resumed chunk reads the same bits.

        Raises:
            ValueError: `out` has another shape or type.
        """
        if out.shape != (NUM_COEFFICIENTS,) or out.dtype != torch.float32:
            raise ValueError(f"out must be fp32 [{NUM_COEFFICIENTS}], not {out.dtype} {tuple(out.shape)}")
        decays = float(self.weight_decay != 0)
        beta1, beta2 = self.betas
        if self.rounding is Rounding.FOREACH:
            decay = 1 - self.lr * self.weight_decay if self.decoupled else self.weight_decay
            step_size = -(self.lr / (1 - beta1**self.step))
            root = (1 - beta2**self.step) ** 0.5
            out.copy_(torch.tensor([1 - beta1, beta2, 1 - beta2, decay, self.eps, step_size, root, decays]))
            return
        numbers = [beta1, beta2, 0.0, self.weight_decay, self.eps, self.lr, float(self.step), decays]
        given = torch.tensor(numbers, dtype=torch.float32).to(out.device)
        bias1, bias2 = (1 - torch.pow(given[:2], given[6])).unbind()
        decay_1 = given[3] * given[5] if self.decoupled else given[3]
        out.copy_(given)
        out[3], out[5], out[6] = decay_1, given[5] / bias1, bias2.sqrt()


def adam_torch(
    param: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, grad: Tensor, step: AdamStep, *, clip: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Reference of one step in double precision: new parameter and moments, rounded once to fp32."""
    beta1, beta2 = step.betas
    p, m, v = param.double(), exp_avg.double(), exp_avg_sq.double()
    g = (grad.float() * clip).to(grad.dtype).double()
    if step.decoupled:
        p = p - step.lr * step.weight_decay * p
    else:
        g = g + step.weight_decay * p
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g * g
    denominator = (v / (1 - beta2**step.step)).sqrt() + step.eps
    p = p - step.lr / (1 - beta1**step.step) * m / denominator
    return p.float(), m.float(), v.float()
