"""Log-probabilities of chosen tokens, and of the likeliest ones beside them.

Invariants: a row's numbers depend on that row's logits alone; equal logits are ordered by the lower
id first.

Device: pure function of its tensors.
"""

from __future__ import annotations

import torch

from kernels.sampling import order_keys


def token_logprobs(
    logits: torch.Tensor, targets: torch.Tensor, num_top: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probabilities of the unscaled distribution: log_softmax(logits), in float32.

    logits:  (rows, vocab_size) float32|bfloat16|float16
    targets: (rows) int64 - the token whose log-probability is wanted
    num_top: how many of the likeliest tokens are wanted as well; may be 0
    returns: (rows) float32 of the targets; (rows, n) int64 ids and (rows, n) float32 values,
             likeliest first, where n is num_top or the size of the vocabulary
    """
    wide = logits.float()
    logprobs = torch.log_softmax(wide, dim=-1)
    chosen = logprobs.gather(1, targets.unsqueeze(1)).squeeze(1)
    ids = order_keys(wide).topk(min(num_top, logits.shape[1]), dim=1).indices
    return chosen, ids, logprobs.gather(1, ids)
