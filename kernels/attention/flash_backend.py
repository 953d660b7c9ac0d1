"""The flash-attn backend of paged attention: versions 2 and 3 of the package, where installed.

The mapping from the contract to the package's arguments is a pure function of the call, and so is
the reason why a call is refused; nothing that the package would ignore or read otherwise is passed.

Differences that are mapped: lengths of keys as a running sum (2), a window as the keys left of a
query, the logarithm's layout and its +inf (2) for rows without keys, no ``out`` argument. What is
refused: see ``refusal``. What cannot be known before: a key that is not finite, and that only some
rows of a tile see, spoils the others of its tile too.

Invariants: single queries are cut into a fixed number of splits, chunks into none; rows past the
last query keep what they held; nothing is read back from the device.

Device: reads the KV cache, writes ``out`` and ``lse``. Source: the interfaces of flash-attn 2.6 to
2.8 and of its ``hopper`` directory.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache
from types import ModuleType
from typing import Any

import torch

from kernels.attention.torch_backend import AttentionVariant

MAX_HEAD_DIM = 256
DTYPES = (torch.float16, torch.bfloat16)
BLOCK_MULTIPLE = {2: 256, 3: 1}
"""Slots of a block that each version takes."""

ALIGNED_ELEMENTS = 8
"""Rows are loaded 16 bytes at a time."""

NUM_SPLITS = 16
"""Of a single query's keys, as in the Triton backend; a constant, so that neighbours change
nothing."""

_VARLEN_NAMES = (
    *("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"),
    *("softmax_scale", "causal", "window_size", "softcap", "alibi_slopes", "block_table"),
    "return_attn_probs",
)
_CACHE_NAMES = (
    *("q", "k_cache", "v_cache", "cache_seqlens", "softmax_scale", "causal", "window_size"),
    *("softcap", "num_splits", "return_softmax_lse"),
)
_EXTRA_CACHE_NAMES = {
    2: ("block_table", "alibi_slopes"),
    3: ("page_table", "cu_seqlens_q", "max_seqlen_q"),
}


@dataclass(frozen=True, slots=True, eq=False)
class FlashPackage:
    """What is installed. varlen: version 2 alone; it takes num_splits where ``splits_varlen``."""

    version: int
    with_kvcache: Callable[..., Any]
    varlen: Callable[..., Any] | None = None
    splits_varlen: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class FlashCall:
    """The arguments of ``varlen_paged_attention`` that this backend looks at."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    cu_seqlens_q: torch.Tensor
    seqlens_k: torch.Tensor
    block_table: torch.Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    num_decodes: int
    variant: AttentionVariant
    wants_lse: bool

    def decodes(self) -> FlashCall:
        """The sequences with one query, which come first."""
        n = self.num_decodes
        return replace(
            self, q=self.q[:n], seqlens_k=self.seqlens_k[:n], block_table=self.block_table[:n]
        )

    def chunks(self) -> FlashCall:
        """The other sequences, as a batch of their own."""
        n = self.num_decodes
        return replace(
            self,
            q=self.q[n:],
            cu_seqlens_q=self.cu_seqlens_q[n:] - n,
            seqlens_k=self.seqlens_k[n:],
            block_table=self.block_table[n:],
        )


@cache
def find_package(capability: tuple[int, int]) -> FlashPackage | str:
    """The version for a device of that compute capability, or why there is none."""
    if capability < (8, 0):
        return f"a GPU of compute capability 8.0 or more is needed, this is {capability}"
    reasons = []
    # Version 3 is written for Hopper alone.
    names = [("flash_attn_interface", 3)] if capability[0] == 9 else []
    for name, version in [*names, ("flash_attn", 2)]:
        try:
            return package_of(importlib.import_module(name), version)
        except (ImportError, OSError) as error:
            reasons.append(f"{name} cannot be imported ({error})")
        except ValueError as error:
            reasons.append(str(error))
    return "; ".join(reasons)


def package_of(module: ModuleType, version: int) -> FlashPackage:
    """The functions of an imported module; ValueError where one, or one of its arguments, is
    missing.
    """
    with_kvcache = _function(
        module, "flash_attn_with_kvcache", (*_CACHE_NAMES, *_EXTRA_CACHE_NAMES[version])
    )
    if version == 3:
        return FlashPackage(3, with_kvcache)
    varlen = _function(module, "flash_attn_varlen_func", _VARLEN_NAMES)
    splits = "num_splits" in inspect.signature(varlen).parameters
    return FlashPackage(2, with_kvcache, varlen, splits)


def _function(module: ModuleType, name: str, wanted: Iterable[str]) -> Callable[..., Any]:
    function = getattr(module, name, None)
    if function is None:
        raise ValueError(f"{module.__name__} has no {name}")
    known = inspect.signature(function).parameters
    missing = [argument for argument in wanted if argument not in known]
    if missing:
        raise ValueError(f"{module.__name__}.{name} does not take {', '.join(missing)}")
    found: Callable[..., Any] = function
    return found


