"""What the kernels of attention, the KV write and fp8 products share: numbers as bytes and scales,
see ``kernels.kv_bytes``, whose these are.

Device: pure functions of their tensors.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.kv_bytes import FP8_CACHE, INT8_CACHE, SCALE_BYTES, is_byte_cache

PLAIN, INT8, FP8 = 0, 1, 2
"""What a kernel is told that a cache holds."""

FORMATS = {INT8_CACHE: INT8, FP8_CACHE: FP8}
FP8_CAPABILITY = (8, 9)
"""Older devices have no conversion between e4m3 and other floats."""


def split_cache(cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(elements, scales) of a cache of bytes, views of it; the scales are float32 and have the
    first three axes. A cache that holds no bytes comes back as both.

    Raises ValueError for a head size that does not keep scales apart by whole words, and for e4m3
    on a device that cannot convert it.
    """
    if not is_byte_cache(cache):
        return cache, cache
    head_dim = cache.shape[-1] - SCALE_BYTES
    if head_dim % SCALE_BYTES:
        raise ValueError(f"a KV cache of bytes needs heads of a multiple of 4, got {head_dim}")
    if cache.dtype == FP8_CACHE:
        check_fp8(cache)
        elements = cache[..., :head_dim]
    else:
        elements = cache[..., :head_dim].view(torch.int8)
    return elements, cache.view(torch.float32)[..., -1]


def check_fp8(x: torch.Tensor) -> None:
    """Raises ValueError where x lies on a device that does not know e4m3."""
    if x.is_cuda and torch.cuda.get_device_capability(x.device) < FP8_CAPABILITY:
        raise ValueError("fp8 needs a GPU of compute capability 8.9 or more")


def format_of(cache: torch.Tensor) -> int:
    """PLAIN, INT8 or FP8."""
    return FORMATS.get(cache.dtype, PLAIN)


@triton.jit
def to_e4m3(x):
    """float32 within the range of e4m3, rounded to the nearest, ties to even.

    Adding and subtracting 1.5 * 2^23 quanta rounds to a quantum, which is 2^-3 of x's own power of
    two, 2^-6 at least. The cast that follows has nothing left to round, whatever its mode.
    """
    x = tl.minimum(tl.maximum(x, -448.0), 448.0)
    exponent = tl.maximum((x.to(tl.int32, bitcast=True) >> 23) & 0xFF, 121)
    magic = (((exponent + 20) << 23) | 0x400000).to(tl.float32, bitcast=True)
    return ((x + magic) - magic).to(tl.float8e4nv)


@triton.jit
def row_peak(x):
    """(largest magnitude, whether one is not finite) of float32 x."""
    magnitudes = tl.abs(x)
    finite = magnitudes < float("inf")
    peak = tl.max(tl.where(finite, magnitudes, 0.0), axis=0)
    return peak, tl.max(tl.where(finite, 0, 1), axis=0)


@triton.jit
def head_scale(peak, bad, FORMAT: tl.constexpr):
    """(factor for the elements, scale to store) of a head whose largest magnitude is peak."""
    LARGEST: tl.constexpr = 127.0 if FORMAT == 1 else 448.0
    kept = (peak >= 1e-30) & (bad == 0)
    factor = tl.where(kept, LARGEST / tl.where(kept, peak, 1.0), 0.0)
    scale = tl.where(kept, peak / LARGEST, tl.where(bad > 0, float("nan"), 0.0))
    return factor, scale


@triton.jit
def to_stored(x, factor, FORMAT: tl.constexpr):
    """Elements as the cache has them; those of a head with factor 0 are 0, finite or not."""
    shrunk = tl.where(factor > 0.0, x * factor, 0.0)
    if FORMAT == 1:
        # Rounds to the nearest integer, ties to even, up to 2^22.
        return ((shrunk + 12582912.0) - 12582912.0).to(tl.int8)
    else:
        return to_e4m3(shrunk)
