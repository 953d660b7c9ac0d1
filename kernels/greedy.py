"""The likeliest token of each row, and whether the row's logits are sound, in one reading.

Invariants: equal logits are ordered by the lower id first; a row that is not finite gives token 0
and disturbs no other row.

Device: pure function of its tensor.
"""

from __future__ import annotations

import torch

from kernels.native import NativeKernels
from kernels.native.arguments import GreedyArguments


def greedy_tokens(
    logits: torch.Tensor, native: NativeKernels | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The first of the largest logits of each row.

    logits:  (rows, vocab_size) float32|bfloat16
    native:  the loaded library, used where it takes the dtype
    returns: (rows) int64 tokens, and (rows) bool, False where a logit is NaN or infinite
    """
    rows, vocab_size = logits.shape
    if native is None or not native.takes(logits):
        finite = torch.isfinite(logits).all(dim=-1)
        # The operator's choice among equals is not promised; the first one is wanted.
        highest = logits == logits.amax(dim=-1, keepdim=True)
        return torch.where(finite, highest.to(torch.uint8).argmax(dim=-1), 0), finite
    tokens = torch.empty(rows, dtype=torch.int64)
    finite = torch.empty(rows, dtype=torch.bool)
    arguments = GreedyArguments(
        logits.data_ptr(),
        tokens.data_ptr(),
        finite.data_ptr(),
        logits.stride(0),
        rows,
        vocab_size,
        logits.dtype == torch.bfloat16,
        torch.get_num_threads(),
    )
    native.run("greedy", arguments)
    return tokens, finite
