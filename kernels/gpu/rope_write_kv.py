"""Rotary embedding and the KV write in Triton, in one pass over a step's qkv: see
``kernels.rope_write_kv``.

Invariants: a negative slot is skipped; slots are int64 before they are multiplied; a rotated pair
is computed in float32 and rounded once.

Device: rotates the queries in place, writes the KV cache in place.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def rope_write_kv_kernel(
    qkv,
    cos_sin,
    caches,
    slot_mapping,
    qkv_stride,
    cos_sin_stride,
    k_strides,
    v_strides,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HALF_PAD: tl.constexpr,
    HEAD_PAD: tl.constexpr,
):
    """Grid (tokens, num_heads + 2 * num_kv_heads): one head of one token.

    Pairs are (i, i + ROTARY / 2); the dimensions from ROTARY on stay as they are.
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
            v_at = caches[1] + block * v_strides[0] + offset * v_strides[1] + kv_head * v_strides[2]
            tl.store(v_at + dims, tl.load(at + dims, mask=inside, other=0.0), mask=inside)
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
            k_at = caches[0] + block * k_strides[0] + offset * k_strides[1] + kv_head * k_strides[2]
            tl.store(k_at + pairs, first, mask=paired)
            tl.store(k_at + HALF + pairs, second, mask=paired)
            rest = inside & (dims >= ROTARY)
            tl.store(k_at + dims, tl.load(at + dims, mask=rest, other=0.0), mask=rest)


def rope_write_kv_triton(
    qkv: torch.Tensor,
    cos_sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> torch.Tensor:
    """Shapes as in ``kernels.rope_write_kv``; qkv is contiguous in its last two axes.

    returns: the queries, a view of qkv. A slot outside the cache is the caller's to refuse: nothing
    is read back from the device.
    """
    num_kv_heads, head_dim = k_cache.shape[2:]
    num_heads = qkv.shape[1] - 2 * num_kv_heads
    if qkv.shape[0]:
        rope_write_kv_kernel[(qkv.shape[0], qkv.shape[1])](
            qkv,
            cos_sin,
            (k_cache, v_cache),
            slot_mapping,
            qkv.stride(0),
            cos_sin.stride(0),
            k_cache.stride()[:3],
            v_cache.stride()[:3],
            NUM_HEADS=num_heads,
            NUM_KV_HEADS=num_kv_heads,
            HEAD_DIM=head_dim,
            ROTARY=cos_sin.shape[1],
            BLOCK_SIZE=k_cache.shape[1],
            HALF_PAD=triton.next_power_of_2(max(1, cos_sin.shape[1] // 2)),
            HEAD_PAD=triton.next_power_of_2(head_dim),
        )
    return qkv[:, :num_heads]
