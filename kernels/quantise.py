"""Rows of numbers as bytes with one scale each, after a rotation that spreads what sticks out.

A model's activations have a few features far larger than the others, and one scale for a row would
leave the others no precision. Multiplied by an orthogonal matrix, every feature carries a share of
each; the weights are rotated alike, so products stay what they were, but for a factor. The matrix
is Hadamard's in blocks of ROTATED features, then between the blocks, by twos and threes as long as
their number can be divided. A row that ends within a block is filled up with zeros.

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
MAX_INT8_FEATURES = 65_536
"""Sums of products of bytes stay within 32 bits."""

SMALLEST_PEAK = 1e-30
"""A row of smaller numbers is a row of zeros: the inverse of its scale could overflow."""


class QuantisedRows(NamedTuple):
    """Row r, rotated, is (values[r] - ZERO_BYTE) * scales[r].

    values: (rows, features, filled up to whole blocks) uint8, contiguous
    scales: (rows) float32, contiguous
    """

    values: torch.Tensor
    scales: torch.Tensor


def whole_blocks(num_features: int) -> int:
    """The features and the zeros that fill their last block."""
    return -(-num_features // ROTATED) * ROTATED


def empty_rows(num_rows: int, num_features: int) -> QuantisedRows:
    """Room for an operation to write to."""
    values = torch.empty(num_rows, whole_blocks(num_features), dtype=torch.uint8)
    return QuantisedRows(values, torch.empty(num_rows, dtype=torch.float32))


def row_addresses(
    rows: QuantisedRows | None, shape: tuple[int, ...]
) -> tuple[int | None, int | None]:
    """Of values and scales, for a native operation that writes rows of this shape."""
    if rows is None:
        return None, None
    num_rows, num_features = shape
    expected = (num_rows, whole_blocks(num_features))
    assert rows.values.shape == expected, f"rows {rows.values.shape}, not {expected}"
    assert rows.scales.shape == (num_rows,), "a scale for each row"
    assert num_features <= MAX_INT8_FEATURES, f"{num_features} features in a row"
    return rows.values.data_ptr(), rows.scales.data_ptr()


def rotate(x: torch.Tensor) -> torch.Tensor:
    """x times a matrix that is orthogonal but for its size: (rows, whole blocks) float32.

    x: (rows, features)

    Within blocks: sums and differences of pairs 32 apart, then 16, and so on to 1. Between blocks:
    neighbours, then pairs of them, and so on; then threes. The native code has this order.
    """
    size = whole_blocks(x.shape[1])
    rows = torch.nn.functional.pad(x.float(), (0, size - x.shape[1]))
    width = ROTATED // 2
    while width:
        rows = _mix(rows, 2, width)
        width //= 2
    apart = ROTATED
    for number in (2, 3):
        while size % (number * apart) == 0:
            rows = _mix(rows, number, apart)
            apart *= number
    return rows


def rotation_gain(num_features: int) -> int:
    """What a product of two rows is multiplied by when both are rotated."""
    blocks, gain = whole_blocks(num_features) // ROTATED, ROTATED
    for number, grows in ((2, 2), (3, 9)):
        while blocks % number == 0:
            blocks, gain = blocks // number, gain * grows
    return gain


def _mix(rows: torch.Tensor, number: int, apart: int) -> torch.Tensor:
    """Two or three features that lie so far apart: sum and difference, or 3 - 2 * ones."""
    groups = rows.shape[1] // (number * apart)
    parts = rows.reshape(rows.shape[0], groups, number, apart).unbind(2)
    mixed: tuple[torch.Tensor, ...]
    if number == 2:
        mixed = (parts[0] + parts[1], parts[0] - parts[1])
    else:
        a, b, c = parts
        mixed = ((a - 2 * b) - 2 * c, (b - 2 * a) - 2 * c, (c - 2 * a) - 2 * b)
    return torch.stack(mixed, dim=2).reshape(rows.shape)


def quantise_rows(x: torch.Tensor, native: NativeKernels | None = None) -> QuantisedRows:
    """The rows of x rotated and rounded to bytes.

    x:      (rows, features) float32|bfloat16, features at most MAX_INT8_FEATURES
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
    # A number over a tensor would be rounded twice: as the number times the reciprocal.
    factors = torch.full_like(peaks, 127.0) / torch.where(kept, peaks, 1.0)
    whole = torch.round(torch.where(kept[:, None], rotated, 0.0) * factors[:, None])
    into.values.copy_(whole + ZERO_BYTE)
    scales = torch.where(kept, peaks / 127.0, 0.0)
    into.scales.copy_(torch.where(finite, scales, float("nan")))
