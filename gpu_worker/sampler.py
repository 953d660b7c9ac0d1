"""From logits to tokens and log-probabilities, for all rows of a step at once.

Invariants: a row's draw depends on its own seed and position; a row whose logits are not finite
yields token 0, marked, and disturbs no other row.

Device: reads logits, copies its results to the host.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from gpu_worker.inputs import (
    NO_LOGPROBS,
    Bools,
    Int32s,
    PromptLogprobRequest,
    SamplingBatch,
    TokenLogprobs,
)
from kernels.greedy import greedy_tokens
from kernels.native import NativeKernels
from kernels.sampling import sample_tokens, token_logprobs
from kernels.uniform import uniform


def sample(
    logits: torch.Tensor, batch: SamplingBatch, native: NativeKernels | None = None
) -> tuple[Int32s, Bools, list[TokenLogprobs | None]]:
    """Sample every row: (token_ids, finite, logprobs), as in StepOutputs.

    logits: (S, vocab_size) float32|bfloat16
    native: the loaded library, if there is one
    """
    tokens, finite = greedy_tokens(logits, native)
    drawn = np.flatnonzero(batch.temperature)
    if drawn.size > 0:
        tokens[torch.from_numpy(drawn)] = _draw(logits, finite, batch, drawn)
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


def _draw(
    logits: torch.Tensor, finite: torch.Tensor, batch: SamplingBatch, rows: npt.NDArray[np.intp]
) -> torch.Tensor:
    """Tokens of the rows with a temperature: (len(rows)) int64, 0 where the row is not finite."""
    index = torch.from_numpy(rows)
    sound = finite[index]
    chosen = torch.where(sound.unsqueeze(1), logits[index].float(), 0.0)
    draws = uniform(batch.seed[rows], batch.position[rows].astype(np.uint64))
    tokens = sample_tokens(
        chosen,
        torch.from_numpy(batch.temperature[rows]),
        torch.from_numpy(batch.top_k[rows]),
        torch.from_numpy(batch.top_p[rows]),
        torch.from_numpy(draws),
    )
    return torch.where(sound, tokens, 0)


def score_targets(
    logits: torch.Tensor, request: PromptLogprobRequest, first: int
) -> list[TokenLogprobs | None]:
    """Log-probabilities of the targets [first, first + rows) of a request.

    logits: (rows, vocab_size) float32|bfloat16 - of just those rows
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
    chosen, ids, values = token_logprobs(logits.float(), targets, max(counts))
    top_ids = ids.numpy().astype(np.int32)
    top_values = values.numpy()
    return [
        TokenLogprobs(value, top_ids[row, :count], top_values[row, :count])
        for row, (value, count) in enumerate(zip(chosen.tolist(), counts, strict=True))
    ]
