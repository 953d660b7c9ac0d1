"""Multiplication by a fixed weight matrix in e4m3: weights and rows as floats of 8 bits, one scale
for each output feature and one for each row, sums in float32.

Invariants: a row's scale depends on that row alone; products of two e4m3 numbers are exact in
float32, so what is lost is lost in rounding rows and weights.

Device: pure functions of their tensors.
"""

from __future__ import annotations

from functools import cache

import torch

from kernels.quantise_fp8 import Fp8Rows, quantise_rows_fp8

MULTIPLE = 16
"""Of input and output features, which the device's product takes."""

FP8_CAPABILITY = (8, 9)
PROBE_ERROR = 1e-2
"""Of the product that is tried, relative; its result is bfloat16."""


class Fp8Linear:
    """x -> x @ weight.T in 8 bits.

    weight: (out_features, in_features), multiples of MULTIPLE; its dtype is that of the results,
            its device where the product runs

    On a GPU that multiplies e4m3, torch's own operator runs; elsewhere the reference, which
    multiplies in float32.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        self.out_features, self.in_features = weight.shape
        if not fits_fp8(*weight.shape):
            raise ValueError(
                f"fp8 needs multiples of {MULTIPLE} input and output features, "
                f"not {self.in_features} and {self.out_features}"
            )
        self.dtype = weight.dtype
        # A row of the weight is an output feature.
        self.values, self.scales = quantise_rows_fp8(weight)
        self._multiplies = multiplies_fp8(weight.device)

    def __call__(self, x: torch.Tensor | Fp8Rows) -> torch.Tensor:
        """x: (rows, in_features), quantised or to be; returns (rows, out_features)."""
        rows = quantise_rows_fp8(x) if isinstance(x, torch.Tensor) else x
        assert rows.values.shape[1] == self.in_features, f"rows of {rows.values.shape[1]}"
        if not self._multiplies or rows.values.shape[0] == 0:
            return self._reference(rows)
        return multiply_fp8(rows, Fp8Rows(self.values, self.scales)).to(self.dtype)

    def _reference(self, rows: Fp8Rows) -> torch.Tensor:
        sums = rows.values.float() @ self.values.float().T
        return (sums * (rows.scales[:, None] * self.scales)).to(self.dtype)


def fits_fp8(out_features: int, in_features: int) -> bool:
    """Whether a matrix of that shape can be multiplied in e4m3."""
    return all(size > 0 and size % MULTIPLE == 0 for size in (out_features, in_features))


def multiply_fp8(rows: Fp8Rows, weight: Fp8Rows) -> torch.Tensor:
    """rows @ weight.T by torch's operator: (rows, out_features) bfloat16, the one type that it
    gives with a scale for each row and column.
    """
    return torch._scaled_mm(
        rows.values,
        weight.values.T,
        scale_a=rows.scales[:, None],
        scale_b=weight.scales[None, :],
        out_dtype=torch.bfloat16,
    )


@cache
def multiplies_fp8(device: torch.device) -> bool:
    """Whether ``multiply_fp8`` works there, by trying: the operator is not public, and what it
    takes depends on the device and on torch's version.
    """
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < FP8_CAPABILITY:
        return False
    numbers = torch.linspace(-2.0, 3.0, 4 * MULTIPLE * MULTIPLE, device=device)
    x = quantise_rows_fp8(numbers.view(4, -1)[:3].contiguous())
    weight = quantise_rows_fp8(numbers.flip(0).view(4, -1).repeat(MULTIPLE, 1))
    wanted = (x.values.float() * x.scales[:, None]) @ (
        weight.values.float() * weight.scales[:, None]
    ).T
    try:
        found = multiply_fp8(x, weight).float()
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return False
    return bool((found - wanted).norm() <= PROBE_ERROR * wanted.norm())
