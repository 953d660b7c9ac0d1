"""Log-probabilities of a step: tensors on the device first, values on the host when they are there.

Invariant: a row whose logits are not finite gives None, and disturbs no other row.

Device: reads logits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from gpu_worker.inputs import (
    NO_LOGPROBS,
    Float32s,
    Int32s,
    Int64s,
    PromptLogprobRequest,
    SamplingBatch,
    TokenLogprobs,
)

Scores = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""(rows) float32 of the targets, (rows, n) ids and values of the likeliest tokens."""

Score = Callable[[torch.Tensor, torch.Tensor, int], Scores]
"""``kernels.logprobs.token_logprobs``, by any table of operations."""


def wanted_rows(batch: SamplingBatch) -> npt.NDArray[np.intp]:
    """Sampled rows whose log-probabilities are wanted."""
    return np.flatnonzero(batch.num_logprobs != NO_LOGPROBS)


def score_sampled(
    score: Score, logits: torch.Tensor, tokens: torch.Tensor, batch: SamplingBatch
) -> list[Scores]:
    """Scores of ``wanted_rows``, if any; logits (S, vocab_size), tokens (S) int64."""
    rows = wanted_rows(batch)
    if rows.size == 0:
        return []
    index = torch.from_numpy(rows).to(logits.device)
    most = int(batch.num_logprobs[rows].max())
    return [score(logits[index], tokens[index], most)]


def score_targets(
    score: Score, logits: torch.Tensor, request: PromptLogprobRequest, first: int
) -> tuple[torch.Tensor, *tuple[torch.Tensor, ...]]:
    """(whether a row is finite, and its scores) of the targets [first, first + rows) of a request.

    logits: (rows, vocab_size) float32|bfloat16 - of just those rows
    """
    targets = torch.from_numpy(request.target_ids[first : first + logits.shape[0]])
    finite = torch.isfinite(logits).all(dim=-1)
    targets = targets.to(logits.device, torch.int64)
    return finite, *score(logits, targets, request.num_logprobs)


def read_scores(
    scores: tuple[Float32s, Int64s, Float32s], counts: Sequence[int], finite: Sequence[bool]
) -> list[TokenLogprobs | None]:
    """One entry for each row, the likeliest ``counts[row]`` tokens beside the target."""
    chosen, ids, values = scores
    top_ids: Int32s = ids.astype(np.int32)
    return [
        TokenLogprobs(value, top_ids[row, :count], values[row, :count]) if sound else None
        for row, (value, count, sound) in enumerate(
            zip(chosen.tolist(), counts, finite, strict=True)
        )
    ]
