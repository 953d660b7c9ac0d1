"""Rotary position embedding in the half-split ("NeoX") layout.

Invariants: angles are computed in float64 and the tables kept in float32, whatever the model's
dtype; position 0 is the identity.

Device: pure functions of their tensors. Source: Su et al. 2021, arXiv 2104.09864.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def build_rope_table(
    rotary_dim: int,
    num_positions: int,
    theta: float,
    factors: Sequence[float] | None = None,
) -> torch.Tensor:
    """Table of cosines and sines: (num_positions, rotary_dim) float32, cosines first.

    factors: (rotary_dim / 2) - each frequency is divided by its factor (Llama 3 scaling, and the
             ``rope_freqs`` tensor of GGUF files); None means all 1

    angle(p, i) = p * theta^(-2i / rotary_dim) / factors[i]
    """
    assert rotary_dim % 2 == 0, f"rotary_dim {rotary_dim} is odd"
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim
    frequencies = torch.pow(torch.tensor(theta, dtype=torch.float64), -exponents)
    if factors is not None:
        assert len(factors) == rotary_dim // 2, "one factor for each frequency"
        frequencies = frequencies / torch.tensor(factors, dtype=torch.float64)
    angles = torch.arange(num_positions, dtype=torch.float64).unsqueeze(1) * frequencies
    return torch.cat((angles.cos(), angles.sin()), dim=1).float()


def apply_rope(x: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """Rotate the first rotary_dim elements of every head; the rest passes through.

    x:       (num_tokens, num_heads, head_dim) float32|bfloat16|float16
    cos_sin: (num_tokens, rotary_dim) float32 - the table's row for each token's position
    returns: shape and dtype of x

    With halves a and b of a head: (a cos - b sin, b cos + a sin), in float32, rounded once.
    """
    half = cos_sin.shape[1] // 2
    cos = cos_sin[:, None, :half]
    sin = cos_sin[:, None, half:]
    first = x[..., :half].float()
    second = x[..., half : 2 * half].float()
    rotated = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rotated[..., :half] = first * cos - second * sin
    rotated[..., half : 2 * half] = second * cos + first * sin
    if 2 * half < x.shape[-1]:
        rotated[..., 2 * half :] = x[..., 2 * half :]
    return rotated
