"""Root-mean-square normalisation, alone and fused with the residual addition.

Device: pure functions of their tensors. Source of the formula: Zhang and Sennrich 2019,
arXiv 1910.07467, with the rounding points of the Llama reference implementation.
"""

from __future__ import annotations

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """y = round(x / sqrt(mean(x^2) + epsilon)) * weight.

    x:       (..., hidden_size) float32|bfloat16|float16
    weight:  (hidden_size), dtype of x
    returns: shape and dtype of x

    The mean is taken in float32; the normalised value is rounded to the dtype of x before it meets
    the weight, as Llama checkpoints were trained (a float32 product gives other bits in bfloat16).
    """
    assert weight.dtype == x.dtype, f"weight {weight.dtype} and x {x.dtype} differ"
    wide = x.float()
    variance = wide.square().mean(dim=-1, keepdim=True)
    return (wide * torch.rsqrt(variance + epsilon)).to(x.dtype) * weight


def fused_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """residual' = residual + x; y = rms_norm(residual'); returns (y, residual').

    x, residual: (..., hidden_size), one dtype; both results have it too
    """
    total = residual + x
    return rms_norm(total, weight, epsilon), total
