from __future__ import annotations

import pytest
import torch

from kernels.kv_bytes import (
    FP8_CACHE,
    INT8_CACHE,
    head_dim_of,
    quantise_heads,
    restore_heads,
)
from kernels.native import INSTRUCTION_SETS, NativeKernels, load_native
from kernels.rope import build_rope_table
from kernels.rope_write_kv import rope_write_kv
from tests.kernels.test_attention import MIXED, RELATIVE_ERROR, Batch, Case, attend, build, oracle

DTYPES = [torch.float32, torch.bfloat16]
CACHES = [INT8_CACHE, FP8_CACHE]


def as_bytes(batch: Batch, cache_dtype: torch.dtype = INT8_CACHE) -> Batch:
    """The same batch on a cache of bytes, and its keys and values as that cache gives them back.

    Slots that nothing was written to hold bytes of 255 and a scale that is NaN.
    """
    caches = []
    for cache in (batch.k_cache, batch.v_cache):
        stored = quantise_heads(cache, cache_dtype)
        stored.view(torch.uint8)[torch.isnan(cache).all(dim=-1)] = 255
        by_head = stored.permute(0, 2, 1, 3).contiguous()
        caches.append(by_head.permute(0, 2, 1, 3))
    keys, values = (
        [restore_heads(quantise_heads(x, cache_dtype), torch.float32) for x in stored]
        for stored in (batch.keys, batch.values)
    )
    return Batch(
        batch.q,
        keys,
        values,
        caches[0],
        caches[1],
        batch.cu_seqlens_q,
        batch.seqlens_k,
        batch.block_table,
    )


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    assert torch.isfinite(actual).all()
    return float((actual.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("cache_dtype", CACHES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_heads_come_back_within_half_a_step(dtype: torch.dtype, cache_dtype: torch.dtype) -> None:
    x = (torch.randn(5, 3, 40) * torch.randn(5, 3, 1).exp()).to(dtype)
    x[1, 1] = 0
    x[2, 0, 7] = float("inf")
    stored = quantise_heads(x, cache_dtype)
    assert stored.shape == (5, 3, 44) and head_dim_of(stored) == 40
    restored = restore_heads(stored, torch.float32)
    assert restored[2, 0].isnan().all() and not restored[1, 1].any()
    sound = torch.isfinite(x).all(dim=-1)
    exact = x.float()[sound]
    peaks = exact.abs().amax(dim=-1, keepdim=True)
    # e4m3 has 3 bits behind the point of each power of two, of which the least is 448 / 2^15.
    step = peaks / 127
    if cache_dtype == FP8_CACHE:
        step = torch.maximum(exact.abs(), peaks / 448 / 64) / 8
    assert ((restored[sound] - exact).abs() <= step * 0.5001).all()


@pytest.mark.parametrize(
    "block_size, cache_dtype",
    [(1, INT8_CACHE), (16, INT8_CACHE), (64, INT8_CACHE), (16, FP8_CACHE)],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_matches_the_oracle_of_what_is_stored(
    maybe_native: NativeKernels | None,
    block_size: int,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
) -> None:
    original = build(Case(MIXED, block_size=block_size, dtype=dtype))
    batch = as_bytes(original, cache_dtype)
    out = attend(maybe_native, batch, num_decodes=4)
    assert error(out, oracle(batch, 64**-0.5)[0]) < RELATIVE_ERROR[dtype]
    assert error(out, oracle(original, 64**-0.5)[0]) < 5e-2


@pytest.mark.parametrize("isa", INSTRUCTION_SETS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "head_dim, cache_dtype",
    [*((dim, INT8_CACHE) for dim in (32, 40, 80, 128, 256)), (40, FP8_CACHE), (128, FP8_CACHE)],
)
def test_every_instruction_set(
    native: NativeKernels, isa: str, dtype: torch.dtype, head_dim: int, cache_dtype: torch.dtype
) -> None:
    if isa not in native.available:
        pytest.skip(f"this processor has no {isa}")
    lengths = [(1, 33), (7, 19), (1, 64), (1, 70), (3, 131), (1, 600)]
    case = Case(lengths, num_kv_heads=2, group=4, head_dim=head_dim, dtype=dtype)
    batch = as_bytes(build(case), cache_dtype)
    backend = load_native(isa=isa)
    for options in ({}, {"window": 50, "softcap": 25.0}):
        expected = oracle(batch, head_dim**-0.5, **options)[0]  # type: ignore[arg-type]
        assert error(attend(backend, batch, **options), expected) < RELATIVE_ERROR[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_have_the_same_bits_in_any_company_and_number_of_threads(
    native: NativeKernels, dtype: torch.dtype
) -> None:
    batch = as_bytes(build(Case([(1, 1300), (30, 200), (1, 9)], dtype=dtype)))
    together = attend(native, batch)
    alone = Batch(
        batch.q[:1],
        [],
        [],
        batch.k_cache,
        batch.v_cache,
        torch.tensor([0, 1], dtype=torch.int32),
        batch.seqlens_k[:1],
        batch.block_table[:1],
    )
    threads = torch.get_num_threads()
    try:
        for num_threads in (1, 2, 3):
            torch.set_num_threads(num_threads)
            assert torch.equal(attend(native, batch), together)
            assert torch.equal(attend(native, alone), together[:1])
    finally:
        torch.set_num_threads(threads)


def test_a_poisoned_slot_reaches_only_those_who_see_it(maybe_native: NativeKernels | None) -> None:
    batch = as_bytes(build(Case([(8, 24), (1, 9)])))
    clean = attend(maybe_native, batch)
    block = int(batch.block_table[0, 1])
    batch.k_cache[block, 4], batch.v_cache[block, 4] = 255, 255
    dirty = attend(maybe_native, batch)
    # Queries sit at positions 16 to 23; those before position 20 do not see the slot.
    assert torch.allclose(dirty[:4], clean[:4], atol=1e-5)
    assert torch.equal(dirty[8], clean[8])
    assert dirty[4].isnan().all()


@pytest.mark.parametrize("isa", INSTRUCTION_SETS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 40])
@pytest.mark.parametrize("cache_dtype", CACHES)
def test_the_write_is_that_of_the_reference(
    native: NativeKernels, isa: str, dtype: torch.dtype, head_dim: int, cache_dtype: torch.dtype
) -> None:
    if isa not in native.available:
        pytest.skip(f"this processor has no {isa}")
    qkv = torch.randn(9, 8, head_dim).to(dtype)
    qkv[4, 5] = 0
    # Elements far below the largest of their head are where e4m3 has fewer bits.
    qkv[5, 6:, ::2] *= 1e-4
    rope = build_rope_table(head_dim, 32, 10000.0)[:9].contiguous()
    slots = torch.tensor([3, 40, -1, 17, 0, 63, 5, 31, 32])
    caches = [torch.full((2, 4, 16, 2, head_dim + 4), 255, dtype=torch.uint8) for _ in range(2)]
    first, second = (cache.view(cache_dtype) for cache in caches)
    expected = rope_write_kv(qkv.clone(), rope, *first.unbind(0), slots)
    actual = rope_write_kv(qkv.clone(), rope, *second.unbind(0), slots, load_native(isa=isa))
    assert torch.allclose(actual.float(), expected.float(), atol=1e-2)
    # Rotations differ by a rounding between instruction sets, values do not.
    assert torch.equal(caches[1][1], caches[0][1])
    restored = [restore_heads(cache[0], torch.float32) for cache in (first, second)]
    difference = (restored[1] - restored[0]).nan_to_num().abs()
    # One step of the largest elements: 3 / 127, or 4 / 16.
    assert float(difference.max()) < (0.05 if cache_dtype == INT8_CACHE else 0.3)
    assert int((caches[1][0] != 255).any(dim=-1).sum()) == 8 * 2
