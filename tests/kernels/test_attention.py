"""Paged attention, every backend, against a float64 oracle that knows nothing of blocks.

Unused slots hold NaN and block tables end in an id far outside the pool, so reading either shows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Protocol

import pytest
import torch

from kernels.attention import varlen_paged_attention
from kernels.attention.layout import padded_length
from kernels.native import INSTRUCTION_SETS, NativeKernels, load_native

OUT_OF_POOL = 2**31 - 1
ALIBI = {"alibi_slopes": torch.linspace(0.01, 0.5, 12)}
RELATIVE_ERROR = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


@dataclass
class Case:
    """A batch of (seqlen_q, seqlen_k) and the shape of the model."""

    lengths: list[tuple[int, int]]
    block_size: int = 16
    num_kv_heads: int = 3
    group: int = 3
    head_dim: int = 64
    dtype: torch.dtype = torch.float32
    head_major: bool = True
    score_gain: float = 1.0
    unused: float = float("nan")


@dataclass
class Batch:
    q: torch.Tensor
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    cu_seqlens_q: torch.Tensor
    seqlens_k: torch.Tensor
    block_table: torch.Tensor


def build(case: Case, seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    blocks_of = [-(-k // case.block_size) for _, k in case.lengths]
    num_blocks = 1 + sum(blocks_of) + 2
    order = (torch.randperm(num_blocks - 1, generator=generator) + 1).tolist()
    heads, size, dim = case.num_kv_heads, case.block_size, case.head_dim
    caches = []
    for _ in range(2):
        if case.head_major:
            stored = torch.full((num_blocks, heads, size, dim), case.unused, dtype=case.dtype)
            caches.append(stored.permute(0, 2, 1, 3))
        else:
            stored = torch.full((num_blocks, size, heads, dim), case.unused, dtype=case.dtype)
            caches.append(stored)
    width = max(blocks_of, default=0) + 2
    table = torch.full((len(case.lengths), width), OUT_OF_POOL, dtype=torch.int32)
    keys, values = [], []
    for row, (_, length) in enumerate(case.lengths):
        pair = [
            torch.randn(length, heads, dim, generator=generator).to(case.dtype) for _ in range(2)
        ]
        for position in range(length):
            if position % size == 0:
                table[row, position // size] = order.pop()
            block = int(table[row, position // size])
            for cache, stored in zip(caches, pair, strict=True):
                cache[block, position % size] = stored[position]
        keys.append(pair[0])
        values.append(pair[1])
    num_tokens = sum(q for q, _ in case.lengths)
    # q is a view into a wider tensor, as it is in a model.
    wide = torch.randn(num_tokens, heads * case.group + 5, dim, generator=generator)
    q = (wide * case.score_gain).to(case.dtype)[:, : heads * case.group]
    boundaries = [0]
    for seqlen_q, _ in case.lengths:
        boundaries.append(boundaries[-1] + seqlen_q)
    return Batch(
        q,
        keys,
        values,
        caches[0],
        caches[1],
        torch.tensor(boundaries, dtype=torch.int32),
        torch.tensor([k for _, k in case.lengths], dtype=torch.int32),
        table,
    )


def oracle(
    batch: Batch,
    scale: float,
    causal: bool = True,
    window: int = 0,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) in float64, one query and one head at a time."""
    num_tokens, num_heads, head_dim = batch.q.shape
    out = torch.zeros(num_tokens, num_heads, head_dim, dtype=torch.float64)
    lse = torch.full((num_tokens, num_heads), float("-inf"), dtype=torch.float64)
    bounds = batch.cu_seqlens_q.tolist()
    for index, (keys, values) in enumerate(zip(batch.keys, batch.values, strict=True)):
        length, seqlen_q = keys.shape[0], bounds[index + 1] - bounds[index]
        for offset in range(seqlen_q):
            position = length - seqlen_q + offset
            seen = [
                j
                for j in range(length)
                if (not causal or j <= position) and (window == 0 or position - j < window)
            ]
            if not seen:
                continue
            row = bounds[index] + offset
            for head in range(num_heads):
                kv_head = head // (num_heads // keys.shape[1])
                scores = keys[seen, kv_head].double() @ batch.q[row, head].double() * scale
                if softcap:
                    scores = softcap * torch.tanh(scores / softcap)
                if alibi_slopes is not None:
                    distance = torch.tensor(seen, dtype=torch.float64) - position
                    scores = scores + float(alibi_slopes[head]) * distance
                logits = scores
                if sinks is not None:
                    logits = torch.cat((scores, sinks[head : head + 1].double()))
                lse[row, head] = torch.logsumexp(logits, 0)
                weights = torch.exp(scores - lse[row, head])
                out[row, head] = weights @ values[seen, kv_head].double()
    return out, lse


