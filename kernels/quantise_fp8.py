"""Rows of numbers as e4m3 floats with one scale each, for products on a GPU.

Invariants: a row's bytes and scale depend on that row alone; a row that is not finite has the scale
NaN, so that its products are NaN and no other row's are.

Device: pure function of its tensor.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from kernels.quantise import SMALLEST_PEAK

LARGEST = 448.0
"""Of e4m3; what a row's largest magnitude becomes."""


class Fp8Rows(NamedTuple):
    """Row r is values[r] * scales[r].

    values: (rows, features) float8_e4m3fn, contiguous
    scales: (rows) float32, contiguous
    """

    values: torch.Tensor
    scales: torch.Tensor


def quantise_rows_fp8(x: torch.Tensor) -> Fp8Rows:
    """The rows of x, rounded to the nearest, ties to even.

    x: (rows, features) float32|bfloat16|float16

    scale = max|x| / 448, value = round(x * (448 / max|x|)); a row whose largest is below
    SMALLEST_PEAK is a row of zeros with the scale 0
    """
    wide = x.float()
    finite = torch.isfinite(wide).all(dim=1)
    peaks = wide.abs().amax(dim=1)
    kept = finite & (peaks >= SMALLEST_PEAK)
    # A number over a tensor would be its reciprocal times the number, which is rounded twice.
    factors = torch.where(kept, torch.tensor(LARGEST) / torch.where(kept, peaks, 1.0), 0.0)
    shrunk = torch.where(kept[:, None], wide, 0.0) * factors[:, None]
    # Rounding may pass the largest by a bit, and not every cast saturates.
    values = shrunk.clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    scales = torch.where(kept, peaks / LARGEST, torch.where(finite, 0.0, float("nan")))
    return Fp8Rows(values, scales)
