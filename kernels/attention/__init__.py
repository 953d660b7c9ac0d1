"""Attention of packed queries over a paged KV cache: one contract, several backends.

Invariants: a query sees only the keys the contract names; nothing stored in any other slot, finite
or not, reaches the output; entries of the block table past a sequence's length are never used as
addresses; output rows past the last query are left untouched.

Device: reads the KV cache, writes ``out`` and ``lse``.
"""

from __future__ import annotations

import torch

from kernels.attention.cpu_backend import MAX_HEAD_DIM, attend_native, is_supported
from kernels.attention.flash_backend import FlashCall, attend_flash, find_package, refusal
from kernels.attention.layout import BatchLayout, plan_attention
from kernels.attention.torch_backend import AttentionVariant, attend_batch
from kernels.kv_bytes import head_dim_of, is_byte_cache, restore_blocks
from kernels.native import NativeKernels
from kernels.quantise import QuantisedRows, write_rows

__all__ = ["BatchLayout", "plan_attention", "varlen_paged_attention"]

SUPPORTED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SUPPORTED_BACKENDS = ("auto", "torch", "cpu", "triton", "flash_attn")


def varlen_paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seqlens_k: torch.Tensor,
    block_table: torch.Tensor,
    *,
    max_seqlen_q: int,
    max_seqlen_k: int,
    scale: float,
    causal: bool = True,
    window: int = 0,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    num_decodes: int = 0,
    layout: BatchLayout | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    backend: str = "auto",
    native: NativeKernels | None = None,
    into: QuantisedRows | None = None,
) -> torch.Tensor:
    """Attention of every packed query over the keys of its own sequence.

    q:            (num_tokens, num_heads, head_dim) float32|bfloat16|float16, last stride 1
    k_cache:      (num_blocks, block_size, num_kv_heads, head_dim), dtype of q, last stride 1;
                  fastest when it is a view of physical [block, kv_head, slot, dim]; or of bytes,
                  see ``kernels.kv_bytes``
    v_cache:      as k_cache
    cu_seqlens_q: (num_seqs + 1) int32 - packed query boundaries, starts at 0
    seqlens_k:    (num_seqs) int32 - keys of each sequence, this step's included (already written)
    block_table:  (num_seqs, max_blocks) int32 - block ids in order of position
    max_seqlen_q, max_seqlen_k: upper bounds of the lengths, in tokens; what launches are sized by
    scale:        multiplies q.k before everything else
    causal:       key j is visible to a query at position p only if j <= p
    window:       number of visible keys, the query's own included; 0 means all
    softcap:      scores become softcap * tanh(scores / softcap); 0 means off
    alibi_slopes: (num_heads) float32 - adds slope * (j - p)
    sinks:        (num_heads) float32 - one extra logit per head, in the denominator only
    num_decodes:  the first num_decodes sequences have exactly one query
    layout:       ``plan_attention`` of the same index tensors, to share between layers; only the
                  torch backend uses it
    lse:          (num_tokens, num_heads) float32, written if given: natural logarithm of the
                  softmax denominator (a sink included), -inf for rows without keys
    backend:      "torch"; "cpu", the native one; "triton"; "flash_attn"; "auto" is flash_attn on a
                  GPU where it is installed and takes the call, else triton, and native on the CPU
                  where it takes the call
    native:       the loaded library, which "cpu" needs
    into:         written if given: out, quantised, as rows of num_heads * head_dim features; out is
                  then contiguous
    returns:      out, (num_tokens, num_heads, head_dim), dtype of q (rows past cu_seqlens_q[-1]
                  keep what they held; a fresh ``out`` holds zeros there)

    Query t of sequence b sits at position p = seqlens_k[b] - seqlen_q[b] + t. Rows without a
    visible key give 0. seqlen_q == 0 and seqlens_k == 0 are legal.

    Raises ValueError for shapes, dtypes or a backend that the call cannot honour.
    """
    _check_arguments(q, k_cache, v_cache, cu_seqlens_q, block_table, backend)
    if out is None:
        out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    num_seqs = seqlens_k.shape[0]
    if num_seqs == 0 or q.shape[0] == 0 or max_seqlen_q == 0:
        return out
    variant = AttentionVariant(scale, causal, window, softcap, alibi_slopes, sinks)
    results = (out, lse)
    if backend in ("triton", "flash_attn") or (backend == "auto" and q.is_cuda):
        indices = (cu_seqlens_q, seqlens_k, block_table)
        lengths = (max_seqlen_q, max_seqlen_k, num_decodes)
        call = FlashCall(q, k_cache, v_cache, *indices, *lengths, variant, lse is not None)
        _attend_on_gpu(call, backend, results)
        if into is not None:
            write_rows(out.view(out.shape[0], -1), into)
        return out
    if _chooses_native(backend, native, q, k_cache, v_cache):
        assert native is not None
        indices = (cu_seqlens_q, seqlens_k, block_table)
        attend_native(native, q, (k_cache, v_cache), indices, variant, results, into)
        return out
    if is_byte_cache(k_cache):
        caches = (k_cache, v_cache)
        restored = restore_blocks(caches, seqlens_k, block_table, q.dtype)
        k_cache, v_cache, block_table = restored
        layout = None
    if layout is None:
        layout = plan_attention(cu_seqlens_q, seqlens_k, block_table, k_cache)
    attend_batch(q, k_cache, v_cache, layout, variant, results)
    if into is not None:
        write_rows(out.view(out.shape[0], -1), into)
    return out


