from __future__ import annotations

import pytest
import torch

from kernels.embedding import embed
from kernels.gpu.embedding import COLUMNS, embed_triton


@pytest.mark.parametrize("size", [5, COLUMNS + 3])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_it_is_the_reference(size: int, dtype: torch.dtype) -> None:
    table = torch.randn(9, size + 4)[:, :size]
    ids = torch.tensor([8, 1, 0, 1, 3, 1, 8, 1], dtype=dtype)[::2]
    assert torch.equal(embed_triton(table, ids), embed(table, ids))
    assert embed_triton(table, ids[:0]).shape == (0, size)
