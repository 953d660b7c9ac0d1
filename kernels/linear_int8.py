"""Multiplication by a fixed weight matrix in 8 bits: weights and rows as bytes, sums in int32.

Invariants: sums are exact, so a row's result has the same bits whatever the other rows, the number
of threads, and the instruction set, the torch reference included; weights have one scale for each
output feature and are rotated as the rows are (``kernels.quantise``).

Device: pure functions of their tensors.
"""

from __future__ import annotations

import torch

from kernels.native import NativeKernels
from kernels.native.arguments import LinearInt8Arguments
from kernels.quantise import (
    ROTATED,
    SMALLEST_PEAK,
    ZERO_BYTE,
    QuantisedRows,
    quantise_rows,
    rotate,
)

PANEL = 64
"""Output features of a packed panel; the same as in ``library.h``."""

MAX_INT8_FEATURES = 65_536
"""Sums of products of bytes stay within 32 bits; the same as in ``library.h``."""

ROWS_AT_ONCE = 512
"""Of a weight that is rotated: few enough for the cache, and for an output head of any size."""

EXACT_FEATURES = 1024
"""A float32 product over so few features is exact: 1,024 * 127 * 127 < 2^24."""


class Int8Linear:
    """x -> x @ weight.T in 8 bits.

    weight: (out_features, in_features), in_features a multiple of ROTATED; its dtype is that of the
            results
    native: the loaded library; without one the reference runs

    ``panels``, ``start`` and ``scales`` are what the native code reads: see ``linear_int8.h``.
    """

    def __init__(self, weight: torch.Tensor, native: NativeKernels | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        if not fits_int8(self.in_features):
            raise ValueError(
                f"int8 needs a multiple of {ROTATED} input features, at most "
                f"{MAX_INT8_FEATURES:,}, not {self.in_features}"
            )
        self.dtype = weight.dtype
        self._native = native if native is not None and native.takes(weight) else None
        weights, scales = quantise_weight(weight)
        num_panels = -(-self.out_features // PANEL)
        padded = torch.zeros(num_panels * PANEL, self.in_features, dtype=torch.int8)
        padded[: self.out_features] = weights
        self.start = padded.sum(dim=1, dtype=torch.int32) * -ZERO_BYTE
        self.scales = torch.zeros(num_panels * PANEL)
        self.scales[: self.out_features] = scales
        if self._native is None:
            self.panels = padded
        else:
            # Four bytes move as one word.
            words = padded.view(torch.int32).view(num_panels, PANEL, self.in_features // 4)
            self.panels = words.transpose(1, 2).contiguous()

    def __call__(self, x: torch.Tensor | QuantisedRows) -> torch.Tensor:
        """x: (rows, in_features), quantised or to be; returns (rows, out_features)."""
        rows = quantise_rows(x, self._native) if isinstance(x, torch.Tensor) else x
        assert rows.values.shape[1] == self.in_features, f"rows of {rows.values.shape[1]}"
        if self._native is None:
            return self._reference(rows)
        out = torch.empty(rows.values.shape[0], self.out_features, dtype=self.dtype)
        arguments = LinearInt8Arguments(
            rows.values.data_ptr(),
            rows.scales.data_ptr(),
            self.panels.data_ptr(),
            self.start.data_ptr(),
            self.scales.data_ptr(),
            out.data_ptr(),
            self.out_features,
            out.shape[0],
            self.in_features,
            self.out_features,
            self.dtype == torch.bfloat16,
            torch.get_num_threads(),
        )
        self._native.run("linear_int8", arguments)
        return out

    def _reference(self, rows: QuantisedRows) -> torch.Tensor:
        signed = rows.values.float() - ZERO_BYTE
        sums = torch.zeros(signed.shape[0], self.out_features, dtype=torch.int32)
        for first in range(0, self.in_features, EXACT_FEATURES):
            part = slice(first, first + EXACT_FEATURES)
            weights = self.panels[: self.out_features, part].float()
            sums += (signed[:, part] @ weights.T).int()
        scales = self.scales[: self.out_features] * rows.scales[:, None]
        return (sums.float() * scales).to(self.dtype)


def fits_int8(in_features: int) -> bool:
    """Whether a matrix with so many input features can be quantised."""
    return in_features % ROTATED == 0 and 0 < in_features <= MAX_INT8_FEATURES


def quantise_weight(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(int8 of the shape of weight, float32 (out_features) scales) of the rotated weight.

    The rotation of rows and that of weights multiply a product by ROTATED, which the scales divide
    out again.
    """
    whole = torch.empty(weight.shape, dtype=torch.int8)
    scales = torch.empty(weight.shape[0])
    for first in range(0, weight.shape[0], ROWS_AT_ONCE):
        rows = slice(first, first + ROWS_AT_ONCE)
        rotated = rotate(weight[rows])
        peaks = rotated.abs().amax(dim=1).clamp(min=SMALLEST_PEAK)
        whole[rows] = torch.round(rotated * (127.0 / peaks)[:, None])
        scales[rows] = peaks / (127.0 * ROTATED)
    return whole, scales
