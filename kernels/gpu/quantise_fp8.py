"""Rows as e4m3 in Triton, alone and fused with the normalisation before a product: see
``kernels.quantise_fp8`` and ``kernels.rms_norm``.

Invariant: one program to a row, so a row's bits are the same in any company.

Device: pure functions of their tensors.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.gpu.kv_bytes import FP8, check_fp8, head_scale, row_peak, to_stored
from kernels.quantise_fp8 import Fp8Rows


@triton.jit
def quantise_fp8_kernel(
    x,
    residual,
    weight,
    total,
    values,
    scales,
    x_stride,
    size,
    epsilon,
    SIZE_PAD: tl.constexpr,
    ADDS: tl.constexpr,
    NORMS: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """Grid (rows). With ADDS, total = residual + x is written too; with NORMS, what is rounded is
    the normalised row.
    """
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, SIZE_PAD)
    inside = columns < size
    held = tl.load(x + row * x_stride + columns, mask=inside, other=0.0)
    if ADDS:
        held += tl.load(residual + row * size + columns, mask=inside, other=0.0)
        tl.store(total + row * size + columns, held, mask=inside)
    wide = held.to(tl.float32)
    if NORMS:
        variance = tl.sum(wide * wide, axis=0) / size
        # The rounding points of the normalisation alone: before the weight, and after it.
        normal = (wide * tl.rsqrt(variance + epsilon)).to(held.dtype)
        wide = (normal * tl.load(weight + columns, mask=inside, other=0.0)).to(tl.float32)
    peak, bad = row_peak(wide)
    factor, scale = head_scale(peak, bad, FORMAT)
    tl.store(values + row * size + columns, to_stored(wide, factor, FORMAT), mask=inside)
    tl.store(scales + row, scale)


def quantise_rows_triton(x: torch.Tensor) -> Fp8Rows:
    """x (num_rows, size), last stride 1. Raises ValueError where the device has no e4m3."""
    return _run(x, None, None, 0.0)[0]


def rms_norm_fp8_triton(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, epsilon: float
) -> tuple[Fp8Rows, torch.Tensor]:
    """(rms_norm(residual + x) quantised, residual + x); without a residual the second is x itself.

    Shapes as in ``kernels.gpu.rms_norm``; nothing is written in the dtype of x but the sum. Raises
    ValueError where the device has no e4m3.
    """
    return _run(x, residual, weight, epsilon)


def _run(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor | None, epsilon: float
) -> tuple[Fp8Rows, torch.Tensor]:
    check_fp8(x)
    num_rows, size = x.shape
    values = torch.empty((num_rows, size), dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(num_rows, dtype=torch.float32, device=x.device)
    total = x if residual is None else torch.empty((num_rows, size), dtype=x.dtype, device=x.device)
    if num_rows:
        quantise_fp8_kernel[(num_rows,)](
            x,
            x if residual is None else residual,
            x if weight is None else weight,
            total,
            values,
            scales,
            x.stride(0),
            size,
            epsilon,
            SIZE_PAD=triton.next_power_of_2(size),
            ADDS=residual is not None,
            NORMS=weight is not None,
            FORMAT=FP8,
        )
    return Fp8Rows(values, scales), total