class Call(Protocol):
    """Attention of a batch by one backend."""

    def __call__(self, batch: Batch, **options: object) -> torch.Tensor: ...


def attend(native: NativeKernels | None, batch: Batch, **options: object) -> torch.Tensor:
    """By the native backend where there is one and it takes the dtype, else by torch."""
    seqlens_q = batch.cu_seqlens_q.diff()
    takes = native is not None and batch.q.dtype != torch.float16
    return varlen_paged_attention(
        batch.q,
        batch.k_cache,
        batch.v_cache,
        batch.cu_seqlens_q,
        batch.seqlens_k,
        batch.block_table,
        max_seqlen_q=int(seqlens_q.max()) if len(seqlens_q) else 0,
        max_seqlen_k=int(batch.seqlens_k.max()) if len(seqlens_q) else 0,
        scale=batch.q.shape[-1] ** -0.5,
        **{"backend": "cpu" if takes else "auto", "native": native} | options,  # type: ignore[arg-type]
    )


@pytest.fixture
def call(maybe_native: NativeKernels | None) -> Call:
    return partial(attend, maybe_native)


@pytest.fixture
def torch_call() -> Call:
    return partial(attend, None)


def part(batch: Batch, index: int, rows: slice) -> Batch:
    """One sequence of a batch, or its last rows, as a batch of its own; rows are packed ones."""
    num_rows = rows.stop - rows.start
    return Batch(
        batch.q[rows],
        [],
        [],
        batch.k_cache,
        batch.v_cache,
        torch.tensor([0, num_rows], dtype=torch.int32),
        batch.seqlens_k[index : index + 1],
        batch.block_table[index : index + 1],
    )