def _attend_on_gpu(
    call: FlashCall, backend: str, results: tuple[torch.Tensor, torch.Tensor | None]
) -> None:
    """By flash-attn where it is asked for, or may be and takes the call; else by Triton."""
    if backend != "triton":
        why = "it runs on a GPU, and these are tensors of the CPU"
        if call.q.is_cuda:
            package = find_package(torch.cuda.get_device_capability(call.q.device))
            why = package if isinstance(package, str) else refusal(call, package.version)
            if not isinstance(package, str) and not why:
                attend_flash(package, call, results)
                return
        if backend == "flash_attn":
            raise ValueError(f"the flash_attn backend cannot take this call: {why}")
    # Imported on first use: the package is there only where a GPU is, or the tests are.
    from kernels.gpu.attention import attend_triton

    caches = (call.k_cache, call.v_cache)
    indices = (call.cu_seqlens_q, call.seqlens_k, call.block_table)
    attend_triton(call.q, caches, indices, call.variant, results, num_decodes=call.num_decodes)


def _chooses_native(
    backend: str,
    native: NativeKernels | None,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
) -> bool:
    if backend == "torch":
        return False
    supported = native is not None and is_supported(native, q, k_cache, v_cache)
    if backend == "cpu" and not supported:
        raise ValueError(
            f"the cpu backend needs the native library, and float32 or bfloat16 heads of an even "
            f"size up to {MAX_HEAD_DIM} on the CPU, over a cache of that dtype or of bytes; got "
            f"{q.dtype} heads of {q.shape[2]} over {k_cache.dtype}"
        )
    return supported


def _check_arguments(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    block_table: torch.Tensor,
    backend: str,
) -> None:
    if backend not in SUPPORTED_BACKENDS:
        raise ValueError(f"attention backend {backend!r} is not one of {SUPPORTED_BACKENDS}")
    alike = k_cache.dtype == v_cache.dtype and (k_cache.dtype == q.dtype or is_byte_cache(k_cache))
    if q.dtype not in SUPPORTED_DTYPES or not alike:
        raise ValueError(
            f"attention needs q, k and v of one dtype out of {SUPPORTED_DTYPES}, "
            f"got {q.dtype}, {k_cache.dtype}, {v_cache.dtype}"
        )
    num_heads, head_dim = q.shape[1:]
    num_kv_heads = k_cache.shape[2]
    if num_heads % num_kv_heads != 0 or head_dim_of(k_cache) != head_dim:
        raise ValueError(
            f"{num_heads} query heads of {head_dim} do not fit "
            f"{num_kv_heads} key heads of {head_dim_of(k_cache)}"
        )
    if k_cache.shape != v_cache.shape:
        raise ValueError(f"key cache {k_cache.shape} and value cache {v_cache.shape} differ")
    if block_table.shape[0] != cu_seqlens_q.shape[0] - 1:
        raise ValueError(
            f"block_table has {block_table.shape[0]} rows for {cu_seqlens_q.shape[0] - 1} sequences"
        )
