"""The gated activation of Llama's feed-forward block in Triton: see ``kernels.silu_mul``.

Device: pure function of its tensor.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

COLUMNS = 1024


@triton.jit
def silu_mul_kernel(gate_up, out, stride, size, COLUMNS: tl.constexpr):
    """Grid (rows, column tiles): silu(gate) * up in float32, rounded once."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < size
    gate = tl.load(gate_up + row * stride + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride + size + columns, mask=inside, other=0.0).to(tl.float32)
    result = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * size + columns, result.to(out.dtype.element_ty), mask=inside)


def silu_mul_triton(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up (num_rows, 2 * size), gate first, last stride 1 -> (num_rows, size)."""
    num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((num_rows, size), dtype=gate_up.dtype, device=gate_up.device)
    if num_rows:
        grid = (num_rows, triton.cdiv(size, COLUMNS))
        silu_mul_kernel[grid](gate_up, out, gate_up.stride(0), size, COLUMNS=COLUMNS)
    return out
