"""Zeroed memory in large pages, for tensors that are read at random.

A read at a random place needs its page's address first; with pages of 2 MiB the processor's own
table of them reaches over the whole KV pool.

Device: allocates memory of the host.
"""

from __future__ import annotations

import ctypes
import math
import mmap

import torch

HUGE_PAGE_BYTES = 2 << 20

MAX_WASTE = 0.2
"""Of a tensor's size, what may be left of its last large page."""


def return_freed_memory() -> None:
    """Give the system what was freed and is kept for later, where the C library can (glibc)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def zeros_in_huge_pages(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A contiguous tensor of zeros on the CPU, in large pages where the system gives them.

    The memory is not touched: it costs nothing until it is used, in steps of a page.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    # Room to begin at a page's start. Private: shared memory, the default, is a file to the system,
    # which has a setting of its own for those and mostly gives them small pages.
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    region = mmap.mmap(-1, num_bytes + HUGE_PAGE_BYTES, flags=private)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        region.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(region, dtype=torch.uint8)
    start = -whole.data_ptr() % HUGE_PAGE_BYTES
    return whole[start : start + num_bytes].view(dtype).view(shape)


def in_huge_pages(tensor: torch.Tensor) -> torch.Tensor:
    """The same, contiguous; copied into large pages where little of these stays empty."""
    if -tensor.nbytes % HUGE_PAGE_BYTES <= MAX_WASTE * tensor.nbytes:
        copy = zeros_in_huge_pages(tuple(tensor.shape), tensor.dtype)
        return copy.copy_(tensor)
    return tensor.contiguous()
