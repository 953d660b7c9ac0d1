"""Root-mean-square normalisation in Triton, fused with the residual addition: see
``kernels.rms_norm``, whose rounding points it keeps.

Invariant: one program to a row, so a row's bits are the same in any company.

Device: pure functions of their tensors.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def rms_norm_kernel(
    x,
    residual,
    weight,
    total,
    out,
    x_stride,
    size,
    epsilon,
    SIZE_PAD: tl.constexpr,
    ADDS: tl.constexpr,
):
    """Grid (rows). With ADDS, total = residual + x is written too, and normalised."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, SIZE_PAD)
    inside = columns < size
    values = tl.load(x + row * x_stride + columns, mask=inside, other=0.0)
    if ADDS:
        values += tl.load(residual + row * size + columns, mask=inside, other=0.0)
        tl.store(total + row * size + columns, values, mask=inside)
    wide = values.to(tl.float32)
    variance = tl.sum(wide * wide, axis=0) / size
    # Rounded to the dtype before it meets the weight, as Llama checkpoints were trained.
    normal = (wide * tl.rsqrt(variance + epsilon)).to(values.dtype)
    scaled = normal * tl.load(weight + columns, mask=inside, other=0.0)
    tl.store(out + row * size + columns, scaled, mask=inside)


def rms_norm_triton(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(y, residual'); without a residual the second is x itself.

    x:        (num_rows, hidden_size), last stride 1
    residual: as x, contiguous, or None
    weight:   (hidden_size), dtype of x
    """
    num_rows, size = x.shape
    out = torch.empty((num_rows, size), dtype=x.dtype, device=x.device)
    total = x if residual is None else torch.empty_like(out)
    if num_rows:
        rms_norm_kernel[(num_rows,)](
            x,
            x if residual is None else residual,
            weight,
            total,
            out,
            x.stride(0),
            size,
            epsilon,
            SIZE_PAD=triton.next_power_of_2(size),
            ADDS=residual is not None,
        )
    return out, total
