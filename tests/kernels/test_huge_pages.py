from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

from kernels.huge_pages import (
    HUGE_PAGE_BYTES,
    in_huge_pages,
    return_freed_memory,
    zeros_in_huge_pages,
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3, 5), (0, 4), (700, 1000)])
def test_zeros_of_the_shape_that_start_a_page(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x = zeros_in_huge_pages(shape, dtype)
    assert x.shape == shape and x.dtype == dtype and x.is_contiguous()
    assert x.numel() == 0 or x.data_ptr() % HUGE_PAGE_BYTES == 0
    assert not x.any()


def test_the_pages_are_large_where_the_system_has_them() -> None:
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not setting.exists() or "[never]" in setting.read_text():
        pytest.skip("this system has no large pages")

    def large() -> int:
        words = Path("/proc/self/smaps_rollup").read_text().split()
        return int(words[words.index("AnonHugePages:") + 1])

    before, x = large(), zeros_in_huge_pages((8 * HUGE_PAGE_BYTES,), torch.uint8)
    x.fill_(1)
    # One is enough to know: the others depend on how much memory is in one piece.
    assert large() > before


def test_freed_memory_can_be_returned() -> None:
    kept = [torch.ones(20_000) for _ in range(20)]
    del kept[::2]
    return_freed_memory()
    assert all(bool((x == 1).all()) for x in kept)


def test_the_memory_lives_as_long_as_a_view_of_it() -> None:
    view = zeros_in_huge_pages((4, 1000), torch.float32)[2]
    gc.collect()
    view.fill_(7.0)
    assert view.tolist() == [7.0] * 1000


def test_a_copy_is_made_where_little_of_a_page_is_wasted() -> None:
    large, small = torch.rand(512, 1000), torch.rand(30, 20)
    copy = in_huge_pages(large.t())
    assert torch.equal(copy, large.t()) and copy.is_contiguous()
    assert copy.data_ptr() % HUGE_PAGE_BYTES == 0
    assert in_huge_pages(small) is small
