"""Drawing tokens in Triton without sorting: see ``kernels.sampling``, whose choice it makes up to
the rounding of float32 sums.

The kept set of a row is found by bisection over the bits of its logits, which order as the logits
do: the largest threshold above which there are k tokens, then the largest above which there is the
mass asked for. Min-p is a count as well: of the tokens that have their share of the likeliest one's
mass. Of tokens equal to the threshold the lower ids are kept. The draw is the inverse
CDF over the kept tokens in order of id.

Invariants: one program to a row, sums in a fixed order: a row's token is the same in any company;
the token is always a kept one.

Device: pure function of its tensors.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

TILE = 4096


@triton.jit
def order_keys(logits, columns, inside):
    """Bits of float32 logits made monotone as int32; the least of all where there is none."""
    values = tl.load(logits + columns, mask=inside, other=float("-inf")).to(tl.float32)
    # Adding zero turns -0.0 into 0.0, whose bits differ though the values are equal.
    bits = (values + 0.0).to(tl.int32, bitcast=True)
    return values, bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _above(logits, size, threshold, peak, inverse, TILE: tl.constexpr):
    """(how many keys are at least `threshold`, their mass relative to the peak's)."""
    count = 0
    mass = 0.0
    for start in range(0, size, TILE):
        columns = start + tl.arange(0, TILE)
        inside = columns < size
        values, keys = order_keys(logits, columns, inside)
        kept = inside & (keys >= threshold)
        count += tl.sum(kept.to(tl.int32), axis=0)
        mass += tl.sum(tl.where(kept, tl.exp((values - peak) * inverse), 0.0), axis=0)
    return count, mass


@triton.jit
def _at_least(logits, size, share, peak, inverse, TILE: tl.constexpr):
    """How many tokens have at least `share` of the likeliest one's mass."""
    count = 0
    for start in range(0, size, TILE):
        columns = start + tl.arange(0, TILE)
        inside = columns < size
        values, _ = order_keys(logits, columns, inside)
        kept = inside & (tl.exp((values - peak) * inverse) >= share)
        count += tl.sum(kept.to(tl.int32), axis=0)
    return count


@triton.jit
def _threshold(logits, size, least_count, least_mass, peak, inverse, TILE: tl.constexpr):
    """The largest key that so many keys, with so much mass, are not below."""
    low = tl.full([], -2147483648, tl.int64)
    high = tl.full([], 2147483648, tl.int64)
    while high - low > 1:
        middle = (low + high) // 2
        count, mass = _above(logits, size, middle.to(tl.int32), peak, inverse, TILE)
        if (count >= least_count) & (mass >= least_mass):
            low = middle
        else:
            high = middle
    return low.to(tl.int32)


@triton.jit
def sample_kernel(
    logits,
    temperature,
    top_k,
    top_p,
    uniforms,
    min_p,
    tokens,
    stride,
    size,
    min_temperature,
    TILE: tl.constexpr,
):
    """Grid (rows)."""
    row = tl.program_id(0)
    logits += row.to(tl.int64) * stride
    peak_key = tl.full([], -2147483648, tl.int32)
    peak = tl.full([], float("-inf"), tl.float32)
    token = tl.full([], 0, tl.int32)
    for start in range(0, size, TILE):
        columns = start + tl.arange(0, TILE)
        values, keys = order_keys(logits, columns, columns < size)
        best = tl.max(keys, axis=0)
        if best > peak_key:
            peak_key = best
            peak = tl.max(values, axis=0)
            token = tl.min(tl.where(keys == best, columns, size), axis=0)
    heat = tl.load(temperature + row)
    if heat >= min_temperature:
        k = tl.load(top_k + row)
        p = tl.load(top_p + row)
        least = tl.load(min_p + row)
        inverse = 1.0 / heat
        if least > 0.0:
            likely = _at_least(logits, size, least, peak, inverse, TILE)
            k = tl.where((k > 0) & (k < likely), k, likely)
        threshold = tl.full([], -2147483648, tl.int32)
        ties = size
        if (k > 0) & (k < size):
            threshold = _threshold(logits, size, k, 0.0, peak, inverse, TILE)
            more, _ = _above(logits, size, threshold + 1, peak, inverse, TILE)
            ties = k - more
        if p < 1.0:
            # Top-p is a share of what top-k left: all above its threshold, and some of the ties.
            more, mass = _above(logits, size, threshold + 1, peak, inverse, TILE)
            count, whole = _above(logits, size, threshold, peak, inverse, TILE)
            each = (whole - mass) / tl.maximum(count - more, 1)
            share = p * (mass + each * tl.minimum(ties, count - more))
            limit = _threshold(logits, size, 1, share, peak, inverse, TILE)
            if limit > threshold:
                ties = size
            threshold = tl.maximum(limit, threshold)
            more, mass = _above(logits, size, threshold + 1, peak, inverse, TILE)
            count, whole = _above(logits, size, threshold, peak, inverse, TILE)
            each = (whole - mass) / tl.maximum(count - more, 1)
            needed = tl.ceil((share - mass) / tl.maximum(each, 1e-30)).to(tl.int32)
            ties = tl.minimum(ties, tl.maximum(needed, 1))
        token = _draw(logits, size, threshold, ties, peak, inverse, tl.load(uniforms + row), TILE)
    tl.store(tokens + row, token.to(tl.int64))


@triton.jit
def _draw(logits, size, threshold, ties, peak, inverse, uniform, TILE: tl.constexpr):
    """The first kept token, in order of id, whose cumulative mass passes uniform * (mass kept)."""
    more, mass = _above(logits, size, threshold + 1, peak, inverse, TILE)
    count, whole = _above(logits, size, threshold, peak, inverse, TILE)
    each = (whole - mass) / tl.maximum(count - more, 1)
    target = uniform * (mass + each * tl.minimum(ties, count - more))
    passed = 0.0
    seen = 0
    token = tl.full([], -1, tl.int32)
    last = tl.full([], 0, tl.int32)
    for start in range(0, size, TILE):
        columns = start + tl.arange(0, TILE)
        inside = columns < size
        values, keys = order_keys(logits, columns, inside)
        tied = (inside & (keys == threshold)).to(tl.int32)
        kept = inside & (keys > threshold)
        kept = kept | ((tied > 0) & (seen + tl.cumsum(tied, axis=0) <= ties))
        weights = tl.where(kept, tl.exp((values - peak) * inverse), 0.0)
        reached = passed + tl.cumsum(weights, axis=0)
        first = tl.min(tl.where(kept & (reached > target), columns, size), axis=0)
        token = tl.where((token < 0) & (first < size), first, token)
        last = tl.maximum(last, tl.max(tl.where(kept, columns, 0), axis=0))
        passed += tl.sum(weights, axis=0)
        seen += tl.sum(tied, axis=0)
    # Rounding of the sum may leave the target at its very end.
    return tl.where(token < 0, last, token)


def sample_tokens_triton(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    uniforms: torch.Tensor,
    min_p: torch.Tensor,
    min_temperature: float,
) -> torch.Tensor:
    """One token for each row: shapes as in ``kernels.sampling.sample_tokens``; rows of logits may
    be of any float dtype, last stride 1.
    """
    rows, size = logits.shape
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows:
        sample_kernel[(rows,)](
            logits,
            temperature,
            top_k,
            top_p,
            uniforms,
            min_p,
            tokens,
            logits.stride(0),
            size,
            min_temperature,
            TILE=min(TILE, triton.next_power_of_2(size)),
        )
    return tokens
