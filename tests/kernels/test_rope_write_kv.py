from __future__ import annotations

import pytest
import torch

from kernels.native import NativeKernels
from kernels.rope import apply_rope, build_rope_table
from kernels.rope_write_kv import rope_write_kv

NUM_HEADS, NUM_KV_HEADS, NUM_BLOCKS, BLOCK_SIZE = 6, 2, 5, 16


def caches(head_dim: int, dtype: torch.dtype) -> list[torch.Tensor]:
    shape = (NUM_BLOCKS, NUM_KV_HEADS, BLOCK_SIZE, head_dim)
    return [torch.zeros(shape, dtype=dtype).permute(0, 2, 1, 3) for _ in range(2)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim, rotary_dim", [(64, 64), (40, 40), (8, 4), (128, 128)])
def test_queries_turn_and_keys_land_turned_in_their_slots(
    maybe_native: NativeKernels | None, dtype: torch.dtype, head_dim: int, rotary_dim: int
) -> None:
    qkv = torch.randn(5, NUM_HEADS + 2 * NUM_KV_HEADS, head_dim).to(dtype)
    cos_sin = build_rope_table(rotary_dim, 300, 1e4)[torch.tensor([0, 7, 299, 8, 9])]
    slots = torch.tensor([35, -1, 16, 63, 79])
    k_cache, v_cache = caches(head_dim, dtype)
    turned = apply_rope(qkv, cos_sin)
    values = qkv[:, NUM_HEADS + NUM_KV_HEADS :].clone()
    queries = rope_write_kv(qkv.clone(), cos_sin, k_cache, v_cache, slots, maybe_native)
    tolerance = 1e-6 if dtype == torch.float32 else 1e-2
    assert torch.allclose(queries, turned[:, :NUM_HEADS], rtol=tolerance, atol=tolerance)
    for row, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        block, offset = divmod(slot, BLOCK_SIZE)
        expected = turned[row, NUM_HEADS : NUM_HEADS + NUM_KV_HEADS]
        assert torch.allclose(k_cache[block, offset], expected, rtol=tolerance, atol=tolerance)
        assert torch.equal(v_cache[block, offset], values[row])
    for cache in (k_cache, v_cache):
        assert int((cache != 0).any(dim=-1).any(dim=-1).sum()) == 4


def test_no_tokens(maybe_native: NativeKernels | None) -> None:
    k_cache, v_cache = caches(8, torch.float32)
    qkv = torch.zeros(0, NUM_HEADS + 2 * NUM_KV_HEADS, 8)
    no_slots = torch.zeros(0, dtype=torch.int64)
    queries = rope_write_kv(qkv, torch.zeros(0, 8), k_cache, v_cache, no_slots, maybe_native)
    assert queries.shape == (0, NUM_HEADS, 8)


def test_a_slot_outside_the_cache_is_refused(maybe_native: NativeKernels | None) -> None:
    k_cache, v_cache = caches(8, torch.float32)
    qkv = torch.ones(1, NUM_HEADS + 2 * NUM_KV_HEADS, 8)
    slots = torch.tensor([NUM_BLOCKS * BLOCK_SIZE])
    with pytest.raises((ValueError, IndexError)):
        rope_write_kv(qkv, torch.ones(1, 8), k_cache, v_cache, slots, maybe_native)
    assert not k_cache.any() and not v_cache.any()
