"""The mapping between the contract and flash-attn, on STAND-INS for the package.

No flash-attn runs here: it cannot be installed without a GPU and its compiler. What is checked is
that the arguments handed over mean what the contract says, by functions that compute what the
package documents and refuse what it refuses (``flash_stand_in``).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kernels.attention import varlen_paged_attention
from kernels.attention.flash_backend import (
    FlashCall,
    attend_flash,
    chunk_arguments,
    find_package,
    package_of,
    refusal,
)
from kernels.attention.torch_backend import AttentionVariant
from kernels.kv_bytes import quantise_heads
from tests.kernels.flash_stand_in import stand_in
from tests.kernels.test_attention import Batch, Case, assert_close, build, oracle

PLAIN: dict[str, Any] = {
    "causal": True,
    "window": 0,
    "softcap": 0.0,
    "alibi_slopes": None,
    "sinks": None,
}
BLOCK_SIZE = {2: 256, 3: 3}


def call_of(batch: Batch, num_decodes: int = 0, lse: bool = True, **options: Any) -> FlashCall:
    return FlashCall(
        batch.q,
        batch.k_cache,
        batch.v_cache,
        batch.cu_seqlens_q,
        batch.seqlens_k,
        batch.block_table,
        int(batch.cu_seqlens_q.diff().max()),
        int(batch.seqlens_k.max()),
        num_decodes,
        AttentionVariant(scale=batch.q.shape[-1] ** -0.5, **(PLAIN | options)),
        lse,
    )


def build_for(version: int, lengths: list[tuple[int, int]], **changes: Any) -> Batch:
    """NaN in unused slots, permuted blocks, table entries outside the pool past each length."""
    shape: dict[str, Any] = {"num_kv_heads": 1, "group": 3, "head_dim": 40}
    shape |= {"block_size": BLOCK_SIZE[version], "dtype": torch.float16}
    batch = build(Case(lengths, **(shape | changes)))
    return batch


MIXED = [(1, 1), (1, 20), (1, 0), (0, 5), (3, 3), (7, 25), (4, 2), (0, 0), (2, 258)]
SLOPES = torch.linspace(0.01, 0.2, 3)


@pytest.mark.parametrize(
    "version, num_decodes, options",
    [
        (2, 0, {}),
        (2, 3, {}),
        (2, 3, {"window": 1}),
        (2, 0, {"window": 7, "softcap": 5.0}),
        (2, 3, {"causal": False, "window": 4}),
        (2, 3, {"alibi_slopes": SLOPES}),
        (2, 0, {"alibi_slopes": SLOPES, "window": 9}),
        (3, 0, {}),
        (3, 3, {"window": 7, "softcap": 5.0}),
        (3, 0, {"causal": False, "window": 4}),
    ],
)
def test_the_contract_is_kept(version: int, num_decodes: int, options: dict[str, Any]) -> None:
    batch = build_for(version, MIXED)
    held = batch.q.shape[0]
    batch.q = torch.cat((batch.q, torch.full((3, *batch.q.shape[1:]), 9.0).half()))
    out = torch.full(batch.q.shape, 7.0).half()
    wants_lse = "alibi_slopes" not in options
    lse = torch.full(batch.q.shape[:2], 7.0) if wants_lse else None
    call = call_of(batch, num_decodes, wants_lse, **options)
    assert refusal(call, version) == ""
    attend_flash(package_of(stand_in(version), version), call, (out, lse))
    batch.q = batch.q[:held]
    # A non-causal single query sees what is behind it, and nothing is: decodes are causal.
    expected, expected_lse = oracle(batch, 40**-0.5, **options)
    assert_close(out[:held], expected, torch.float16)
    assert bool((out[held:] == 7.0).all())
    if lse is not None:
        assert torch.allclose(lse[:held].double(), expected_lse, atol=1e-3)
        assert bool((lse[held:] == 7.0).all())


@pytest.mark.parametrize("version", [2, 3])
def test_decodes_alone_and_chunks_of_one_query(version: int) -> None:
    batch = build_for(version, [(1, 9), (1, 260)])
    package = package_of(stand_in(version), version)
    expected = oracle(batch, 40**-0.5)[0]
    for num_decodes in (0, 1, 2):
        out = torch.zeros_like(batch.q)
        attend_flash(package, call_of(batch, num_decodes), (out, None))
        assert_close(out, expected, torch.float16)


@pytest.mark.parametrize(
    "version, shape, options, reason",
    [
        (2, {"block_size": 16}, {}, "blocks of 16 are no multiple of 256"),
        (3, {"head_dim": 44}, {}, "heads of 44 are no multiple of 8"),
        (3, {"head_dim": 264}, {}, "heads of 264 are no multiple of 8 up to 256"),
        (3, {"dtype": torch.float32}, {}, "torch.float32 over torch.float32 is not one of"),
        (2, {}, {"sinks": torch.zeros(3)}, "it has no attention sinks"),
        (3, {}, {"alibi_slopes": torch.ones(3)}, "version 3 has no ALiBi"),
        (2, {}, {"alibi_slopes": torch.ones(3)}, "its logarithm is shifted by ALiBi"),
        (2, {}, {"alibi_slopes": torch.ones(3), "causal": False}, "its ALiBi is symmetric"),
    ],
)
def test_what_it_cannot_do_is_refused_by_name(
    version: int, shape: dict[str, Any], options: dict[str, Any], reason: str
) -> None:
    batch = build_for(version, [(2, 5)], **shape)
    assert reason in refusal(call_of(batch, **options), version)


def test_bytes_and_rows_off_their_alignment_are_refused() -> None:
    batch = build_for(3, [(2, 5)])
    call = call_of(batch)
    stored = quantise_heads(torch.zeros(2, 16, 2, 40))
    assert "over torch.uint8" in refusal(replace(call, k_cache=stored, v_cache=stored), 3)
    shifted = torch.zeros(2, 16, 2, 44).half()[..., 4:]
    assert "aligned to 16 bytes" in refusal(replace(call, k_cache=shifted), 3)
    table = batch.block_table.long()
    assert "block_table is not int32" in refusal(replace(call, block_table=table), 3)


def test_packed_queries_are_never_split_where_the_package_could() -> None:
    call = call_of(build_for(2, [(2, 5)]))
    package = package_of(stand_in(2), 2)
    assert "num_splits" not in chunk_arguments(call, package)
    assert chunk_arguments(call, replace(package, splits_varlen=True))["num_splits"] == 1


def test_a_package_without_an_argument_is_none() -> None:
    module = stand_in(2)
    module.__dict__["flash_attn_varlen_func"] = lambda q, k, v: None
    with pytest.raises(ValueError, match=r"stand_in_for_flash_attn_2\.flash_attn_varlen_func"):
        package_of(module, 2)
    with pytest.raises(ValueError, match="does not take page_table, cu_seqlens_q, max_seqlen_q"):
        package_of(module, 3)


def test_without_a_gpu_it_says_so() -> None:
    assert "8.0 or more is needed" in str(find_package((7, 5)))
    assert "flash_attn_interface" not in str(find_package((8, 0)))
    batch = build_for(2, [(2, 5)])
    with pytest.raises(ValueError, match="flash_attn backend cannot take this call: it runs on a"):
        varlen_paged_attention(
            batch.q,
            batch.k_cache,
            batch.v_cache,
            batch.cu_seqlens_q,
            batch.seqlens_k,
            batch.block_table,
            max_seqlen_q=2,
            max_seqlen_k=5,
            scale=1.0,
            backend="flash_attn",
        )
