"""Plain references of the parity kernels in torch, on any device: what checks and tests compare with."""

import torch
from torch import Tensor

WORD_BITS = 32
POLYNOMIAL = 0x1_0000_008D


def apply_matrix_torch(pages_PW: Tensor, matrix_PH: Tensor) -> Tensor:
    """Reference of `parity.apply_matrix` for int32 pages [P, W]: int32 [H, W].

    A product with a symbol is linear over bits: bit b of a word adds the symbol times x^b. So all outputs are one
    product of matrices of bits, whose entries are the numbers of ones that meet; their lowest bits are the result.
    fp32 holds such numbers exactly below 2^24.
    """
    device = pages_PW.device
    factor_PH, bits = matrix_PH.to(device), torch.arange(WORD_BITS, device=device)
    shifted = []
    for _ in range(WORD_BITS):
        shifted.append(factor_PH)
        factor_PH = (factor_PH << 1) ^ (factor_PH >> 31) * POLYNOMIAL
    shifted_PBH = torch.stack(shifted, dim=1)
    weights = (shifted_PBH[..., None] >> bits & 1).float().flatten(0, 1).flatten(1, 2)  # [P * 32, H * 32]
    ones = (pages_PW[:, None, :] >> bits[None, :, None] & 1).float().flatten(0, 1)  # [P * 32, W]
    counts_HBW = (weights.T @ ones).to(torch.int64).view(-1, WORD_BITS, pages_PW.shape[1]) & 1
    words_HW = (counts_HBW << bits[:, None]).sum(dim=1)
    return torch.where(words_HW >= 2**31, words_HW - 2**32, words_HW).to(torch.int32)


def xor_torch(pages_PW: Tensor) -> Tensor:
    """Reference of `parity.xor`: int32 [W]."""
    out_W = torch.zeros_like(pages_PW[0])
    for page in pages_PW:
        out_W ^= page
    return out_W
