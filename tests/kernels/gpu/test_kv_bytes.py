"""Caches of bytes in Triton: written as the reference writes them, read up to rounding."""

from __future__ import annotations

import pytest
import torch

from kernels.gpu.attention import KEY_TILE
from kernels.gpu.kv_bytes import split_cache
from kernels.gpu.rope_write_kv import rope_write_kv_triton
from kernels.kv_bytes import FP8_CACHE, INT8_CACHE, quantise_heads
from kernels.rope import build_rope_table
from kernels.rope_write_kv import rope_write_kv
from tests.kernels.gpu.test_attention import attend
from tests.kernels.test_attention import Case, assert_close, build, oracle
from tests.kernels.test_kv_bytes import as_bytes

CACHES = [INT8_CACHE, FP8_CACHE]


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("cache_dtype", CACHES)
@pytest.mark.parametrize("num_decodes", [0, 2])
def test_attention_is_that_of_what_is_stored(cache_dtype: torch.dtype, num_decodes: int) -> None:
    """Slots that nothing was written to, and table entries past the end, are poison."""
    lengths = [(1, KEY_TILE + 3), (1, 5), (5, 20), (0, 3), (2, 0)]
    batch = as_bytes(build(Case(lengths, num_kv_heads=1, group=3, head_dim=40)), cache_dtype)
    got = attend(batch, num_decodes=num_decodes, window=17)
    assert_close(got, oracle(batch, 40**-0.5, window=17)[0], torch.float32)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("cache_dtype", CACHES)
def test_a_poisoned_slot_reaches_only_those_who_see_it(cache_dtype: torch.dtype) -> None:
    batch = as_bytes(build(Case([(8, 24)], num_kv_heads=1, group=2, head_dim=32)), cache_dtype)
    clean = attend(batch)
    block = int(batch.block_table[0, 1])
    for cache in (batch.k_cache, batch.v_cache):
        cache.view(torch.uint8)[block, 4] = 255
    dirty = attend(batch)
    # Queries sit at positions 16 to 23; those before position 20 do not see the slot.
    assert torch.equal(dirty[:4], clean[:4])
    assert torch.isnan(dirty[4]).all()


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("cache_dtype", CACHES)
@pytest.mark.parametrize("head_dim, rotary_dim", [(64, 64), (40, 16)])
def test_the_write_is_that_of_the_reference(
    cache_dtype: torch.dtype, head_dim: int, rotary_dim: int
) -> None:
    qkv = torch.randn(6, 8, head_dim) * torch.randn(6, 8, 1).exp()
    qkv[4, 5] = 0
    qkv[5, 4, -1] = float("inf")
    rope = build_rope_table(rotary_dim, 32, 10000.0)[:6].contiguous()
    slots = torch.tensor([3, 40, -1, 17, 63, 5])
    stored = [torch.full((2, 4, 2, 16, head_dim + 4), 255, dtype=torch.uint8) for _ in range(2)]
    caches = [pair.view(cache_dtype).permute(0, 1, 3, 2, 4) for pair in stored]
    expected = rope_write_kv(qkv.clone(), rope, *caches[0].unbind(0), slots)
    got = rope_write_kv_triton(qkv.clone(), rope, *caches[1].unbind(0), slots)
    assert torch.allclose(got, expected, atol=1e-5)
    # Values are the same to the bit; a turned key may round to the neighbouring byte.
    assert torch.equal(stored[1][1], stored[0][1])
    scales, expected_scales = (split_cache(pair[0])[1] for pair in caches)
    assert torch.allclose(scales, expected_scales, rtol=1e-6, equal_nan=True)
    differ = stored[1][0][..., :head_dim] != stored[0][0][..., :head_dim]
    assert float(differ.float().mean()) < 0.01
    assert int((stored[1][0] != 255).any(dim=-1).sum()) == 5 * 2


def test_every_finite_byte_of_e4m3_and_what_lies_between_rounds_as_in_torch() -> None:
    grid = torch.arange(127, dtype=torch.uint8).view(FP8_CACHE).float()
    between = torch.cat((grid, (grid[1:] + grid[:-1]) / 2, torch.rand(259) * 448))
    heads = torch.cat((between, -between)).view(2, 1, 8, 64)
    heads[..., 0] = 448.0
    stored = torch.zeros(2, 1, 8, 68, dtype=torch.uint8).view(FP8_CACHE)
    qkv = torch.zeros(2, 24, 64)
    qkv[:, 8:16] = qkv[:, 16:] = heads[:, 0]
    caches = (stored.clone(), stored)
    rope_write_kv_triton(qkv, torch.zeros(2, 0), *caches, torch.tensor([0, 1]))
    expected = quantise_heads(heads, FP8_CACHE)
    for cache in caches:
        # As floats: what rounds to zero may lose its sign.
        assert torch.equal(cache[..., :64].float(), expected[..., :64].float())


def test_head_sizes_that_tear_the_scale_apart_are_refused() -> None:
    with pytest.raises(ValueError, match="a multiple of 4, got 6"):
        split_cache(torch.zeros(1, 1, 1, 10, dtype=torch.uint8))
