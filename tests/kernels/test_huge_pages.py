from __future__ import annotations

import gc

import pytest
import torch

from kernels.huge_pages import HUGE_PAGE_BYTES, zeros_in_huge_pages


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3, 5), (0, 4), (700, 1000)])
def test_zeros_of_the_shape_that_start_a_page(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x = zeros_in_huge_pages(shape, dtype)
    assert x.shape == shape and x.dtype == dtype and x.is_contiguous()
    assert x.numel() == 0 or x.data_ptr() % HUGE_PAGE_BYTES == 0
    assert not x.any()


def test_the_memory_lives_as_long_as_a_view_of_it() -> None:
    view = zeros_in_huge_pages((4, 1000), torch.float32)[2]
    gc.collect()
    view.fill_(7.0)
    assert view.tolist() == [7.0] * 1000
