"""The native CPU backend of paged attention: checks what C cannot, and hands over addresses.

Invariants: a row's result has the same bits whatever its neighbours, its chunk and the number of
threads; block ids are checked before they are followed.

Device: reads the KV cache, writes the outputs in place.
"""

from __future__ import annotations

import torch

from kernels.attention.torch_backend import AttentionVariant
from kernels.kv_bytes import is_byte_cache, kind_of
from kernels.native import NativeKernels
from kernels.native.arguments import AttentionArguments, address
from kernels.quantise import QuantisedRows, row_addresses

MAX_HEAD_DIM = 256
"""What the buffers on the stack are sized by; the same as in ``library.h``."""


def is_supported(native: NativeKernels, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether the native backend takes these tensors: see ``varlen_paged_attention``."""
    head_dim = q.shape[2]
    fits = head_dim % 2 == 0 and head_dim <= MAX_HEAD_DIM
    return fits and takes_caches(native, q, k, v)


def takes_caches(native: NativeKernels, x: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether the library takes x together with these caches, of its dtype or of bytes."""
    if is_byte_cache(k):
        return native.takes(x) and all(c.is_cpu and c.stride(-1) == 1 for c in (k, v))
    return native.takes(x, k, v)


def attend_native(
    native: NativeKernels,
    q: torch.Tensor,
    caches: tuple[torch.Tensor, torch.Tensor],
    indices: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    variant: AttentionVariant,
    results: tuple[torch.Tensor, torch.Tensor | None],
    into: QuantisedRows | None = None,
) -> None:
    """Attention for every sequence of the batch; shapes as in ``varlen_paged_attention``.

    caches:  (k_cache, v_cache)
    indices: (cu_seqlens_q, seqlens_k, block_table) int32
    results: (out, lse or None), written for the rows below cu_seqlens_q[-1]
    into:    the same rows of out again, quantised; out is then contiguous

    Raises ValueError where a sequence needs a block outside the pool or its table.
    """
    k, v = caches
    cu_seqlens_q, seqlens_k, block_table = (_int32(index) for index in indices)
    out, lse = results
    # Kept by name until the call returns: the structure holds addresses only.
    slopes, sinks = _float32(variant.alibi_slopes), _float32(variant.sinks)
    assert into is None or out.is_contiguous(), "rows that are quantised lie one after the other"
    arguments = AttentionArguments(
        address(q),
        address(k),
        address(v),
        address(out),
        address(lse),
        *row_addresses(into, (q.shape[0], q.shape[1] * q.shape[2])),
        address(cu_seqlens_q),
        address(seqlens_k),
        address(block_table),
        address(slopes),
        address(sinks),
        *q.stride()[:2],
        *k.stride()[:3],
        *v.stride()[:3],
        *out.stride()[:2],
        0 if lse is None else lse.stride(0),
        block_table.stride(0),
        block_table.shape[1],
        seqlens_k.shape[0],
        q.shape[1],
        k.shape[2],
        q.shape[2],
        *k.shape[:2],
        variant.window,
        variant.causal,
        q.dtype == torch.bfloat16,
        kind_of(k),
        torch.get_num_threads(),
        variant.scale,
        variant.softcap,
    )
    native.run("varlen_paged_attention", arguments)


def _int32(index: torch.Tensor) -> torch.Tensor:
    return index.to(torch.int32).contiguous()


def _float32(per_head: torch.Tensor | None) -> torch.Tensor | None:
    return None if per_head is None else per_head.float().contiguous()
