"""Choosing tokens from logits: greedy, temperature, min-p, top-k and top-p.

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
    min_p: torch.Tensor | None = None,
) -> torch.Tensor:
    """One token for each row.

    logits:      (rows, vocab_size) float32, finite
    temperature: (rows) float32; below MIN_TEMPERATURE the row is greedy
    top_k:       (rows) int; 0 or less, or vocab_size and more, means off
    top_p:       (rows) float32 in (0, 1]; 1 means off
    uniforms:    (rows) float32 in (0, 1), one number for each row
    min_p:       (rows) float32 in [0, 1]; 0 means off, as None does for all
    returns:     (rows) int64

    Min-p keeps tokens with at least that share of the likeliest one's probability, top-k the
    likeliest k of those, top-p the fewest of those with that share of their mass; the draw
    is the inverse CDF over the kept tokens in order of id, the first whose cumulative mass passes
    u * (mass kept). The order of id needs no sorted row, on any device.
    """
    tokens = logits.argmax(dim=-1)
    if min_p is None:
        min_p = torch.zeros_like(top_p)
    vocab_size = logits.shape[1]
    random_rows = temperature >= MIN_TEMPERATURE
    unlimited = (top_k <= 0) | (top_k >= vocab_size)
    filtered = random_rows & ~(unlimited & (top_p >= 1.0) & (min_p <= 0.0))
    plain = torch.nonzero(random_rows & ~filtered).squeeze(1)
    if plain.numel() > 0:
        probabilities = _probabilities(logits[plain], temperature[plain])
        tokens[plain] = _invert(probabilities, uniforms[plain])
    chosen = torch.nonzero(filtered).squeeze(1)
    if chosen.numel() > 0:
        limits = torch.where(unlimited, vocab_size, top_k)[chosen].long()
        tokens[chosen] = _sample_filtered(
            logits[chosen],
            temperature[chosen],
            limits,
            (top_p[chosen], min_p[chosen]),
            uniforms[chosen],
        )
    return tokens


def _sample_filtered(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    limits: torch.Tensor,
    shares: tuple[torch.Tensor, torch.Tensor],
    uniforms: torch.Tensor,
) -> torch.Tensor:
    """Rows with a filter on; limits (rows) int64 is top-k made explicit, shares (top_p, min_p)."""
    top_p, min_p = shares
    probabilities = _probabilities(logits, temperature)
    # Those that min-p keeps are the likeliest so many, as those of top-k are.
    least = probabilities.amax(dim=1) * min_p
    limits = torch.minimum(limits, (probabilities >= least.unsqueeze(1)).sum(dim=1))
    keys = order_keys(logits)
    last, complete = _last_kept(probabilities, keys, limits, top_p, NUM_CANDIDATES)
    rest = torch.nonzero(~complete).squeeze(1)
    if rest.numel() > 0:
        part = (probabilities[rest], keys[rest], limits[rest], top_p[rest])
        last[rest] = _last_kept(*part, logits.shape[1])[0]
    return _invert(torch.where(keys >= last.unsqueeze(1), probabilities, 0.0), uniforms)


def _last_kept(
    probabilities: torch.Tensor,
    keys: torch.Tensor,
    limits: torch.Tensor,
    top_p: torch.Tensor,
    num_candidates: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Key of the least likely token that is kept, looking at the leading candidates alone, and
    whether the kept set lies inside them.

    probabilities, keys: (rows, vocab_size) float64 and int64
    """
    num_candidates = min(num_candidates, keys.shape[1])
    leading, ids = keys.topk(num_candidates, dim=1)
    cumulative = probabilities.gather(1, ids).cumsum(dim=1)
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
    if num_candidates == keys.shape[1]:
        complete = torch.ones_like(complete)
    return leading.gather(1, kept.unsqueeze(1) - 1).squeeze(1), complete


def _probabilities(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """softmax(logits / temperature): (rows, vocab_size) float64.

    The maximum is subtracted before the division, so that no temperature can overflow.
    """
    shifted = (logits - logits.amax(dim=-1, keepdim=True)) / temperature.unsqueeze(1)
    return torch.softmax(shifted, dim=-1).double()


def _invert(masses: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Column of the first cumulative mass above u * (whole mass); masses (rows, n) float64."""
    cumulative = masses.cumsum(dim=1)
    target = cumulative[:, -1:] * uniforms.double().unsqueeze(1)
    columns = torch.searchsorted(cumulative, target, right=True).squeeze(1)
    # Rounding of the sum may leave the target at its very end: the last column with any mass.
    positive = masses > 0
    last = masses.shape[1] - 1 - positive.flip(1).to(torch.int8).argmax(dim=1)
    return torch.minimum(columns, last)


def order_keys(values: torch.Tensor) -> torch.Tensor:
    """Integers in the order of the values, equal ones by lower id first: (rows, n) int64.

    The key holds the float's bits, made monotone as an integer, above the inverted id, so that no
    two keys are equal and any selection algorithm gives the same answer.
    """
    # Adding zero turns -0.0 into 0.0, whose bits differ though the values are equal.
    bits = (values + 0.0).view(torch.int32)
    monotone = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    tie_break = torch.arange(values.shape[1] - 1, -1, -1, device=values.device)
    return (monotone.long() << 32) + tie_break
