"""The gated activation of Llama's feed-forward block (SwiGLU).

Device: pure function of its tensor. Source: Shazeer 2020, arXiv 2002.05202.
"""

from __future__ import annotations

import torch

from kernels.native import NativeKernels
from kernels.native.arguments import SiluMulArguments
from kernels.quantise import QuantisedRows, row_addresses, write_rows


def silu_mul(
    gate_up: torch.Tensor,
    native: NativeKernels | None = None,
    into: QuantisedRows | None = None,
) -> torch.Tensor:
    """silu(gate) * up, where silu(z) = z / (1 + exp(-z)).

    gate_up: (num_tokens, 2 * intermediate_size), gate first
    native:  the loaded library, used where it takes the dtype
    into:    written if given: the result, quantised
    returns: (num_tokens, intermediate_size), dtype of gate_up; float32 inside, rounded once
    """
    if native is not None and native.takes(gate_up):
        return _run_native(native, gate_up, into)
    gate, up = gate_up.chunk(2, dim=-1)
    out = torch.nn.functional.silu(gate.float()).mul_(up).to(gate_up.dtype)
    if into is not None:
        write_rows(out, into)
    return out


def _run_native(
    native: NativeKernels, gate_up: torch.Tensor, into: QuantisedRows | None
) -> torch.Tensor:
    num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(num_rows, size, dtype=gate_up.dtype)
    arguments = SiluMulArguments(
        gate_up.data_ptr(),
        out.data_ptr(),
        *row_addresses(into, out.shape),
        gate_up.stride(0),
        num_rows,
        size,
        gate_up.dtype == torch.bfloat16,
        torch.get_num_threads(),
    )
    native.run("silu_mul", arguments)
    return out