def assert_close(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    assert torch.isfinite(actual).all()
    error = (actual.double() - expected).norm() / expected.norm().clamp(min=1e-12)
    assert float(error) < RELATIVE_ERROR[dtype]


MIXED = [(1, 1), (1, 16), (1, 17), (1, 70), (0, 5), (2, 2), (15, 15), (16, 48), (17, 20), (5, 64)]


@pytest.mark.parametrize("block_size", [1, 16, 32, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("unused", [float("nan"), 1e4])
def test_mixed_batch_matches_oracle(
    call: Call, block_size: int, dtype: torch.dtype, unused: float
) -> None:
    batch = build(Case(MIXED, block_size=block_size, dtype=dtype, unused=unused))
    assert_close(call(batch, num_decodes=4), oracle(batch, 64**-0.5)[0], dtype)


@pytest.mark.parametrize("num_kv_heads, group", [(1, 1), (1, 8), (2, 4), (3, 5), (4, 1), (1, 16)])
@pytest.mark.parametrize("head_dim", [32, 40, 80, 128])
def test_head_shapes(call: Call, num_kv_heads: int, group: int, head_dim: int) -> None:
    case = Case(
        [(1, 33), (7, 19), (1, 4)],
        num_kv_heads=num_kv_heads,
        group=group,
        head_dim=head_dim,
        unused=1e4,
    )
    batch = build(case)
    assert_close(call(batch), oracle(batch, head_dim**-0.5)[0], torch.float32)


def test_token_major_cache_gives_the_same(call: Call) -> None:
    lengths = [(1, 40), (9, 33)]
    head_major = call(build(Case(lengths)))
    token_major = call(build(Case(lengths, head_major=False)))
    assert torch.equal(head_major, token_major)


@pytest.mark.parametrize("window", [0, 1, 2, 16, 33, 34])
@pytest.mark.parametrize("causal", [True, False])
def test_window(call: Call, window: int, causal: bool) -> None:
    batch = build(Case([(1, 33), (4, 33), (33, 33), (0, 3)]))
    expected = oracle(batch, 64**-0.5, causal=causal, window=window)[0]
    assert_close(call(batch, causal=causal, window=window), expected, torch.float32)


@pytest.mark.parametrize("score_gain", [1.0, 1e3])
def test_softcap(call: Call, score_gain: float) -> None:
    batch = build(Case([(1, 20), (6, 21)], score_gain=score_gain))
    expected = oracle(batch, 64**-0.5, softcap=30.0)[0]
    assert_close(call(batch, softcap=30.0), expected, torch.float32)


def test_alibi(call: Call) -> None:
    batch = build(Case([(1, 20), (6, 21)]))
    slopes = torch.linspace(0.01, 0.5, 9)
    expected = oracle(batch, 64**-0.5, alibi_slopes=slopes)[0]
    assert_close(call(batch, alibi_slopes=slopes), expected, torch.float32)


@pytest.mark.parametrize("sink", [float("-inf"), 0.0, 10.0])
def test_sinks_enter_the_denominator_once(call: Call, sink: float) -> None:
    batch = build(Case([(1, 20), (6, 21)]))
    sinks = torch.full((9,), sink)
    lse = torch.empty(7, 9)
    out = call(batch, sinks=sinks, lse=lse)
    expected, expected_lse = oracle(batch, 64**-0.5, sinks=sinks)
    assert_close(out, expected, torch.float32)
    assert torch.allclose(lse.double(), expected_lse, atol=1e-5)


def test_log_sum_exp_is_natural_and_minus_infinity_when_empty(call: Call) -> None:
    batch = build(Case([(1, 20), (6, 21), (2, 0)]))
    lse = torch.full((9, 9), float("nan"))
    out = call(batch, lse=lse)
    expected, expected_lse = oracle(batch, 64**-0.5)
    assert_close(out, expected, torch.float32)
    assert torch.allclose(lse[:7].double(), expected_lse[:7], atol=1e-5)
    assert torch.equal(lse[7:], torch.full((2, 9), float("-inf")))
    assert torch.equal(out[7:], torch.zeros(2, 9, 64))


def test_queries_before_the_first_key_see_nothing(call: Call) -> None:
    batch = build(Case([(5, 3)]))
    out = call(batch)
    assert_close(out, oracle(batch, 64**-0.5)[0], torch.float32)
    assert torch.equal(out[:2], torch.zeros(2, 9, 64))


def test_all_empty_and_no_sequences(call: Call) -> None:
    assert torch.equal(call(build(Case([(1, 0), (3, 0)]))), torch.zeros(4, 9, 64))
    assert call(build(Case([(0, 4), (0, 0)]))).shape == (0, 9, 64)
    assert call(build(Case([]))).shape == (0, 9, 64)


def test_rows_past_the_last_query_are_untouched(call: Call) -> None:
    batch = build(Case([(1, 5), (4, 9)]))
    padded = torch.cat((batch.q, torch.full((3, 9, 64), float("nan"))))
    out = torch.full(padded.shape, 7.0)
    batch.q = padded
    call(batch, out=out)
    assert torch.equal(out[5:], torch.full((3, 9, 64), 7.0))
    assert torch.isfinite(out[:5]).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("options", [{}, {"softcap": 20.0}, {"window": 4}])
def test_a_poisoned_key_reaches_only_those_who_see_it(
    call: Call, bad: float, options: dict[str, int]
) -> None:
    batch = build(Case([(8, 24), (1, 9)]))
    clean = call(batch, **options)
    poisoned = 20
    block = int(batch.block_table[0, poisoned // 16])
    batch.k_cache[block, poisoned % 16] = bad
    batch.v_cache[block, poisoned % 16] = bad
    dirty = call(batch, **options)
    # Queries sit at positions 16 to 23; those before position 20 do not see the key.
    assert torch.allclose(dirty[:4], clean[:4], atol=1e-5)
    assert torch.equal(dirty[8], clean[8])
    assert not torch.isfinite(dirty[4]).all()


def test_a_window_hides_a_poisoned_past(call: Call) -> None:
    batch = build(Case([(3, 40), (1, 40)]))
    clean = call(batch, window=8)
    for row in range(2):
        batch.k_cache[int(batch.block_table[row, 0])] = float("nan")
        batch.v_cache[int(batch.block_table[row, 0])] = float("nan")
    assert torch.allclose(call(batch, window=8), clean, atol=1e-6)


def test_long_chunk_is_split_by_rows(torch_call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = build(Case([(30, 70)]))
    whole = torch_call(batch, softcap=30.0)
    monkeypatch.setattr("kernels.attention.torch_backend.MAX_SCORE_ELEMENTS", 9 * 70 * 7)
    assert torch.allclose(torch_call(batch, softcap=30.0), whole, atol=1e-6)


def test_a_row_is_the_same_alone_and_in_company(call: Call) -> None:
    batch = build(Case([(1, 40), (1, 7), (12, 90), (1, 300)], unused=1e4))
    together = call(batch)
    for index, (start, end) in enumerate([(0, 1), (1, 2), (2, 14), (14, 15)]):
        assert torch.equal(call(part(batch, index, slice(start, end))), together[start:end])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"window": 70, "softcap": 20.0}, ALIBI])
def test_native_rows_have_the_same_bits_in_any_company_chunk_and_number_of_threads(
    native: NativeKernels, dtype: torch.dtype, options: dict[str, object]
) -> None:
    batch = build(Case([(1, 1300), (130, 1200), (1, 9)], dtype=dtype, group=4))
    together = attend(native, batch, **options)
    threads = torch.get_num_threads()
    try:
        for num_threads in (1, 2, 3):
            torch.set_num_threads(num_threads)
            assert torch.equal(attend(native, batch, **options), together)
            assert torch.equal(attend(native, part(batch, 0, slice(0, 1)), **options), together[:1])
            for first in (1, 2, 64, 130):
                # The last rows of the second sequence, as if the others had come a step before.
                chunk = attend(native, part(batch, 1, slice(first, 131)), **options)
                assert torch.equal(chunk, together[first:131])
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("isa", INSTRUCTION_SETS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [32, 40, 64, 80, 96, 128, 192, 256])
def test_every_instruction_set(
    native: NativeKernels, isa: str, dtype: torch.dtype, head_dim: int
) -> None:
    if isa not in native.available:
        pytest.skip(f"this processor has no {isa}")
    case = Case(
        [(1, 33), (7, 19), (1, 64), (1, 70), (3, 131)],
        num_kv_heads=2,
        group=4,
        head_dim=head_dim,
        dtype=dtype,
    )
    batch = build(case)
    sinks, slopes = torch.linspace(-1, 2, 8), torch.linspace(0.01, 0.5, 8)
    options = {"softcap": 25.0, "window": 50, "sinks": sinks, "alibi_slopes": slopes}
    backend = load_native(isa=isa)
    plain = attend(backend, batch)
    assert_close(plain, oracle(batch, head_dim**-0.5)[0], dtype)
    expected = oracle(batch, head_dim**-0.5, **options)[0]  # type: ignore[arg-type]
    assert_close(attend(backend, batch, **options), expected, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_hidden_poisoned_value_leaves_the_bits_of_others(
    native: NativeKernels, dtype: torch.dtype
) -> None:
    batch = build(Case([(8, 24), (1, 9)], dtype=dtype))
    clean = attend(native, batch)
    batch.v_cache[int(batch.block_table[0, 1]), 4] = float("nan")
    dirty = attend(native, batch)
    assert torch.equal(dirty[:4], clean[:4])
    assert torch.isnan(dirty[4:8]).all()


def test_long_sequences_are_merged_from_segments(call: Call) -> None:
    batch = build(Case([(1, 1100), (2, 513), (1, 512)], num_kv_heads=1, group=2, head_dim=32))
    lse = torch.empty(4, 2)
    out = call(batch, lse=lse)
    expected, expected_lse = oracle(batch, 32**-0.5)
    assert_close(out, expected, torch.float32)
    assert torch.allclose(lse.double(), expected_lse, atol=1e-5)


def test_a_block_outside_the_pool_or_the_table_is_refused(native: NativeKernels) -> None:
    batch = build(Case([(1, 40)]))
    batch.block_table[0, 1] = OUT_OF_POOL
    with pytest.raises(ValueError, match="outside the pool"):
        attend(native, batch)
    # A window that ends before the block never follows it.
    assert torch.isfinite(attend(native, batch, window=8)).all()
    batch = build(Case([(1, 40)]))
    batch.block_table = batch.block_table[:, :2]
    with pytest.raises(ValueError, match="outside the pool"):
        attend(native, batch)


def test_the_cpu_backend_says_what_it_needs(native: NativeKernels) -> None:
    batch = build(Case([(1, 5)], dtype=torch.float16))
    with pytest.raises(ValueError, match="cpu backend needs"):
        attend(native, batch, backend="cpu")
    with pytest.raises(ValueError, match="cpu backend needs"):
        attend(None, build(Case([(1, 5)])), backend="cpu")


def test_groups_are_split_to_bound_memory(
    torch_call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = build(Case([(1, 5), (1, 9), (1, 100), (1, 33)], unused=1e4))
    together = torch_call(batch)
    monkeypatch.setattr("kernels.attention.layout.MAX_GROUP_ELEMENTS", 3 * 128 * 64 * 2)
    assert torch.equal(torch_call(batch), together)


def test_padded_lengths() -> None:
    for length, expected in ((1, 128), (128, 128), (129, 256), (600, 640), (1100, 1280)):
        assert padded_length(length) == expected
    waste = [padded_length(length) / length for length in range(1024, 9000)]
    assert max(waste) < 1.25


def test_wrong_arguments_are_refused(call: Call) -> None:
    batch = build(Case([(1, 5)]))
    with pytest.raises(ValueError, match="backend"):
        call(batch, backend="flash")
    batch.block_table = batch.block_table.repeat(2, 1)
    with pytest.raises(ValueError, match="block_table"):
        call(batch)
    batch = build(Case([(1, 5)]))
    batch.q = batch.q.half()
    with pytest.raises(ValueError, match="dtype"):
        call(batch)
    batch = build(Case([(1, 5)]))
    batch.q = batch.q[:, :8]
    with pytest.raises(ValueError, match="heads"):
        call(batch)
