from __future__ import annotations

import pytest
import torch

from kernels.gpu.rope_write_kv import rope_write_kv_triton
from kernels.rope import build_rope_table
from kernels.rope_write_kv import rope_write_kv
from tests.kernels.test_rope_write_kv import NUM_HEADS, NUM_KV_HEADS, caches


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("head_dim, rotary_dim", [(64, 64), (40, 40), (8, 4), (32, 0)])
def test_it_is_the_reference(dtype: torch.dtype, head_dim: int, rotary_dim: int) -> None:
    qkv = torch.randn(5, NUM_HEADS + 2 * NUM_KV_HEADS, head_dim).to(dtype)
    cos_sin = build_rope_table(rotary_dim, 300, 1e4)[torch.tensor([0, 7, 299, 8, 9])]
    slots = torch.tensor([35, -1, 16, 63, 79])
    expected_caches, got_caches = caches(head_dim, dtype), caches(head_dim, dtype)
    expected = rope_write_kv(qkv.clone(), cos_sin, *expected_caches, slots)
    got = rope_write_kv_triton(qkv.clone(), cos_sin, *got_caches, slots)
    tolerance = 1e-6 if dtype == torch.float32 else 2e-3
    assert torch.allclose(got, expected, rtol=tolerance, atol=tolerance)
    for mine, reference in zip(got_caches, expected_caches, strict=True):
        assert torch.allclose(mine, reference, rtol=tolerance, atol=tolerance)
        # Row 1 has no slot, and the last slot of the pool is not one either.
        assert int((mine != 0).any(dim=-1).any(dim=-1).sum()) == 4


def test_no_tokens() -> None:
    qkv = torch.zeros(0, NUM_HEADS + 2 * NUM_KV_HEADS, 8)
    none = torch.zeros(0, dtype=torch.int64)
    queries = rope_write_kv_triton(qkv, torch.zeros(0, 8), *caches(8, torch.float32), none)
    assert queries.shape == (0, NUM_HEADS, 8)
