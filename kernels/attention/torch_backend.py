"""The torch backend of paged attention, for any device.

Three paths give the same answer. Single queries are grouped by the length of their sequences and
multiplied as a batch; longer chunks go one by one to ``scaled_dot_product_attention``; everything
that is not plain causal attention takes the general path, in float32, which knows windows, soft
caps, sinks, ALiBi and the log-sum-exp.

Invariants: a masked key is multiplied by a weight of zero, and zero times NaN is NaN; every path
therefore looks at its result, and where it is not finite recomputes row by row over exactly the
visible keys. How a single query is padded depends on its own length alone.

Device: reads the KV cache, writes the outputs in place.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

from kernels.attention.layout import BatchLayout, Chunk, SingleGroup

MAX_SCORE_ELEMENTS = 1 << 24
"""Scores held at once by the general path (64 MiB of float32); long chunks are split by rows."""


@dataclass(frozen=True, slots=True, eq=False)
class AttentionVariant:
    """What kind of attention: see ``varlen_paged_attention`` for each field."""

    scale: float
    causal: bool
    window: int
    softcap: float
    alibi_slopes: torch.Tensor | None
    sinks: torch.Tensor | None

    @property
    def is_plain(self) -> bool:
        """True when a causal softmax over all keys is all there is to it."""
        extras = self.alibi_slopes is not None or self.sinks is not None
        return self.causal and self.window == 0 and self.softcap == 0.0 and not extras


class _PagedCache:
    """Gathers keys or values: (num_seqs * num_kv_heads, num_blocks * block_size, head_dim).

    Blocks stored as [block, kv_head, slot, dim] are gathered straight into head-major order, with
    one copy, by addressing (block, head) pairs as rows: block b, head h is row b * heads + h.
    """

    def __init__(self, cache: torch.Tensor) -> None:
        num_blocks, block_size, num_kv_heads, head_dim = cache.shape
        self._by_head = cache.permute(0, 2, 1, 3)
        self._num_kv_heads, self._head_dim = num_kv_heads, head_dim
        self._rows: torch.Tensor | None = None
        if self._by_head.is_contiguous():
            self._rows = self._by_head.view(num_blocks * num_kv_heads, block_size * head_dim)

    def gather(self, row_ids: torch.Tensor, num_seqs: int) -> torch.Tensor:
        """row_ids: (num_seqs * num_kv_heads * n) int64 - block by block within each head."""
        shape = (num_seqs * self._num_kv_heads, -1, self._head_dim)
        if self._rows is not None:
            return self._rows.index_select(0, row_ids).view(shape)
        blocks = torch.div(row_ids, self._num_kv_heads, rounding_mode="floor")
        return self._by_head[blocks, row_ids - blocks * self._num_kv_heads].view(shape)


def attend_batch(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    layout: BatchLayout,
    variant: AttentionVariant,
    results: tuple[torch.Tensor, torch.Tensor | None],
) -> None:
    """Attention for every sequence of the batch; shapes as in ``varlen_paged_attention``.

    results: (out, lse or None), written for the rows below cu_seqlens_q[-1]
    """
    out, lse = results
    keys, values = _PagedCache(k_cache), _PagedCache(v_cache)
    plain = variant.is_plain and lse is None
    for start, end in layout.empty:
        out[start:end] = 0
        if lse is not None:
            lse[start:end] = float("-inf")
    chunks = layout.chunks if plain else layout.chunks + layout.singles
    for chunk in chunks:
        _attend_one(q, keys, values, chunk, variant, results)
    if plain:
        for group in layout.groups:
            if not _attend_group(q, keys, values, group, variant.scale, out):
                for single in group.members:
                    _attend_one(q, keys, values, single, variant, results, careful=True)


def _attend_one(
    q: torch.Tensor,
    keys: _PagedCache,
    values: _PagedCache,
    chunk: Chunk,
    variant: AttentionVariant,
    results: tuple[torch.Tensor, torch.Tensor | None],
    careful: bool = False,
) -> None:
    """All queries of one sequence."""
    out, lse = results
    start, end, length = chunk.start, chunk.end, chunk.length
    # The slice drops the slots past the length, whatever they hold.
    k = keys.gather(chunk.row_ids, 1)[:, :length]
    v = values.gather(chunk.row_ids, 1)[:, :length]
    plain = variant.is_plain and lse is None and not careful
    if plain and end - start <= length:
        out[start:end] = _attend_chunk(q[start:end], k, v, variant)
    else:
        _attend_general(q[start:end], k, v, variant, (out[start:end], _rows(lse, start, end)))


def _attend_group(
    q: torch.Tensor,
    keys: _PagedCache,
    values: _PagedCache,
    group: SingleGroup,
    scale: float,
    out: torch.Tensor,
) -> bool:
    """Single queries that see all keys of their sequences; False if a result is not finite.

    The heads that share a key head become query rows, so each key is read once for all of them.
    """
    num_seqs, num_heads, head_dim = group.rows.shape[0], q.shape[1], q.shape[2]
    k = keys.gather(group.row_ids, num_seqs)
    v = values.gather(group.row_ids, num_seqs)
    num_pairs = k.shape[0]
    folded = q.index_select(0, group.rows).view(num_pairs, -1, head_dim)
    hidden = group.mask.expand(num_pairs, folded.shape[1], -1)
    scores = torch.baddbmm(hidden, folded, k.transpose(1, 2), alpha=scale)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
    mixed = torch.bmm(weights, v).view(num_seqs, num_heads, head_dim)
    out.index_copy_(0, group.rows, mixed)
    return bool(torch.isfinite(mixed).all())


def _rows(lse: torch.Tensor | None, start: int, end: int) -> torch.Tensor | None:
    return None if lse is None else lse[start:end]


def _attend_chunk(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, variant: AttentionVariant
) -> torch.Tensor:
    """The last seqlen_q queries of a sequence, causal: q (seqlen_q, num_heads, head_dim).

    The group becomes the batch axis of a stride-0 view of k and v, so one (seqlen_q, length) mask
    serves all heads and nothing is copied.
    """
    seqlen_q, num_heads, head_dim = q.shape
    num_kv_heads, length = k.shape[0], k.shape[1]
    group = num_heads // num_kv_heads
    grouped = q.reshape(seqlen_q, num_kv_heads, group, head_dim).permute(2, 1, 0, 3)
    shared = (group, num_kv_heads, length, head_dim)
    whole = seqlen_q == length
    mask = None
    if not whole:
        # Causality is aligned to the end of the keys; the operator's own flag aligns to the start.
        ones = torch.ones(seqlen_q, length, dtype=torch.bool, device=q.device)
        mask = ones.tril_(length - seqlen_q)
    mixed = scaled_dot_product_attention(
        grouped, k.expand(shared), v.expand(shared), mask, is_causal=whole, scale=variant.scale
    )
    result = mixed.permute(2, 1, 0, 3).reshape(seqlen_q, num_heads, head_dim)
    if not bool(torch.isfinite(result).all()):
        result = torch.empty_like(result)
        _attend_row_by_row(q, k, v, variant, (result, None))
    return result


def _visible_span(position: int, length: int, variant: AttentionVariant) -> tuple[int, int]:
    """Half-open range of the keys that a query at ``position`` sees; it is always contiguous."""
    last = min(position + 1, length) if variant.causal else length
    first = max(0, position - variant.window + 1) if variant.window > 0 else 0
    return min(first, max(last, 0)), max(last, 0)


def _attend_general(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    variant: AttentionVariant,
    results: tuple[torch.Tensor, torch.Tensor | None],
) -> None:
    """Any variant, split so that the scores held at once stay bounded."""
    seqlen_q, num_heads, _ = q.shape
    length = k.shape[1]
    out, lse = results
    rows_at_once = max(1, MAX_SCORE_ELEMENTS // (num_heads * length))
    for start in range(0, seqlen_q, rows_at_once):
        end = min(start + rows_at_once, seqlen_q)
        positions = (length - seqlen_q + start, length - seqlen_q + end)
        part = (out[start:end], _rows(lse, start, end))
        _attend_span(q[start:end], k, v, variant, positions, part)
        if not bool(torch.isfinite(part[0]).all()) and end - start > 1:
            _attend_row_by_row(q[start:end], k, v, variant, part, positions[0])


def _attend_row_by_row(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    variant: AttentionVariant,
    results: tuple[torch.Tensor, torch.Tensor | None],
    first_position: int | None = None,
) -> None:
    """The slow path that touches visible keys only; q (seqlen_q, num_heads, head_dim)."""
    out, lse = results
    start = k.shape[1] - q.shape[0] if first_position is None else first_position
    for row in range(q.shape[0]):
        span = (start + row, start + row + 1)
        part = (out[row : row + 1], _rows(lse, row, row + 1))
        _attend_span(q[row : row + 1], k, v, variant, span, part)


def _attend_span(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    variant: AttentionVariant,
    positions: tuple[int, int],
    results: tuple[torch.Tensor, torch.Tensor | None],
) -> None:
    """Queries at consecutive positions [first, past), in float32; writes (out, lse).

    Works on the keys that at least one of the queries sees, so a single query sees all of them.
    """
    first_position, past = positions
    length = k.shape[1]
    low = _visible_span(first_position, length, variant)[0]
    high = _visible_span(past - 1, length, variant)[1]
    num_rows, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[0]
    group = num_heads // num_kv_heads
    folded = q.float().reshape(num_rows, num_kv_heads, group, head_dim).permute(1, 2, 0, 3)
    folded = folded.reshape(num_kv_heads, group * num_rows, head_dim)
    scores = torch.bmm(folded, k[:, low:high].float().transpose(1, 2)) * variant.scale
    scores = scores.view(num_kv_heads, group, num_rows, high - low)
    query_positions = torch.arange(first_position, past, device=q.device).unsqueeze(1)
    distance = torch.arange(low, high, device=q.device).unsqueeze(0) - query_positions
    scores, visible = _modify_scores(scores, distance, variant)
    weights, total, log_total = _softmax_terms(scores, visible, variant)
    weighted = torch.bmm(weights.view(num_kv_heads, group * num_rows, -1), v[:, low:high].float())
    weighted = weighted.view(num_kv_heads, group, num_rows, head_dim)
    # total is 0 exactly where no key is visible and there is no sink; such rows give 0.
    mixed = weighted / torch.where(total == 0, torch.ones_like(total), total)
    out, lse = results
    out.copy_(mixed.permute(2, 0, 1, 3).reshape(num_rows, num_heads, head_dim))
    if lse is not None:
        lse.copy_(log_total.permute(2, 0, 1, 3).reshape(num_rows, num_heads))


def _modify_scores(
    scores: torch.Tensor, distance: torch.Tensor, variant: AttentionVariant
) -> tuple[torch.Tensor, torch.Tensor]:
    """Soft cap, then ALiBi, then the mask: (scores with -inf where invisible, visible).

    scores:   (num_kv_heads, group, rows, keys) float32
    distance: (rows, keys) int64, key position minus query position
    """
    if variant.softcap > 0.0:
        scores = variant.softcap * torch.tanh(scores / variant.softcap)
    if variant.alibi_slopes is not None:
        slopes = variant.alibi_slopes.float().view(scores.shape[0], scores.shape[1], 1, 1)
        scores = scores + slopes * distance
    visible = torch.ones_like(distance, dtype=torch.bool)
    if variant.causal:
        visible &= distance <= 0
    if variant.window > 0:
        visible &= -distance < variant.window
    return torch.where(visible, scores, float("-inf")), visible


def _softmax_terms(
    scores: torch.Tensor, visible: torch.Tensor, variant: AttentionVariant
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(weights before division, denominator, its logarithm); the last two end in an axis of 1.

    Rows that see nothing get weights and denominator 0 and logarithm -inf, sink or not.
    """
    num_kv_heads, group, num_rows, num_keys = scores.shape
    if num_keys == 0:
        empty = scores.new_zeros(num_kv_heads, group, num_rows, 1)
        return scores, empty, empty + float("-inf")
    peak = scores.amax(dim=-1, keepdim=True)
    sinks = None
    if variant.sinks is not None:
        sinks = variant.sinks.float().view(num_kv_heads, group, 1, 1)
        peak = torch.maximum(peak, sinks)
    peak = torch.where(peak == float("-inf"), 0.0, peak)
    weights = torch.exp(scores - peak)
    total = weights.sum(dim=-1, keepdim=True)
    sees_any = visible.any(dim=-1, keepdim=True)
    if sinks is not None:
        total = total + torch.where(sees_any, torch.exp(sinks - peak), 0.0)
    return weights, total, torch.where(sees_any, peak + torch.log(total), float("-inf"))
