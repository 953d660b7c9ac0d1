"""The Triton attention kernels in the interpreter, against the float64 oracle.

Small shapes: the interpreter takes about a millisecond for each operation of each program. It
multiplies bit patterns in bfloat16, so only float32 and float16 are tried (`tests/gpu` has the
rest, on a device).
"""

from __future__ import annotations

import pytest
import torch

from kernels.attention import varlen_paged_attention
from kernels.attention.torch_backend import AttentionVariant
from kernels.gpu.attention import KEY_TILE, NUM_SEGMENTS, ROW_TILE, attend_triton
from tests.kernels.test_attention import Batch, Case, assert_close, build, oracle, part


def attend(
    batch: Batch,
    *,
    num_decodes: int = 0,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    causal: bool = True,
    window: int = 0,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    out = torch.zeros(batch.q.shape, dtype=batch.q.dtype) if out is None else out
    scale = batch.q.shape[-1] ** -0.5
    attend_triton(
        batch.q,
        (batch.k_cache, batch.v_cache),
        (batch.cu_seqlens_q, batch.seqlens_k, batch.block_table),
        AttentionVariant(scale, causal, window, softcap, alibi_slopes, sinks),
        (out, lse),
        num_decodes=num_decodes,
    )
    return out


MIXED = [(1, 1), (1, 33), (0, 5), (3, 3), (17, 40)]


@pytest.mark.parametrize("num_decodes", [0, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_mixed_batch(num_decodes: int, dtype: torch.dtype) -> None:
    batch = build(Case(MIXED, num_kv_heads=2, group=3, head_dim=32, dtype=dtype))
    assert_close(attend(batch, num_decodes=num_decodes), oracle(batch, 32**-0.5)[0], dtype)


@pytest.mark.parametrize("block_size", [1, 64])
@pytest.mark.parametrize("head_major", [True, False])
def test_block_sizes_and_layouts(block_size: int, head_major: bool) -> None:
    case = Case([(1, 70), (5, 66)], block_size, 1, 2, 32, head_major=head_major)
    batch = build(case)
    assert_close(attend(batch, num_decodes=1), oracle(batch, 32**-0.5)[0], torch.float32)


@pytest.mark.parametrize("group", [1, 5, 16])
@pytest.mark.parametrize("head_dim", [40, 80, 192])
def test_head_shapes(group: int, head_dim: int) -> None:
    batch = build(Case([(1, 35), (3, 9)], num_kv_heads=1, group=group, head_dim=head_dim))
    expected = oracle(batch, head_dim**-0.5)[0]
    assert_close(attend(batch, num_decodes=1), expected, torch.float32)


@pytest.mark.parametrize("window", [1, 2, 33, 40])
@pytest.mark.parametrize("causal", [True, False])
def test_windows(window: int, causal: bool) -> None:
    batch = build(Case([(1, 40), (4, 36)], num_kv_heads=1, group=2, head_dim=32))
    expected = oracle(batch, 32**-0.5, causal=causal, window=window)[0]
    got = attend(batch, num_decodes=1, causal=causal, window=window)
    assert_close(got, expected, torch.float32)


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")
@pytest.mark.parametrize("gain", [1.0, 1e3])
@pytest.mark.parametrize("num_decodes", [0, 1])
def test_softcap_alibi_and_sinks_together(gain: float, num_decodes: int) -> None:
    case = Case([(1, 35), (6, 21), (2, 0)], num_kv_heads=2, group=2, head_dim=32, score_gain=gain)
    batch = build(case)
    slopes, sinks = torch.linspace(0.01, 0.5, 4), torch.tensor([float("-inf"), 0.0, 1.0, 10.0])
    lse = torch.full((9, 4), float("nan"))
    options = {"softcap": 30.0, "alibi_slopes": slopes, "sinks": sinks}
    got = attend(batch, lse=lse, num_decodes=num_decodes, **options)  # type: ignore[arg-type]
    expected, expected_lse = oracle(batch, 32**-0.5, **options)  # type: ignore[arg-type]
    assert_close(got, expected, torch.float32)
    assert torch.equal(got[7:], torch.zeros(2, 4, 32))
    assert torch.allclose(lse.double(), expected_lse, atol=1e-4)


@pytest.mark.parametrize("num_decodes", [0, 3])
def test_sequences_without_keys_and_rows_past_the_end(num_decodes: int) -> None:
    batch = build(Case([(1, 0), (1, 3), (1, 0), (5, 3), (0, 0)], 16, 1, 2, 32))
    batch.q = torch.cat((batch.q, torch.full((3, 2, 32), float("nan"))))
    out = torch.full(batch.q.shape, 7.0)
    got = attend(batch, num_decodes=num_decodes, out=out)
    batch.q = batch.q[:8]
    assert_close(got[:8], oracle(batch, 32**-0.5)[0], torch.float32)
    assert torch.equal(got[8:], torch.full((3, 2, 32), 7.0))


def test_many_sequences_find_their_tiles() -> None:
    """More rows than a tile, tiles that end with a sequence, and sequences of none."""
    group = 8
    queries = ROW_TILE // group
    lengths = [(q, q + 2) for q in (queries, 0, 1, 2 * queries + 1, 0, queries - 1, 3)]
    batch = build(Case(lengths, num_kv_heads=1, group=group, head_dim=32))
    assert_close(attend(batch), oracle(batch, 32**-0.5)[0], torch.float32)


def test_a_long_single_query_is_merged_from_all_segments() -> None:
    length = (NUM_SEGMENTS + 2) * KEY_TILE + 3
    batch = build(Case([(1, length), (1, 5)], num_kv_heads=1, group=2, head_dim=32))
    lse = torch.empty(2, 2)
    got = attend(batch, num_decodes=2, lse=lse)
    expected, expected_lse = oracle(batch, 32**-0.5)
    assert_close(got, expected, torch.float32)
    assert torch.allclose(lse.double(), expected_lse, atol=1e-5)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("options", [{}, {"window": 4}])
def test_a_poisoned_key_reaches_only_those_who_see_it(bad: float, options: dict[str, int]) -> None:
    batch = build(Case([(1, 9), (8, 24)], num_kv_heads=1, group=2, head_dim=32))
    clean = attend(batch, num_decodes=1, **options)
    block = int(batch.block_table[1, 1])
    batch.k_cache[block, 4] = bad
    batch.v_cache[block, 4] = bad
    dirty = attend(batch, num_decodes=1, **options)  # type: ignore[arg-type]
    # Queries sit at positions 16 to 23; those before position 20 do not see the key.
    assert torch.equal(dirty[:5], clean[:5])
    assert torch.isnan(dirty[5]).all()


def test_a_row_has_the_same_bits_in_any_company_and_chunk() -> None:
    batch = build(Case([(1, 150), (1, 7), (20, 90)], num_kv_heads=1, group=4, head_dim=32))
    together = attend(batch, num_decodes=2)
    for index in (0, 1):
        alone = part(batch, index, slice(index, index + 1))
        assert torch.equal(attend(alone, num_decodes=1), together[index : index + 1])
    for first in (3, 18):
        # The last rows of the third sequence, as if the others had come a step before.
        chunk = part(batch, 2, slice(first, 22))
        assert torch.equal(attend(chunk), together[first:22])


def test_it_is_a_backend_of_the_contract() -> None:
    batch = build(Case([(1, 20), (2, 5)], num_kv_heads=1, group=2, head_dim=32))
    got = varlen_paged_attention(
        batch.q,
        batch.k_cache,
        batch.v_cache,
        batch.cu_seqlens_q,
        batch.seqlens_k,
        batch.block_table,
        max_seqlen_q=2,
        max_seqlen_k=20,
        scale=32**-0.5,
        num_decodes=1,
        backend="triton",
    )
    assert torch.equal(got, attend(batch, num_decodes=1))


def test_heads_too_large_are_refused() -> None:
    batch = build(Case([(1, 2)], num_kv_heads=1, group=1, head_dim=320))
    with pytest.raises(ValueError, match="up to 256, got 320"):
        attend(batch)
