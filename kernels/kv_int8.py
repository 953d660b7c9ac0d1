"""Keys and values as signed bytes, one float32 scale for each head of each token.

A slot of such a cache is head_dim bytes and then the 4 bytes of the scale, so that the cache stays
one tensor of bytes, and what copies blocks need not know.

Invariants: a head's bytes and scale depend on it alone and are the same from the reference and from
every native instruction set; a head that is not finite has the scale NaN.

Device: pure functions of their tensors.
"""

from __future__ import annotations

import torch

from kernels.quantise import SMALLEST_PEAK

SCALE_BYTES = 4
CACHE_DTYPE = torch.uint8
"""What tells such a cache from others."""


def is_int8_cache(cache: torch.Tensor) -> bool:
    """Whether the last axis is bytes and a scale."""
    return cache.dtype == CACHE_DTYPE


def head_dim_of(cache: torch.Tensor) -> int:
    """Elements of a head, whatever the cache holds."""
    return cache.shape[-1] - (SCALE_BYTES if is_int8_cache(cache) else 0)


def quantise_heads(x: torch.Tensor) -> torch.Tensor:
    """(..., head_dim) as (..., head_dim + SCALE_BYTES) uint8.

    scale = max|x| / 127, byte = round(x * (127 / max|x|)), ties to even
    """
    wide = x.float()
    finite = torch.isfinite(wide).all(dim=-1, keepdim=True)
    peaks = wide.abs().amax(dim=-1, keepdim=True)
    kept = finite & (peaks >= SMALLEST_PEAK)
    factors = torch.where(kept, 127.0 / torch.where(kept, peaks, 1.0), 0.0)
    whole = torch.round(torch.where(kept, wide, 0.0) * factors).to(torch.int8)
    scales = torch.where(kept, peaks / 127.0, torch.where(finite, 0.0, float("nan")))
    return torch.cat((whole.view(torch.uint8), scales.contiguous().view(torch.uint8)), dim=-1)


def restore_heads(stored: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The inverse, up to rounding: (..., head_dim + SCALE_BYTES) uint8 as (..., head_dim)."""
    whole = stored[..., :-SCALE_BYTES].view(torch.int8).float()
    scales = stored[..., -SCALE_BYTES:].contiguous().view(torch.float32)
    return (whole * scales).to(dtype)


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
