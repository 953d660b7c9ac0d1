"""Multiplication by a weight matrix in Triton: tiles of one size and sums in one order, whatever
the number of rows.

cuBLAS chooses its kernel, and with it the order of its sums, by the number of rows; here a row's
bits are the same in any company. It is there for that, and not for speed.

Invariants: every output element sums its products in ascending order of input feature, TILE_IN at a
time, in float32, and is rounded once; grid and tiles depend on the weight alone, but for the number
of tiles of rows.

Device: pure function of its tensors.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

TILE_ROWS = 32
TILE_OUT = 128
TILE_IN = 64


# One program for every number of rows: a special one for 1 or for multiples of 16 might round
# otherwise.
@triton.jit(do_not_specialize=["num_rows"])
def linear_kernel(
    x,
    weight,
    out,
    x_stride,
    weight_stride,
    num_rows,
    in_features,
    out_features,
    TILE_ROWS: tl.constexpr,
    TILE_OUT: tl.constexpr,
    TILE_IN: tl.constexpr,
):
    """Grid (tiles of output features, tiles of rows)."""
    outputs = tl.program_id(0) * TILE_OUT + tl.arange(0, TILE_OUT)
    rows = tl.program_id(1) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    row_ok = rows < num_rows
    output_ok = outputs < out_features
    features = tl.arange(0, TILE_IN)
    x_at = x + rows.to(tl.int64)[:, None] * x_stride + features[None, :]
    weight_at = weight + outputs.to(tl.int64)[None, :] * weight_stride + features[:, None]
    sums = tl.zeros([TILE_ROWS, TILE_OUT], tl.float32)
    for first in range(0, in_features, TILE_IN):
        inside = first + features < in_features
        left = tl.load(x_at + first, mask=row_ok[:, None] & inside[None, :], other=0.0)
        right = tl.load(weight_at + first, mask=inside[:, None] & output_ok[None, :], other=0.0)
        sums += tl.dot(left, right, input_precision="ieee")
    at = rows.to(tl.int64)[:, None] * out_features + outputs[None, :]
    inside_out = row_ok[:, None] & output_ok[None, :]
    tl.store(out + at, sums.to(out.dtype.element_ty), mask=inside_out)


def linear_triton(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x @ weight.T.

    x:       (rows, in_features), last stride 1
    weight:  (out_features, in_features), dtype of x, last stride 1
    returns: (rows, out_features), contiguous
    """
    rows, in_features = x.shape
    out_features = weight.shape[0]
    assert weight.shape[1] == in_features, f"rows of {in_features} for {weight.shape[1]}"
    out = torch.empty((rows, out_features), dtype=x.dtype, device=x.device)
    if out.numel():
        grid = (triton.cdiv(out_features, TILE_OUT), triton.cdiv(rows, TILE_ROWS))
        linear_kernel[grid](
            x,
            weight,
            out,
            x.stride(0),
            weight.stride(0),
            rows,
            in_features,
            out_features,
            TILE_ROWS=TILE_ROWS,
            TILE_OUT=TILE_OUT,
            TILE_IN=TILE_IN,
        )
    return out


class TritonLinear:
    """x -> x @ weight.T with the same bits for a row in any company."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._weight = weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return linear_triton(x, self._weight)
