"""Rotary embedding of queries and keys, and the KV write, in one pass over a step's qkv.

Invariants: those of ``rope`` and ``kv_write``, which together are the torch reference.

Device: writes the KV cache in place; the native path rotates the queries in place as well.
"""

from __future__ import annotations

import torch

from kernels.attention.cpu_backend import takes_caches
from kernels.kv_bytes import head_dim_of, is_byte_cache, kind_of, quantise_heads
from kernels.kv_write import write_kv
from kernels.native import NativeKernels
from kernels.native.arguments import RopeWriteKvArguments
from kernels.rope import apply_rope


def rope_write_kv(
    qkv: torch.Tensor,
    cos_sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    native: NativeKernels | None = None,
) -> torch.Tensor:
    """Rotate queries and keys, store keys and values at their slots, return the queries.

    qkv:              (num_tokens, num_heads + 2 * num_kv_heads, head_dim), in that order of heads;
                      its content afterwards is unspecified
    cos_sin:          (num_tokens, rotary_dim) float32 - see ``apply_rope``
    k_cache, v_cache: (num_blocks, block_size, num_kv_heads, head_dim), dtype of qkv; or of
                      bytes, see ``kernels.kv_bytes``
    slot_mapping:     (num_tokens) int64; negative: the row is not stored
    native:           the loaded library, used where it takes the dtype
    returns:          (num_tokens, num_heads, head_dim); may be a view of qkv

    Raises ValueError for a slot outside the cache (native) or IndexError (torch).
    """
    num_kv_heads = k_cache.shape[2]
    num_heads = qkv.shape[1] - 2 * num_kv_heads
    if native is not None and qkv.is_contiguous() and takes_caches(native, qkv, k_cache, v_cache):
        _run_native(native, qkv, cos_sin, k_cache, v_cache, slot_mapping)
        return qkv[:, :num_heads]
    # Queries and keys are neighbours, so one rotation serves both.
    rotated = apply_rope(qkv[:, : num_heads + num_kv_heads], cos_sin)
    k, v = rotated[:, num_heads:], qkv[:, num_heads + num_kv_heads :]
    if is_byte_cache(k_cache):
        k, v = quantise_heads(k, k_cache.dtype), quantise_heads(v, v_cache.dtype)
    write_kv(k, v, k_cache, v_cache, slot_mapping)
    return rotated[:, :num_heads]


def _run_native(
    native: NativeKernels,
    qkv: torch.Tensor,
    cos_sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    num_blocks, block_size, num_kv_heads = k_cache.shape[:3]
    assert cos_sin.dtype == torch.float32 and cos_sin.is_contiguous(), "a table's rows"
    assert slot_mapping.dtype == torch.int64 and slot_mapping.is_contiguous(), "int64 slots"
    assert slot_mapping.shape[0] == cos_sin.shape[0] == qkv.shape[0], "one of each for a row"
    arguments = RopeWriteKvArguments(
        qkv.data_ptr(),
        cos_sin.data_ptr(),
        k_cache.data_ptr(),
        v_cache.data_ptr(),
        slot_mapping.data_ptr(),
        qkv.stride(0),
        cos_sin.stride(0),
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        qkv.shape[0],
        qkv.shape[1] - 2 * num_kv_heads,
        num_kv_heads,
        head_dim_of(k_cache),
        cos_sin.shape[1],
        num_blocks,
        block_size,
        qkv.dtype == torch.bfloat16,
        kind_of(k_cache),
        torch.get_num_threads(),
    )
    native.run("rope_write_kv", arguments)
