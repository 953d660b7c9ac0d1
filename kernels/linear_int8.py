"""Multiplication by a fixed weight matrix in 8 bits: weights and rows as bytes, sums in int32.

Invariants: sums are exact, so a row's result has the same bits whatever the other rows, the number
of threads, and the instruction set, the torch reference included; weights have one scale for each
output feature and are rotated as the rows are (``kernels.quantise``).

Device: pure functions of their tensors.
"""

from __future__ import annotations

from typing import NamedTuple, Self

import torch

from kernels.native import NativeKernels
from kernels.native.arguments import LinearInt8Arguments
from kernels.quantise import (
    MAX_INT8_FEATURES,
    ZERO_BYTE,
    QuantisedRows,
    quantise_rows,
    rotation_gain,
    whole_blocks,
)

PANEL = 64
"""Output features of a packed panel; the same as in ``library.h``."""

EXACT_FEATURES = 1024
"""A float32 product over so few features is exact: 1,024 * 127 * 127 < 2^24."""


class Int8Parts(NamedTuple):
    """A weight as the products read it, output features filled up to whole panels.

    panels: (panels, in_features / 4, PANEL) int32, four bytes each, where native code runs;
            (panels * PANEL, in_features) int8 where the reference does; in_features fill whole
            blocks
    start:  (panels * PANEL) int32, what sums begin with
    scales: (panels * PANEL) float32
    """

    panels: torch.Tensor
    start: torch.Tensor
    scales: torch.Tensor


class Int8Linear:
    """x -> x @ weight.T in 8 bits.

    weight: (out_features, in_features) float32|bfloat16, at most MAX_INT8_FEATURES of the latter
    native: the loaded library; without one the reference runs
    dtype:  of the results; None: that of the weight
    """

    def __init__(
        self,
        weight: torch.Tensor,
        native: NativeKernels | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self._hold(pack_int8(weight, native), weight.shape, dtype or weight.dtype, native)

    @classmethod
    def of_parts(
        cls,
        parts: Int8Parts,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        native: NativeKernels | None = None,
    ) -> Self:
        """From what ``pack_int8`` made of a weight of that shape, with the same library."""
        made = cls.__new__(cls)
        made._hold(parts, shape, dtype, native)
        return made

    def _hold(
        self,
        parts: Int8Parts,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        native: NativeKernels | None,
    ) -> None:
        self.out_features, self.in_features = shape[0], whole_blocks(shape[1])
        num_panels = -(-self.out_features // PANEL)
        bytes_of_word = 1 if native is None else 4
        num_words = num_panels * PANEL * self.in_features // bytes_of_word
        assert parts.panels.numel() == num_words, "panels of this matrix"
        assert parts.start.numel() == parts.scales.numel() == num_panels * PANEL, "its columns"
        self.parts, self.dtype = parts, dtype
        self.panels, self.start, self.scales = parts
        self._native = native

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


def pack_int8(weight: torch.Tensor, native: NativeKernels | None = None) -> Int8Parts:
    """weight: see Int8Linear; raises ValueError where sums of its products could overflow."""
    out_features, in_features = weight.shape
    if not 0 < in_features <= MAX_INT8_FEATURES:
        raise ValueError(f"int8 takes at most {MAX_INT8_FEATURES:,} features, not {in_features:,}")
    num_panels = -(-out_features // PANEL)
    padded = torch.zeros(num_panels * PANEL, whole_blocks(in_features), dtype=torch.int8)
    scales = torch.zeros(num_panels * PANEL)
    padded[:out_features], scales[:out_features] = quantise_weight(weight, native)
    start = padded.sum(dim=1, dtype=torch.int32) * -ZERO_BYTE
    if native is None:
        return Int8Parts(padded, start, scales)
    # Four bytes move as one word.
    words = padded.view(torch.int32).view(num_panels, PANEL, padded.shape[1] // 4)
    return Int8Parts(words.transpose(1, 2).contiguous(), start, scales)


def quantise_weight(
    weight: torch.Tensor, native: NativeKernels | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out_features, in_features filled up to whole blocks) int8 and (out_features) float32 scales
    of the rotated weight.

    Rows of weights are rounded as rows of activations are. The two rotations multiply a product,
    which the scales divide out again.
    """
    rows = quantise_rows(weight, native)
    signed = rows.values.bitwise_xor_(ZERO_BYTE).view(torch.int8)
    return signed, rows.scales / rotation_gain(weight.shape[1])
