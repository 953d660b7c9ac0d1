"""Rows of numbers as bytes with one scale each, after a rotation that spreads what sticks out.

A model's activations have a few features far larger than the others, and one scale for a row would
leave the others no precision. Multiplied by a Hadamard matrix in blocks of ROTATED features, every
feature carries a share of each; the weights are rotated alike, so products stay what they were.

Invariants: a row's bytes and scale depend on that row alone, and are the same from the reference
and from every native instruction set; a row that is not finite has the scale NaN.

Device: pure functions of their tensors. Source: QuaRot, Ashkboos et al. 2024, arXiv 2404.00456.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from kernels.native import NativeKernels
from kernels.native.arguments import QuantiseArguments

ROTATED = 64
"""Features that are rotated together; ``library.h`` has the same numbers here and below."""

ZERO_BYTE = 128
SMALLEST_PEAK = 1e-30
"""A row of smaller numbers is a row of zeros: the inverse of its scale could overflow."""


class QuantisedRows(NamedTuple):
    """Row r, rotated, is (values[r] - ZERO_BYTE) * scales[r].

    values: (rows, features) uint8, contiguous
    scales: (rows) float32, contiguous
    """

    values: torch.Tensor
    scales: torch.Tensor


def empty_rows(num_rows: int, num_features: int) -> QuantisedRows:
    """Room for an operation to write to."""
    values = torch.empty(num_rows, num_features, dtype=torch.uint8)
    return QuantisedRows(values, torch.empty(num_rows, dtype=torch.float32))


def row_addresses(
    rows: QuantisedRows | None, shape: tuple[int, ...]
) -> tuple[int | None, int | None]:
    """Of values and scales, for a native operation that writes rows of this shape."""
    if rows is None:
        return None, None
    assert rows.values.shape == shape and rows.scales.shape == shape[:1], "rows of another shape"
    assert shape[1] % ROTATED == 0, f"{shape[1]} features are not a multiple of {ROTATED}"
    return rows.values.data_ptr(), rows.scales.data_ptr()


def rotate(x: torch.Tensor) -> torch.Tensor:
    """x times the Hadamard matrix (entries 1 and -1) in each block of ROTATED features: float32.

    x: (rows, features), features a multiple of ROTATED

    Sums and differences of pairs 32 apart, then 16, and so on to 1; the native code has this order.
    """
    width, rows = ROTATED // 2, x.float()
    while width:
        first, second = rows.reshape(x.shape[0], x.shape[1] // (2 * width), 2, width).unbind(2)
        rows = torch.stack((first + second, first - second), dim=2)
        width //= 2
    return rows.reshape(x.shape)


def quantise_rows(x: torch.Tensor, native: NativeKernels | None = None) -> QuantisedRows:
    """The rows of x rotated and rounded to bytes.

    x:      (rows, features) float32|bfloat16, features a multiple of ROTATED
    native: the loaded library, used where it takes the dtype
    """
    into = empty_rows(*x.shape)
    if native is not None and native.takes(x):
        arguments = QuantiseArguments(
            x.data_ptr(),
            into.values.data_ptr(),
            into.scales.data_ptr(),
            x.stride(0),
            *x.shape,
            x.dtype == torch.bfloat16,
            torch.get_num_threads(),
        )
        native.run("quantise", arguments)
    else:
        write_rows(x, into)
    return into


def write_rows(x: torch.Tensor, into: QuantisedRows) -> None:
    """The reference: ``quantise_rows`` by torch, into rows that are there.

    scale = max|x| / 127, byte = round(x * (127 / max|x|)) + ZERO_BYTE, ties to even
    """
    rotated = rotate(x)
    peaks = rotated.abs().amax(dim=1)
    finite = torch.isfinite(rotated).all(dim=1)
    kept = finite & (peaks >= SMALLEST_PEAK)
    factors = torch.where(kept, 127.0 / torch.where(kept, peaks, 1.0), 0.0)
    whole = torch.round(torch.where(kept[:, None], rotated, 0.0) * factors[:, None])
    into.values.copy_(whole + ZERO_BYTE)
    scales = torch.where(kept, peaks / 127.0, 0.0)
    into.scales.copy_(torch.where(finite, scales, float("nan")))
