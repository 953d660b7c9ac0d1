"""Penalties on tokens that a sequence already has: repetition, presence, frequency.

Invariant: a row's logits change only at the tokens that its own entries name, by its own
parameters, so its token does not depend on the other rows.

Device: changes its logits in place. Sources of the formulas: Keskar et al. 2019, arXiv 1909.05858
(repetition); OpenAI's interface (presence and frequency).
"""

from __future__ import annotations

import torch


def apply_penalties(
    logits: torch.Tensor,
    rows: torch.Tensor,
    token_ids: torch.Tensor,
    counts: torch.Tensor,
    factors: torch.Tensor,
) -> None:
    """Lower the logits of tokens that are there already.

    logits:    (num_rows, vocab_size) float32, in place
    rows:      (n) int32|int64 - the row of each entry
    token_ids: (n) int32|int64 - a token of the prompt or the output; named once for each row
    counts:    (n) int32 - how often it stands in the output
    factors:   (num_rows, 3) float32 - repetition, presence and frequency; 1, 0 and 0 are off

    A positive logit is divided by the repetition penalty, another one multiplied; then the presence
    penalty is subtracted if the token stands in the output, and the frequency penalty as often as
    it does.
    """
    rows, token_ids = rows.long(), token_ids.long()
    repetition, presence, frequency = factors[rows].unbind(1)
    held = logits[rows, token_ids]
    held = torch.where(held > 0, held / repetition, held * repetition)
    held = held - presence * (counts > 0) - frequency * counts
    logits.index_put_((rows, token_ids), held)
