"""STAND-INS for the two flash-attn packages, which cannot be installed without their GPUs.

They take the arguments of the real functions, refuse what the real ones refuse or get wrong, and
compute in float64 what those document: keys aligned to the end, windows as (left, right) with the
query's own key in neither, the logarithm by head, +inf (2) or -inf (3) for rows without keys, ALiBi
by column (2), rows past the last query left as they fell from memory (NaN here). They share no code
with ``kernels``.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

Window = tuple[int, int]


def check_paged(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, table: torch.Tensor, multiple: int
) -> None:
    num_heads, head_dim = q.shape[-2:]
    assert q.dtype in (torch.float16, torch.bfloat16) and q.dtype == k.dtype == v.dtype
    assert head_dim % 8 == 0 and head_dim <= 256 and k.shape == v.shape and k.shape[3] == head_dim
    assert num_heads % k.shape[2] == 0 and k.shape[1] % multiple == 0
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
    assert table.dtype == torch.int32 and table.stride(-1) == 1


def gather(pool: torch.Tensor, table: torch.Tensor, length: int) -> torch.Tensor:
    """(length, num_kv_heads, head_dim) float64; no entry past the length is followed."""
    at = torch.arange(length)
    return pool[table[at // pool.shape[1]].long(), at % pool.shape[1]].double()


def dense(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    options: dict[str, Any],
    slopes: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One sequence: (out, natural logarithm (rows, heads)); -inf where no key is visible."""
    rows, keys, num_heads = q.shape[0], k.shape[0], q.shape[1]
    left, right = options["window_size"]
    causal = options["causal"]
    right = 0 if causal else right
    k, v = (x.repeat_interleave(num_heads // x.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * options["softmax_scale"]
    cap = options["softcap"]
    if cap > 0:
        scores = cap * torch.tanh(scores / cap)
    column = torch.arange(keys)
    distance = column - (torch.arange(rows)[:, None] + keys - rows)
    if slopes is not None:
        # A window makes the real kernel take the symmetric form, even if attention is causal.
        by_column = causal and left < 0
        bias = column.expand(rows, keys) if by_column else -distance.abs()
        scores = scores + slopes.double()[:, None, None] * bias
    hidden = torch.zeros(rows, keys, dtype=torch.bool)
    if left >= 0:
        hidden |= distance < -left
    if right >= 0:
        hidden |= distance > right
    scores = scores.masked_fill(hidden, float("-inf"))
    log_total = torch.logsumexp(scores, -1) if keys else scores.new_full((num_heads, rows), -1e999)
    weights = torch.exp(scores - log_total[..., None]).nan_to_num(0.0)
    return torch.einsum("hqk,khd->qhd", weights, v), log_total.T


def packed(
    q: torch.Tensor,
    pools: tuple[torch.Tensor, torch.Tensor],
    bounds: list[int],
    lengths: list[int],
    table: torch.Tensor,
    options: dict[str, Any],
    slopes: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, log_total (heads, rows)) of all sequences."""
    out = torch.full_like(q, float("nan"))
    log_total = torch.full(q.shape[:2], float("nan"))
    for index, length in enumerate(lengths):
        rows = slice(bounds[index], bounds[index + 1])
        k, v = (gather(pool, table[index], length) for pool in pools)
        mixed, logs = dense(q[rows], k, v, options, slopes)
        out[rows], log_total[rows] = mixed.to(q.dtype), logs.float()
    return out, log_total.T


def without_keys_is_plus_infinity(log_total: torch.Tensor) -> torch.Tensor:
    return log_total.masked_fill(log_total == float("-inf"), float("inf"))


def varlen_2(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
) -> Any:
    assert block_table is not None and len(block_table) == len(cu_seqlens_q) - 1 > 0
    check_paged(q, k, v, block_table, 256)
    lengths, rows = cu_seqlens_k.diff(), cu_seqlens_q.diff()
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32 and int(cu_seqlens_k[0]) == 0
    assert int(rows.max()) <= max_seqlen_q and int(lengths.max()) <= max_seqlen_k
    if max_seqlen_q == 1 and q.shape[1] > k.shape[2]:
        assert q.shape[0] == len(block_table), "the dense path forgets cu_seqlens_q"
    if alibi_slopes is not None:
        assert alibi_slopes.dtype == torch.float32 and alibi_slopes.shape == (q.shape[1],)
    options = {
        "softmax_scale": softmax_scale,
        "causal": causal,
        "window_size": window_size,
        "softcap": softcap,
    }
    out, log_total = packed(
        q, (k, v), cu_seqlens_q.tolist(), lengths.tolist(), block_table, options, alibi_slopes
    )
    log_total = without_keys_is_plus_infinity(log_total)
    return (out, log_total, None) if return_attn_probs else out


def with_kvcache_2(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    cache_seqlens: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    block_table: torch.Tensor | None = None,
) -> Any:
    out, log_total = one_each(
        (q, k_cache, v_cache, block_table, cache_seqlens, 256),
        {
            "softmax_scale": softmax_scale,
            "causal": causal,
            "window_size": window_size,
            "softcap": softcap,
        },
        alibi_slopes,
    )
    log_total = without_keys_is_plus_infinity(log_total)
    return (out, log_total) if return_softmax_lse else out


def one_each(
    arguments: tuple[Any, ...], options: dict[str, Any], slopes: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """A dense batch of one query each: out (B, 1, heads, dim), log_total (B, heads, 1)."""
    q, k, v, table, lengths, multiple = arguments
    assert q.shape[1] == 1 and len(q) == len(table) == len(lengths)
    assert lengths.dtype == torch.int32
    check_paged(q, k, v, table, multiple)
    bounds = list(range(len(q) + 1))
    out, log_total = packed(q.squeeze(1), (k, v), bounds, lengths.tolist(), table, options, slopes)
    return out.unsqueeze(1), log_total.T.unsqueeze(2)


def with_kvcache_3(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    cache_seqlens: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    options = {
        "softmax_scale": softmax_scale,
        "causal": causal,
        "window_size": window_size,
        "softcap": softcap,
    }
    if cu_seqlens_q is None:
        out, log_total = one_each(
            (q, k_cache, v_cache, page_table, cache_seqlens, 1), options, None
        )
    else:
        assert cache_seqlens is not None and page_table is not None and max_seqlen_q is not None
        check_paged(q, k_cache, v_cache, page_table, 1)
        assert len(page_table) == len(cache_seqlens) == len(cu_seqlens_q) - 1 > 0
        assert int(cu_seqlens_q.diff().max()) <= max_seqlen_q and num_splits == 1
        assert cu_seqlens_q.dtype == cache_seqlens.dtype == torch.int32
        pools = (k_cache, v_cache)
        out, log_total = packed(
            q, pools, cu_seqlens_q.tolist(), cache_seqlens.tolist(), page_table, options
        )
    return (out, log_total) if return_softmax_lse else out


def stand_in(version: int) -> ModuleType:
    """A module with the functions of that version; its name says what it is."""
    module = ModuleType(f"stand_in_for_flash_attn_{version}")
    functions = {"flash_attn_with_kvcache": with_kvcache_3}
    if version == 2:
        functions = {
            "flash_attn_with_kvcache": with_kvcache_2,
            "flash_attn_varlen_func": varlen_2,
        }
    module.__dict__.update(functions)
    return module