def refusal(call: FlashCall, version: int) -> str:
    """Why this version cannot do what is asked, to the letter; "" where it can."""
    q, variant = call.q, call.variant
    head_dim, block_size = q.shape[2], call.k_cache.shape[1]
    tensors = (q, call.k_cache, call.v_cache)
    aligned = all(
        t.stride(-1) == 1
        and t.data_ptr() % (ALIGNED_ELEMENTS * t.element_size()) == 0
        and all(stride % ALIGNED_ELEMENTS == 0 for stride in t.stride()[:-1])
        for t in tensors
    )
    alibi = variant.alibi_slopes is not None
    reasons = {
        f"{q.dtype} over {call.k_cache.dtype} is not one of {DTYPES}": (
            q.dtype not in DTYPES or any(t.dtype != q.dtype for t in tensors)
        ),
        f"heads of {head_dim} are no multiple of 8 up to {MAX_HEAD_DIM}": (
            head_dim % 8 != 0 or head_dim > MAX_HEAD_DIM
        ),
        f"blocks of {block_size} are no multiple of {BLOCK_MULTIPLE[version]}": (
            block_size % BLOCK_MULTIPLE[version] != 0
        ),
        "rows of q or of the cache are not aligned to 16 bytes": not aligned,
        "it has no attention sinks": variant.sinks is not None,
        "version 3 has no ALiBi": alibi and version == 3,
        "its ALiBi is symmetric where attention is not causal": alibi and not variant.causal,
        "its logarithm is shifted by ALiBi": alibi and call.wants_lse,
        "block_table is not int32 with last stride 1": (
            call.block_table.dtype != torch.int32 or call.block_table.stride(-1) != 1
        ),
    }
    return "; ".join(reason for reason, holds in reasons.items() if holds)


def decode_arguments(call: FlashCall, version: int) -> dict[str, Any]:
    """For ``flash_attn_with_kvcache``, of single queries: the batch is an axis of its own."""
    extra: dict[str, Any] = {"page_table": call.block_table}
    if version == 2:
        slopes = _float32(call.variant.alibi_slopes)
        extra = {"block_table": call.block_table, "alibi_slopes": slopes}
    return extra | {
        "q": call.q.unsqueeze(1),
        "k_cache": call.k_cache,
        "v_cache": call.v_cache,
        "cache_seqlens": _int32(call.seqlens_k),
        "softmax_scale": call.variant.scale,
        # A single query sits at the end of its keys.
        "causal": True,
        "window_size": window_size(call.variant),
        "softcap": call.variant.softcap,
        "num_splits": NUM_SPLITS,
        "return_softmax_lse": True,
    }


def chunk_arguments(call: FlashCall, package: FlashPackage) -> dict[str, Any]:
    """For ``flash_attn_varlen_func`` (2) or ``flash_attn_with_kvcache`` (3), of packed queries."""
    variant = call.variant
    shared: dict[str, Any] = {
        "q": call.q,
        "cu_seqlens_q": _int32(call.cu_seqlens_q),
        # At 1, version 2 takes queries for a dense batch, and sequences may have none.
        "max_seqlen_q": max(2, call.max_seqlen_q),
        "softmax_scale": variant.scale,
        "causal": variant.causal,
        "window_size": window_size(variant),
        "softcap": variant.softcap,
    }
    if package.version == 3:
        return shared | {
            "k_cache": call.k_cache,
            "v_cache": call.v_cache,
            "cache_seqlens": _int32(call.seqlens_k),
            "page_table": call.block_table,
            "num_splits": 1,
            "return_softmax_lse": True,
        }
    running = torch.nn.functional.pad(call.seqlens_k.cumsum(0), (1, 0))
    # Splits of packed queries over pages have been wrong in builds that know the argument.
    splits = {"num_splits": 1} if package.splits_varlen else {}
    return (
        shared
        | splits
        | {
            "k": call.k_cache,
            "v": call.v_cache,
            "cu_seqlens_k": _int32(running),
            "max_seqlen_k": call.max_seqlen_k,
            "alibi_slopes": _float32(variant.alibi_slopes),
            "block_table": call.block_table,
            "return_attn_probs": True,
        }
    )


def window_size(variant: AttentionVariant) -> tuple[int, int]:
    """(keys left of a query, keys right of it) that are visible; -1 is no limit.

    A window counts the query's own key: 4 visible keys are 3 to the left.
    """
    left = variant.window - 1 if variant.window > 0 else -1
    return left, 0 if variant.causal else -1


def attend_flash(
    package: FlashPackage, call: FlashCall, results: tuple[torch.Tensor, torch.Tensor | None]
) -> None:
    """Attention of a call that ``refusal`` has nothing against; writes (out, lse)."""
    n = call.num_decodes
    if n:
        part = call.decodes()
        mixed, log_total = package.with_kvcache(**decode_arguments(part, package.version))[:2]
        _write(results, slice(0, n), mixed.squeeze(1), log_total.squeeze(2), None)
    if call.seqlens_k.shape[0] > n and call.q.shape[0] > n:
        part = call.chunks()
        function = package.with_kvcache if package.varlen is None else package.varlen
        mixed, log_total = function(**chunk_arguments(part, package))[:2]
        _write(results, slice(n, None), mixed, log_total.transpose(0, 1), part.cu_seqlens_q[-1])


def _write(
    results: tuple[torch.Tensor, torch.Tensor | None],
    rows: slice,
    mixed: torch.Tensor,
    log_total: torch.Tensor,
    num_rows: torch.Tensor | None,
) -> None:
    """mixed (rows, num_heads, head_dim) and log_total (rows, num_heads) into those rows.

    num_rows: on the device, how many of them are queries; None is all
    """
    out, lse = results
    held = torch.ones((), dtype=torch.bool, device=mixed.device)
    if num_rows is not None:
        held = torch.arange(mixed.shape[0], device=mixed.device) < num_rows
    out[rows] = torch.where(held.view(-1, 1, 1), mixed, out[rows])
    if lse is not None:
        # A row without keys has +inf from version 2 and -inf from version 3.
        known = torch.where(log_total == float("inf"), float("-inf"), log_total)
        lse[rows] = torch.where(held.view(-1, 1), known, lse[rows])


def _int32(index: torch.Tensor) -> torch.Tensor:
    return index.to(torch.int32).contiguous()


def _float32(per_head: torch.Tensor | None) -> torch.Tensor | None:
    return None if per_head is None else per_head.float().contiguous()
