"""Keys and values as bytes, one float32 scale for each head of each token.

A slot of such a cache is head_dim bytes and then the 4 bytes of the scale, so that the cache stays
one tensor, and what copies blocks need not know. The dtype of the cache says what a byte is: a
signed integer (INT8_CACHE) or an e4m3 float (FP8_CACHE). At the same size the integer is closer in
heads whose elements are alike; the float keeps the small elements of a head with one large.

Invariants: a head's bytes and scale depend on it alone; those of integers are the same from the
reference and from every native instruction set; a head that is not finite has the scale NaN.

Device: pure functions of their tensors.
"""

from __future__ import annotations

import torch

from kernels.quantise import SMALLEST_PEAK

SCALE_BYTES = 4
INT8_CACHE = torch.uint8
FP8_CACHE = torch.float8_e4m3fn
LARGEST = {INT8_CACHE: 127.0, FP8_CACHE: 448.0}
"""What the largest element of a head is stored as."""

NATIVE_KINDS = {INT8_CACHE: 2, FP8_CACHE: 3}


def kind_of(cache: torch.Tensor) -> int:
    """What native code is told: 0 where there are no bytes, else a number of ``library.h``."""
    return NATIVE_KINDS.get(cache.dtype, 0)


def is_byte_cache(cache: torch.Tensor) -> bool:
    """Whether the last axis is bytes and a scale."""
    return cache.dtype in LARGEST


def is_int8_cache(cache: torch.Tensor) -> bool:
    """Whether the bytes are signed integers."""
    return cache.dtype == INT8_CACHE


def head_dim_of(cache: torch.Tensor) -> int:
    """Elements of a head, whatever the cache holds."""
    return cache.shape[-1] - (SCALE_BYTES if is_byte_cache(cache) else 0)


def quantise_heads(x: torch.Tensor, cache_dtype: torch.dtype = INT8_CACHE) -> torch.Tensor:
    """(..., head_dim) as (..., head_dim + SCALE_BYTES) of cache_dtype.

    scale = max|x| / largest, byte = round(x * (largest / max|x|)), ties to even; a head whose
    largest is below SMALLEST_PEAK is a head of zeros
    """
    largest = LARGEST[cache_dtype]
    wide = x.float()
    finite = torch.isfinite(wide).all(dim=-1, keepdim=True)
    peaks = wide.abs().amax(dim=-1, keepdim=True)
    kept = finite & (peaks >= SMALLEST_PEAK)
    # A number over a tensor would be its reciprocal times the number, which is rounded twice.
    factors = torch.where(kept, torch.tensor(largest) / torch.where(kept, peaks, 1.0), 0.0)
    shrunk = torch.where(kept, wide, 0.0) * factors
    if cache_dtype == INT8_CACHE:
        stored = torch.round(shrunk).to(torch.int8)
    else:
        # Rounding may pass the largest by a bit, and not every cast saturates.
        stored = shrunk.clamp(-largest, largest).to(cache_dtype)
    scales = torch.where(kept, peaks / largest, torch.where(finite, 0.0, float("nan")))
    joined = (stored.view(torch.uint8), scales.contiguous().view(torch.uint8))
    return torch.cat(joined, dim=-1).view(cache_dtype)


def restore_heads(stored: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The inverse, up to rounding: (..., head_dim + SCALE_BYTES) as (..., head_dim)."""
    element = torch.int8 if is_int8_cache(stored) else FP8_CACHE
    elements = stored[..., :-SCALE_BYTES].view(element).float()
    scales = stored[..., -SCALE_BYTES:].contiguous().view(torch.float32)
    return (elements * scales).to(dtype)


def restore_blocks(
    caches: tuple[torch.Tensor, torch.Tensor],
    seqlens_k: torch.Tensor,
    block_table: torch.Tensor,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(k_cache, v_cache, block_table) of the blocks that the sequences hold, restored.

    caches: as ``varlen_paged_attention`` takes them; the block table is renumbered
    """
    block_size = caches[0].shape[1]
    num_blocks = (seqlens_k + (block_size - 1)) // block_size
    columns = torch.arange(block_table.shape[1], device=block_table.device)
    held = columns < num_blocks[:, None]
    ids = block_table[held].long()
    renumbered = torch.zeros_like(block_table)
    renumbered[held] = torch.arange(len(ids), dtype=block_table.dtype, device=ids.device)
    keys, values = (restore_heads(cache[ids], dtype) for cache in caches)
    return keys, values, renumbered
