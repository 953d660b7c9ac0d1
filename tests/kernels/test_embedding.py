from __future__ import annotations

import pytest
import torch

from kernels.embedding import embed


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_rows_by_token(dtype: torch.dtype) -> None:
    table = torch.randn(9, 5)
    ids = torch.tensor([8, 0, 8], dtype=dtype)
    assert torch.equal(embed(table, ids), table[[8, 0, 8]])
    with pytest.raises(IndexError):
        embed(table, ids + 1)
