"""Choosing tokens from logits: greedy, temperature, top-k and top-p, and log-probabilities.

Invariants: a row's token depends on that row's logits, parameters and uniform number alone; a
token of the batch is always a valid id; equal logits are ordered by the lower id first.

Device: pure functions of their tensors; batched over rows.
"""

from __future__ import annotations

import torch

MIN_TEMPERATURE = 1e-5
"""Below this a row is greedy: float32 logits divided by less leave one token anyway."""

NUM_CANDIDATES = 256
"""Largest tokens looked at before a full sort; nearly every top-k and top-p ends inside them."""


def sample_tokens(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    uniforms: torch.Tensor,
) -> torch.Tensor:
    """One token for each row.

    logits:      (rows, vocab_size) float32, finite
    temperature: (rows) float32; below MIN_TEMPERATURE the row is greedy
    top_k:       (rows) int; 0 or less, or vocab_size and more, means off
    top_p:       (rows) float32 in (0, 1]; 1 means off
    uniforms:    (rows) float32 in (0, 1), one number for each row
    returns:     (rows) int64

    Draws by inverse CDF: tokens in descending order of probability (in order of id where neither
    top-k nor top-p is on), the first whose cumulative mass passes u * (mass kept).
    """
    tokens = logits.argmax(dim=-1)
    vocab_size = logits.shape[1]
    random_rows = temperature >= MIN_TEMPERATURE
    unlimited = (top_k <= 0) | (top_k >= vocab_size)
    filtered = random_rows & ~(unlimited & (top_p >= 1.0))
    plain = torch.nonzero(random_rows & ~filtered).squeeze(1)
    if plain.numel() > 0:
        probabilities = _probabilities(logits[plain], temperature[plain])
        kept = probabilities.new_full((plain.shape[0],), vocab_size, dtype=torch.long)
        tokens[plain] = _invert(probabilities, kept, uniforms[plain])
    chosen = torch.nonzero(filtered).squeeze(1)
    if chosen.numel() > 0:
        limits = torch.where(unlimited, vocab_size, top_k)[chosen].long()
        tokens[chosen] = _sample_filtered(
            logits[chosen], temperature[chosen], limits, top_p[chosen], uniforms[chosen]
        )
    return tokens


def _sample_filtered(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    limits: torch.Tensor,
    top_p: torch.Tensor,
    uniforms: torch.Tensor,
) -> torch.Tensor:
    """Rows with top-k or top-p on; limits (rows) int64 is top-k made explicit."""
    probabilities = _probabilities(logits, temperature)
    num_candidates = min(NUM_CANDIDATES, logits.shape[1])
    ids = _largest(logits, num_candidates)
    tokens, complete = _sample_ordered(probabilities, ids, limits, top_p, uniforms)
    rest = torch.nonzero(~complete).squeeze(1)
    if rest.numel() > 0:
        ids = _largest(logits[rest], logits.shape[1])
        part = (probabilities[rest], ids, limits[rest], top_p[rest], uniforms[rest])
        tokens[rest] = _sample_ordered(*part)[0]
    return tokens


def _sample_ordered(
    probabilities: torch.Tensor,
    ids: torch.Tensor,
    limits: torch.Tensor,
    top_p: torch.Tensor,
    uniforms: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample among the leading candidates: (tokens, whether the kept set lies inside them).

    probabilities: (rows, vocab_size) float64; ids: (rows, n) int64 in descending order
    """
    rows, num_candidates = ids.shape
    ordered = probabilities.gather(1, ids)
    cumulative = ordered.cumsum(dim=1)
    within = limits.clamp(max=num_candidates)
    limited_mass = cumulative.gather(1, within.unsqueeze(1) - 1)
    whole = limits.unsqueeze(1) >= probabilities.shape[1]
    # Top-p is a share of what top-k left; without top-k that is everything.
    mass = torch.where(whole, torch.ones_like(limited_mass), limited_mass)
    threshold = mass * top_p.double().unsqueeze(1)
    # Smallest prefix with at least the mass asked for: one more than those still below it.
    needed = (cumulative < threshold).sum(dim=1) + 1
    kept = torch.minimum(needed, within)
    complete = (limits <= num_candidates) | (whole.squeeze(1) & (needed <= num_candidates))
    if num_candidates == probabilities.shape[1]:
        complete = torch.ones(rows, dtype=torch.bool, device=ids.device)
    columns = _invert(ordered, kept, uniforms)
    return ids.gather(1, columns.unsqueeze(1)).squeeze(1), complete


def _probabilities(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """softmax(logits / temperature): (rows, vocab_size) float64.

    The maximum is subtracted before the division, so that no temperature can overflow.
    """
    shifted = (logits - logits.amax(dim=-1, keepdim=True)) / temperature.unsqueeze(1)
    return torch.softmax(shifted, dim=-1).double()


def _invert(
    probabilities: torch.Tensor, kept: torch.Tensor, uniforms: torch.Tensor
) -> torch.Tensor:
    """Column of the first cumulative mass above u * (mass of the first ``kept`` columns)."""
    cumulative = probabilities.cumsum(dim=1)
    last = kept.unsqueeze(1) - 1
    target = cumulative.gather(1, last) * uniforms.double().unsqueeze(1)
    columns = torch.searchsorted(cumulative, target, right=True)
    # Rounding of the sum may leave the target at its very end.
    return torch.minimum(columns, last).squeeze(1)


def _largest(values: torch.Tensor, count: int) -> torch.Tensor:
    """Ids of the largest values, descending, equal ones by lower id: (rows, count) int64.

    The sort key holds the float's bits, made monotone as an integer, above the inverted id, so
    that no two keys are equal and any selection algorithm gives the same answer.
    """
    vocab_size = values.shape[1]
    # Adding zero turns -0.0 into 0.0, whose bits differ though the values are equal.
    bits = (values + 0.0).view(torch.int32)
    monotone = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    tie_break = torch.arange(vocab_size - 1, -1, -1, device=values.device)
    keys = (monotone.long() << 32) + tie_break
    if count == vocab_size:
        return keys.argsort(dim=1, descending=True)
    return keys.topk(count, dim=1).indices


def token_logprobs(
    logits: torch.Tensor, targets: torch.Tensor, num_top: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probabilities of the unscaled distribution: log_softmax(logits).

    logits:  (rows, vocab_size) float32
    targets: (rows) int64 - the token whose log-probability is wanted
    num_top: how many of the likeliest tokens are wanted as well; may be 0
    returns: (rows) float32 of the targets; (rows, num_top) int64 ids and (rows, num_top) float32
             values, likeliest first
    """
    logprobs = torch.log_softmax(logits, dim=-1)
    chosen = logprobs.gather(1, targets.unsqueeze(1)).squeeze(1)
    ids = _largest(logits, min(num_top, logits.shape[1]))
    return chosen, ids, logprobs.gather(1, ids)
