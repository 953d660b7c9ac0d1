"""The gated activation of Llama's feed-forward block (SwiGLU).

Device: pure function of its tensor. Source: Shazeer 2020, arXiv 2002.05202.
"""

from __future__ import annotations

import torch


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, where silu(z) = z / (1 + exp(-z)).

    gate_up: (num_tokens, 2 * intermediate_size), gate first
    returns: (num_tokens, intermediate_size), dtype of gate_up; float32 inside, rounded once
    """
    gate, up = gate_up.chunk(2, dim=-1)
    if gate_up.dtype == torch.float32:
        return torch.nn.functional.silu(gate).mul_(up)
    return torch.nn.functional.silu(gate.float()).mul_(up).to(gate_up.dtype)
