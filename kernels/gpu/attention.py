"""Paged attention in Triton: a split kernel for single queries, a tiled one for chunks.

Single queries (decodes) are cut along their keys into a fixed number of segments, so that few
sequences fill a device too; a second kernel merges the segments. Chunks are cut along their rows:
a row of a tile is one head of one query, all heads of one key head together, so that each key is
read once for them.

Invariants: where a row is cut depends on its own length alone, and key tiles start at multiples of
TILE, so a row's bits are the same in any company and any chunking; a key that no row of a tile sees
is never loaded, and a weight of zero never meets a value that is not finite; block ids become int64
before they are multiplied.

Exponentials are powers of two: scores are multiplied by log2(e) = 1.4426950408889634, and a
logarithm by ln(2) = 0.6931471805599453.

Device: reads the KV cache, writes ``out`` and ``lse``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.attention.torch_backend import AttentionVariant
from kernels.gpu.kv_bytes import format_of, split_cache

MAX_HEAD_DIM = 256
KEY_TILE = 32
ROW_TILE = 64
MIN_DOT = 16
"""The least rows that a matrix product takes."""

NUM_SEGMENTS = 16
"""Of a single query's keys; a constant, so that workspace and results depend on no neighbour."""


@triton.jit
def _scores(s, keys_at, queries_at, row_ok, slopes, variant, KIND: tl.constexpr):
    """Raw products (rows, keys) float32 -> scores times log2(e), -inf where a row does not see a
    key. keys_at: positions, -1 where there is no key.
    """
    _, softcap, window = variant
    CAUSAL: tl.constexpr = KIND[0]
    SOFTCAP: tl.constexpr = KIND[1]
    ALIBI: tl.constexpr = KIND[2]
    if SOFTCAP:
        # tanh(x) = 1 - 2 / (exp(2x) + 1) never divides infinity by infinity.
        s = softcap * (1.0 - 2.0 / (tl.exp(2.0 * s / softcap) + 1.0))
    distance = queries_at[:, None] - keys_at[None, :]
    if ALIBI:
        s = s - slopes[:, None] * distance
    visible = row_ok[:, None] & (keys_at >= 0)[None, :]
    if CAUSAL:
        visible = visible & (distance >= 0)
    if window > 0:
        visible = visible & (distance < window)
    return tl.where(visible, s * 1.4426950408889634, float("-inf"))


@triton.jit
def _without_bad(values, scales, weights):
    """Values and their scales with rows that are not finite zeroed, and which rows of weights had
    met one.

    A weight of 0 times NaN is NaN, and the rows of a tile do not all see the same keys.
    """
    bad = tl.max(tl.where(tl.abs(values) < float("inf"), 0, 1), axis=1) > 0
    bad = bad | ((tl.abs(scales) < float("inf")) == 0)
    met = tl.max(tl.where(bad[None, :] & (weights > 0.0), 1, 0), axis=1) > 0
    return tl.where(bad[:, None], 0.0, values), tl.where(bad, 0.0, scales), met


