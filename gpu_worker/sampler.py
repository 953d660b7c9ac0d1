"""From logits to tokens and log-probabilities, for all rows of a step at once.

Invariants: a row's draw depends on its own seed and position; a row whose logits are not finite
yields token 0, marked, and disturbs no other row.

Device: reads logits, copies its results to the host.
"""

from __future__ import annotations

import numpy as np
import torch

from gpu_worker.inputs import (
    NO_LOGPROBS,
    Bools,
    Int32s,
    PromptLogprobRequest,
    SamplingBatch,
    TokenLogprobs,
)
from kernels.sampling import sample_tokens, token_logprobs
from kernels.uniform import uniform


def sample(
    logits: torch.Tensor, batch: SamplingBatch
) -> tuple[Int32s, Bools, list[TokenLogprobs | None]]:
    """Sample every row: (token_ids, finite, logprobs), as in StepOutputs.

    logits: (S, vocab_size) float32
    """
    finite = torch.isfinite(logits).all(dim=-1)
    if not bool(finite.all()):
        logits = torch.where(finite.unsqueeze(1), logits, 0.0)
    tokens = _draw(logits, batch)
    tokens = torch.where(finite, tokens, 0)
    rows = [
        row
        for row, wanted in enumerate(batch.num_logprobs.tolist())
        if wanted != NO_LOGPROBS and bool(finite[row])
    ]
    logprobs: list[TokenLogprobs | None] = [None] * logits.shape[0]
    if rows:
        counts = [int(batch.num_logprobs[row]) for row in rows]
        for row, entry in zip(rows, _logprobs(logits[rows], tokens[rows], counts), strict=True):
            logprobs[row] = entry
    return tokens.numpy().astype(np.int32), finite.numpy(), logprobs


def _draw(logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    if not batch.temperature.any():
        return logits.argmax(dim=-1)
    draws = uniform(batch.seed, batch.position.astype(np.uint64))
    return sample_tokens(
        logits,
        torch.from_numpy(batch.temperature),
        torch.from_numpy(batch.top_k),
        torch.from_numpy(batch.top_p),
        torch.from_numpy(draws),
    )


def score_targets(
    logits: torch.Tensor, request: PromptLogprobRequest, first: int
) -> list[TokenLogprobs | None]:
    """Log-probabilities of the targets [first, first + rows) of a request.

    logits: (rows, vocab_size) float32 - of just those rows
    """
    rows = logits.shape[0]
    targets = torch.from_numpy(request.target_ids[first : first + rows]).long()
    finite = torch.isfinite(logits).all(dim=-1).tolist()
    entries = _logprobs(logits, targets, [request.num_logprobs] * rows)
    return [entry if sound else None for entry, sound in zip(entries, finite, strict=True)]


def _logprobs(
    logits: torch.Tensor, targets: torch.Tensor, counts: list[int]
) -> list[TokenLogprobs]:
    """One entry for each row, the likeliest ``counts[row]`` tokens beside the target."""
    chosen, ids, values = token_logprobs(logits, targets, max(counts))
    top_ids = ids.numpy().astype(np.int32)
    top_values = values.numpy()
    return [
        TokenLogprobs(value, top_ids[row, :count], top_values[row, :count])
        for row, (value, count) in enumerate(zip(chosen.tolist(), counts, strict=True))
    ]
