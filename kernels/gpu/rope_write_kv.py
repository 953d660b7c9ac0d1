"""Rotary embedding and the KV write in Triton, in one pass over a step's qkv: see
``kernels.rope_write_kv``.

Invariants: a negative slot is skipped; slots are int64 before they are multiplied; a rotated pair
is computed in float32 and rounded once, before it becomes bytes where the cache has those.

Device: rotates the queries in place, writes the KV cache in place.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.gpu.kv_bytes import format_of, head_scale, row_peak, split_cache, to_stored
from kernels.kv_bytes import head_dim_of


@triton.jit
def rope_write_kv_kernel(
    qkv,
    cos_sin,
    caches,
    slot_mapping,
    qkv_stride,
    cos_sin_stride,
    pool_strides,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HALF_PAD: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """Grid (tokens, num_heads + 2 * num_kv_heads): one head of one token.

    Pairs are (i, i + ROTARY / 2); the dimensions from ROTARY on stay as they are.
    caches: (k_cache, v_cache, k_scale, v_scale); pool_strides: of a block, a slot and a head, three
    for each.
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    at = qkv + token * qkv_stride + head * HEAD_DIM
    slot = tl.load(slot_mapping + token)
    block = slot // BLOCK_SIZE
    offset = slot % BLOCK_SIZE
    dims = tl.arange(0, HEAD_PAD)
    inside = dims < HEAD_DIM
    if head >= NUM_HEADS + NUM_KV_HEADS:
        if slot >= 0:
            kv_head = head - NUM_HEADS - NUM_KV_HEADS
            value = tl.load(at + dims, mask=inside, other=0.0)
            v_at = _place(caches[1], pool_strides, 3, block, offset, kv_head)
            if FORMAT:
                wide = value.to(tl.float32)
                peak, bad = row_peak(wide)
                factor, scale = head_scale(peak, bad, FORMAT)
                tl.store(v_at + dims, to_stored(wide, factor, FORMAT), mask=inside)
                tl.store(_place(caches[3], pool_strides, 9, block, offset, kv_head), scale)
            else:
                tl.store(v_at + dims, value, mask=inside)
    else:
        HALF: tl.constexpr = ROTARY // 2
        pairs = tl.arange(0, HALF_PAD)
        paired = pairs < HALF
        table = cos_sin + token * cos_sin_stride
        cos = tl.load(table + pairs, mask=paired, other=1.0)
        sin = tl.load(table + HALF + pairs, mask=paired, other=0.0)
        low = tl.load(at + pairs, mask=paired, other=0.0)
        high = tl.load(at + HALF + pairs, mask=paired, other=0.0)
        dtype = low.dtype
        first = (low.to(tl.float32) * cos - high.to(tl.float32) * sin).to(dtype)
        second = (high.to(tl.float32) * cos + low.to(tl.float32) * sin).to(dtype)
        if head < NUM_HEADS:
            tl.store(at + pairs, first, mask=paired)
            tl.store(at + HALF + pairs, second, mask=paired)
        elif slot >= 0:
            kv_head = head - NUM_HEADS
            k_at = _place(caches[0], pool_strides, 0, block, offset, kv_head)
            rest = inside & (dims >= ROTARY)
            tail = tl.load(at + dims, mask=rest, other=0.0)
            if FORMAT:
                turned = first.to(tl.float32)
                turned_too = second.to(tl.float32)
                unturned = tail.to(tl.float32)
                peak, bad = row_peak(tl.where(paired, turned, 0.0))
                peak_too, bad_too = row_peak(tl.where(paired, turned_too, 0.0))
                peak_rest, bad_rest = row_peak(unturned)
                peak = tl.maximum(tl.maximum(peak, peak_too), peak_rest)
                factor, scale = head_scale(peak, bad + bad_too + bad_rest, FORMAT)
                tl.store(k_at + pairs, to_stored(turned, factor, FORMAT), mask=paired)
                tl.store(k_at + HALF + pairs, to_stored(turned_too, factor, FORMAT), mask=paired)
                tl.store(k_at + dims, to_stored(unturned, factor, FORMAT), mask=rest)
                tl.store(_place(caches[2], pool_strides, 6, block, offset, kv_head), scale)
            else:
                tl.store(k_at + pairs, first, mask=paired)
                tl.store(k_at + HALF + pairs, second, mask=paired)
                tl.store(k_at + dims, tail, mask=rest)


@triton.jit
def _place(tensor, strides, FIRST: tl.constexpr, block, offset, kv_head):
    """Address of a head of a slot, by the three strides from FIRST on."""
    return (
        tensor + block * strides[FIRST] + offset * strides[FIRST + 1] + kv_head * strides[FIRST + 2]
    )


def rope_write_kv_triton(
    qkv: torch.Tensor,
    cos_sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> torch.Tensor:
    """Shapes as in ``kernels.rope_write_kv``; qkv is contiguous in its last two axes.

    returns: the queries, a view of qkv. A slot outside the cache is the caller's to refuse: nothing
    is read back from the device. Raises ValueError as ``split_cache`` does.
    """
    num_kv_heads, head_dim = k_cache.shape[2], head_dim_of(k_cache)
    keys, key_scales = split_cache(k_cache)
    values, value_scales = split_cache(v_cache)
    pool = (keys, values, key_scales, value_scales)
    num_heads = qkv.shape[1] - 2 * num_kv_heads
    if qkv.shape[0]:
        rope_write_kv_kernel[(qkv.shape[0], qkv.shape[1])](
            qkv,
            cos_sin,
            pool,
            slot_mapping,
            qkv.stride(0),
            cos_sin.stride(0),
            tuple(stride for part in pool for stride in part.stride()[:3]),
            NUM_HEADS=num_heads,
            NUM_KV_HEADS=num_kv_heads,
            HEAD_DIM=head_dim,
            ROTARY=cos_sin.shape[1],
            BLOCK_SIZE=k_cache.shape[1],
            HALF_PAD=triton.next_power_of_2(max(1, cos_sin.shape[1] // 2)),
            HEAD_PAD=triton.next_power_of_2(head_dim),
            FORMAT=format_of(k_cache),
        )
    return qkv[:, :num_heads]