@triton.jit
def _attend_keys(
    q,
    pool,
    strides,
    table_row,
    kv_head,
    rows,
    span,
    variant,
    SHAPE: tl.constexpr,
    KIND: tl.constexpr,
):
    """Keys of `span` for a tile of rows: (weighted values, peak, sum), with powers of 2.

    pool: (k_cache, v_cache, k_scale, v_scale); strides: of a block, a slot and a head, three for
    each of them.
    rows: (positions, which there are, ALiBi slopes).
    span: [first, past) that any row sees, [first, past) that every row sees.
    """
    k_cache, v_cache, k_scale, v_scale = pool
    queries_at, row_ok, slopes = rows
    first, past, first_common, past_common = span
    BLOCK_SIZE: tl.constexpr = SHAPE[0]
    HEAD_DIM: tl.constexpr = SHAPE[1]
    HEAD_PAD: tl.constexpr = SHAPE[2]
    ROWS: tl.constexpr = SHAPE[3]
    TILE: tl.constexpr = SHAPE[4]
    QUANTISED: tl.constexpr = KIND[3] != 0
    dims = tl.arange(0, HEAD_PAD)
    dim_ok = dims < HEAD_DIM
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, HEAD_PAD], tl.float32)
    for start in range((first // TILE) * TILE, past, TILE):
        keys_at = start + tl.arange(0, TILE)
        key_ok = (keys_at >= first) & (keys_at < past)
        block = tl.load(table_row + keys_at // BLOCK_SIZE, mask=key_ok, other=0).to(tl.int64)
        slot = keys_at % BLOCK_SIZE
        k_at = k_cache + block * strides[0] + slot * strides[1] + kv_head * strides[2]
        v_at = v_cache + block * strides[3] + slot * strides[4] + kv_head * strides[5]
        keys = tl.load(k_at[None, :] + dims[:, None], mask=dim_ok[:, None] & key_ok, other=0.0)
        values = tl.load(v_at[:, None] + dims, mask=key_ok[:, None] & dim_ok, other=0.0)
        s = tl.dot(q, keys.to(q.dtype), input_precision="ieee") * variant[0]
        if QUANTISED:
            scale_at = block * strides[6] + slot * strides[7] + kv_head * strides[8]
            s = s * tl.load(k_scale + scale_at, mask=key_ok, other=0.0)[None, :]
        s = _scores(s, tl.where(key_ok, keys_at, -1), queries_at, row_ok, slopes, variant, KIND)
        higher = tl.maximum(peak, tl.max(s, axis=1))
        # A row that has seen nothing has a peak of -inf, and -inf minus -inf is no number.
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(s - base[:, None])
        shrink = tl.exp2(peak - base)
        total = total * shrink + tl.sum(weights, axis=1)
        values = values.to(tl.float32)
        scales = tl.full([TILE], 1.0, tl.float32)
        if QUANTISED:
            scale_at = block * strides[9] + slot * strides[10] + kv_head * strides[11]
            scales = tl.load(v_scale + scale_at, mask=key_ok, other=0.0)
        if (start < first_common) | (start + TILE > past_common):
            values, scales, met = _without_bad(values, scales, weights)
            total = tl.where(met, float("nan"), total)
        if QUANTISED:
            weights = weights * scales[None, :]
        product = tl.dot(weights.to(q.dtype), values.to(q.dtype), input_precision="ieee")
        mixed = mixed * shrink[:, None] + product
        peak = higher
    return mixed, peak, total


@triton.jit
def _add_sink(mixed, peak, total, sink):
    """One more logit in the denominator of every row that sees a key; sink (rows) float32."""
    sees_any = peak > float("-inf")
    higher = tl.where(sees_any, tl.maximum(peak, sink * 1.4426950408889634), peak)
    base = tl.where(sees_any, higher, 0.0)
    shrink = tl.exp2(peak - base)
    total = tl.where(sees_any, total * shrink + tl.exp2(sink * 1.4426950408889634 - base), total)
    return mixed * shrink[:, None], higher, total


@triton.jit
def _sequence_of(tile, cu_seqlens_q, first_seq, num_seqs, QUERIES: tl.constexpr):
    """(sequence, its first tile) that tile belongs to, of those from first_seq on.

    Sequence s begins at tile floor((cu[s] - cu[first]) / QUERIES) + s - first: each has one tile
    more than its share of rows, so none is cut off.
    """
    origin = tl.load(cu_seqlens_q + first_seq)
    low = 0
    high = num_seqs
    while high - low > 1:
        middle = (low + high) // 2
        begins = (tl.load(cu_seqlens_q + first_seq + middle) - origin) // QUERIES + middle
        if begins <= tile:
            low = middle
        else:
            high = middle
    begins = (tl.load(cu_seqlens_q + first_seq + low) - origin) // QUERIES + low
    return first_seq + low, begins


# What a step changes is not specialised: a program for 1 and one for multiples of 16 would each be
# compiled while requests wait.
@triton.jit(do_not_specialize=["table_stride", "first_seq", "num_seqs"])
def chunk_kernel(
    q,
    pool,
    index,
    extras,
    results,
    q_strides,
    pool_strides,
    out_strides,
    table_stride,
    first_seq,
    num_seqs,
    variant,
    GROUP: tl.constexpr,
    QUERIES: tl.constexpr,
    SINKS: tl.constexpr,
    LSE: tl.constexpr,
    SHAPE: tl.constexpr,
    KIND: tl.constexpr,
):
    """Grid (tiles, num_kv_heads): QUERIES queries of one sequence, the heads of one key head.

    index: (cu_seqlens_q, seqlens_k, block_table); extras: (alibi_slopes, sinks); results: (out,
    lse); out_strides: of a token and a head of out, of a token of lse; sequences
    [first_seq, first_seq + num_seqs).
    """
    cu_seqlens_q, seqlens_k, block_table = index
    kv_head = tl.program_id(1)
    seq, first_tile = _sequence_of(tl.program_id(0), cu_seqlens_q, first_seq, num_seqs, QUERIES)
    start = tl.load(cu_seqlens_q + seq)
    length_q = tl.load(cu_seqlens_q + seq + 1) - start
    length_k = tl.load(seqlens_k + seq)
    first_query = (tl.program_id(0) - first_tile) * QUERIES
    if first_query >= length_q:
        return
    cells = tl.arange(0, SHAPE[3])
    queries = first_query + cells // GROUP
    heads = kv_head * GROUP + cells % GROUP
    row_ok = (cells < QUERIES * GROUP) & (queries < length_q)
    dims = tl.arange(0, SHAPE[2])
    tokens = (start + queries).to(tl.int64)
    cells_ok = row_ok[:, None] & (dims < SHAPE[1])[None, :]
    q_at = tokens * q_strides[0] + heads * q_strides[1]
    q_tile = tl.load(q + q_at[:, None] + dims[None, :], mask=cells_ok, other=0.0)
    slopes = queries.to(tl.float32)
    if KIND[2]:
        slopes = tl.load(extras[0] + heads, mask=row_ok, other=0.0)
    # Positions of the first and the last query of the tile decide who sees what.
    behind = length_k - length_q
    first_at = behind + first_query
    last_at = behind + tl.minimum(first_query + QUERIES, length_q) - 1
    first_key = 0
    first_common = 0
    past_key = length_k
    past_common = length_k
    if KIND[0]:
        past_key = tl.maximum(0, last_at + 1)
        past_common = first_at + 1
    if variant[2] > 0:
        first_key = tl.maximum(0, first_at - variant[2] + 1)
        first_common = last_at - variant[2] + 1
    mixed, peak, total = _attend_keys(
        q_tile,
        pool,
        pool_strides,
        block_table + seq.to(tl.int64) * table_stride,
        kv_head,
        (behind + queries, row_ok, slopes),
        (first_key, past_key, first_common, past_common),
        variant,
        SHAPE,
        KIND,
    )
    if SINKS:
        sink = tl.load(extras[1] + heads, mask=row_ok, other=float("-inf"))
        mixed, peak, total = _add_sink(mixed, peak, total, sink)
    # Exactly the rows without a key have a sum of 0.
    whole = tl.where(total == 0.0, 1.0, total)
    result = mixed / whole[:, None]
    out, lse = results
    out_at = tokens * out_strides[0] + heads * out_strides[1]
    tl.store(out + out_at[:, None] + dims[None, :], result.to(out.dtype.element_ty), mask=cells_ok)
    if LSE:
        log_total = (peak + tl.log2(whole)) * 0.6931471805599453
        log_total = tl.where(total == 0.0, float("-inf"), log_total)
        tl.store(lse + tokens * out_strides[2] + heads, log_total, mask=row_ok)


@triton.jit(do_not_specialize=["table_stride"])
def single_kernel(
    q,
    pool,
    index,
    extras,
    parts,
    q_strides,
    pool_strides,
    table_stride,
    variant,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    SEGMENTS: tl.constexpr,
    SHAPE: tl.constexpr,
    KIND: tl.constexpr,
):
    """Grid (num_decodes, num_kv_heads, SEGMENTS): one query, one segment of its keys.

    parts: weighted values (num_decodes, NUM_HEADS, SEGMENTS, head_pad), peaks and sums without the
    last axis, float32: what the merge needs. A segment without keys writes (0, -inf, 0).
    """
    cu_seqlens_q, seqlens_k, block_table = index
    seq = tl.program_id(0)
    kv_head = tl.program_id(1)
    segment = tl.program_id(2)
    length = tl.load(seqlens_k + seq)
    TILE: tl.constexpr = SHAPE[4]
    first_key = 0
    if variant[2] > 0:
        first_key = tl.maximum(0, length - variant[2])
    # Whole tiles to a segment, from the first that is seen: its own length decides.
    first_tile = first_key // TILE
    tiles = tl.cdiv(tl.cdiv(length, TILE) - first_tile, SEGMENTS)
    start = (first_tile + segment * tiles) * TILE
    past = tl.minimum(length, start + tiles * TILE)
    cells = tl.arange(0, SHAPE[3])
    row_ok = cells < GROUP
    heads = kv_head * GROUP + cells
    dims = tl.arange(0, SHAPE[2])
    q_at = tl.load(cu_seqlens_q + seq).to(tl.int64) * q_strides[0] + heads * q_strides[1]
    cells_ok = row_ok[:, None] & (dims < SHAPE[1])[None, :]
    q_tile = tl.load(q + q_at[:, None] + dims[None, :], mask=cells_ok, other=0.0)
    slopes = heads.to(tl.float32)
    if KIND[2]:
        slopes = tl.load(extras[0] + heads, mask=row_ok, other=0.0)
    mixed, peak, total = _attend_keys(
        q_tile,
        pool,
        pool_strides,
        block_table + seq.to(tl.int64) * table_stride,
        kv_head,
        (tl.zeros([SHAPE[3]], tl.int32) + length - 1, row_ok, slopes),
        (tl.maximum(start, first_key), past, first_key, length),
        variant,
        SHAPE,
        KIND,
    )
    part = (seq.to(tl.int64) * NUM_HEADS + heads) * SEGMENTS + segment
    mixed_at = parts[0] + part[:, None] * SHAPE[2] + dims[None, :]
    tl.store(mixed_at, mixed, mask=row_ok[:, None])
    tl.store(parts[1] + part, peak, mask=row_ok)
    tl.store(parts[2] + part, total, mask=row_ok)


@triton.jit
def merge_kernel(
    parts,
    extras,
    results,
    cu_seqlens_q,
    out_strides,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    SEGMENTS: tl.constexpr,
    SINKS: tl.constexpr,
    LSE: tl.constexpr,
):
    """Grid (num_decodes, NUM_HEADS): the segments of one head of one query."""
    seq = tl.program_id(0)
    head = tl.program_id(1)
    dims = tl.arange(0, HEAD_PAD)
    part = (seq.to(tl.int64) * NUM_HEADS + head) * SEGMENTS + tl.arange(0, SEGMENTS)
    mixed = tl.load(parts[0] + part[:, None] * HEAD_PAD + dims[None, :])
    peaks = tl.load(parts[1] + part)
    totals = tl.load(parts[2] + part)
    peak = tl.max(peaks, axis=0)
    sees_any = peak > float("-inf")
    if SINKS:
        sink = tl.load(extras[1] + head) * 1.4426950408889634
        peak = tl.where(sees_any, tl.maximum(peak, sink), peak)
    base = tl.where(sees_any, peak, 0.0)
    shrink = tl.exp2(peaks - base)
    total = tl.sum(totals * shrink, axis=0)
    if SINKS:
        total = tl.where(sees_any, total + tl.exp2(sink - base), total)
    total = tl.where(sees_any, total, 1.0)
    result = tl.sum(mixed * shrink[:, None], axis=0) / total
    out, lse = results
    token = tl.load(cu_seqlens_q + seq).to(tl.int64)
    at = token * out_strides[0] + head * out_strides[1]
    tl.store(out + at + dims, result.to(out.dtype.element_ty), mask=dims < HEAD_DIM)
    if LSE:
        log_total = tl.where(sees_any, (peak + tl.log2(total)) * 0.6931471805599453, float("-inf"))
        tl.store(lse + token * out_strides[2] + head, log_total)


def attend_triton(
    q: torch.Tensor,
    caches: tuple[torch.Tensor, torch.Tensor],
    indices: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    variant: AttentionVariant,
    results: tuple[torch.Tensor, torch.Tensor | None],
    *,
    num_decodes: int = 0,
) -> None:
    """Attention for every sequence of the batch; shapes as in ``varlen_paged_attention``.

    caches:      (k_cache, v_cache), of the dtype of q or of bytes
    indices:     (cu_seqlens_q, seqlens_k, block_table) int32, on the device of q
    results:     (out, lse or None), written for the rows below cu_seqlens_q[-1]
    num_decodes: the first num_decodes sequences have exactly one query each

    Nothing is read back from the device, and grids follow shapes and num_decodes alone, so that
    launches can be captured. Raises ValueError for heads of more than MAX_HEAD_DIM, and for a cache
    of bytes as ``split_cache`` does.
    """
    if q.shape[2] > MAX_HEAD_DIM:
        raise ValueError(f"the triton backend takes heads up to {MAX_HEAD_DIM}, got {q.shape[2]}")
    out, lse = results
    keys, key_scales = split_cache(caches[0])
    values, value_scales = split_cache(caches[1])
    pool = (keys, values, key_scales, value_scales)
    launch = _Launch(
        q=q,
        pool=pool,
        index=indices,
        # Where there are none the kernel is told so, and follows no pointer.
        extras=(_or(variant.alibi_slopes, q), _or(variant.sinks, q)),
        results=(out, _or(lse, out)),
        pool_strides=tuple(stride for part in pool for stride in part.stride()[:3]),
        out_strides=(*out.stride()[:2], 0 if lse is None else lse.stride(0)),
        variant=(variant.scale, variant.softcap, variant.window),
        has_sinks=variant.sinks is not None,
        has_lse=lse is not None,
        kind=(
            variant.causal,
            variant.softcap > 0.0,
            variant.alibi_slopes is not None,
            format_of(caches[0]),
        ),
    )
    if num_decodes:
        _attend_singles(launch, num_decodes)
    if indices[1].shape[0] > num_decodes:
        _attend_chunks(launch, num_decodes)


@dataclass(frozen=True, slots=True, eq=False)
class _Launch:
    """The arguments that both kernels take: see ``chunk_kernel``."""

    q: torch.Tensor
    pool: tuple[torch.Tensor, ...]
    index: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    extras: tuple[torch.Tensor, torch.Tensor]
    results: tuple[torch.Tensor, torch.Tensor]
    pool_strides: tuple[int, ...]
    out_strides: tuple[int, ...]
    variant: tuple[float, float, int]
    has_sinks: bool
    has_lse: bool
    kind: tuple[bool, bool, bool, int]

    @property
    def group(self) -> int:
        return int(self.q.shape[1]) // int(self.pool[0].shape[2])

    @property
    def head_pad(self) -> int:
        return max(MIN_DOT, int(triton.next_power_of_2(self.q.shape[2])))

    def shape(self, rows: int) -> tuple[int, int, int, int, int]:
        """(block_size, head_dim, head_pad, rows of a tile, keys of a tile)."""
        return (self.pool[0].shape[1], self.q.shape[2], self.head_pad, rows, KEY_TILE)


def _attend_singles(launch: _Launch, num_decodes: int) -> None:
    q, group = launch.q, launch.group
    num_heads = q.shape[1]
    parts = (num_decodes, num_heads, NUM_SEGMENTS)
    mixed = torch.empty((*parts, launch.head_pad), dtype=torch.float32, device=q.device)
    peaks, totals = torch.empty((2, *parts), dtype=torch.float32, device=q.device).unbind(0)
    single_kernel[(num_decodes, num_heads // group, NUM_SEGMENTS)](
        q,
        launch.pool,
        launch.index,
        launch.extras,
        (mixed, peaks, totals),
        q.stride()[:2],
        launch.pool_strides,
        launch.index[2].stride(0),
        launch.variant,
        NUM_HEADS=num_heads,
        GROUP=group,
        SEGMENTS=NUM_SEGMENTS,
        SHAPE=launch.shape(max(MIN_DOT, triton.next_power_of_2(group))),
        # A single query sees everything up to itself, which is the end.
        KIND=(True, *launch.kind[1:]),
    )
    merge_kernel[(num_decodes, num_heads)](
        (mixed, peaks, totals),
        launch.extras,
        launch.results,
        launch.index[0],
        launch.out_strides,
        NUM_HEADS=num_heads,
        HEAD_DIM=q.shape[2],
        HEAD_PAD=launch.head_pad,
        SEGMENTS=NUM_SEGMENTS,
        SINKS=launch.has_sinks,
        LSE=launch.has_lse,
    )


def _attend_chunks(launch: _Launch, num_decodes: int) -> None:
    q, group = launch.q, launch.group
    rows = max(ROW_TILE, triton.next_power_of_2(group))
    queries = rows // group
    num_seqs = launch.index[1].shape[0] - num_decodes
    # Rows past the last query (a padded step) only cost tiles that find nothing to do.
    num_tiles = (q.shape[0] - num_decodes) // queries + num_seqs
    chunk_kernel[(num_tiles, q.shape[1] // group)](
        q,
        launch.pool,
        launch.index,
        launch.extras,
        launch.results,
        q.stride()[:2],
        launch.pool_strides,
        launch.out_strides,
        launch.index[2].stride(0),
        num_decodes,
        num_seqs,
        launch.variant,
        GROUP=group,
        QUERIES=queries,
        SINKS=launch.has_sinks,
        LSE=launch.has_lse,
        SHAPE=launch.shape(rows),
        KIND=launch.kind,
    )


def _or(tensor: torch.Tensor | None, other: torch.Tensor) -> torch.Tensor:
    return other if tensor is None else tensor
