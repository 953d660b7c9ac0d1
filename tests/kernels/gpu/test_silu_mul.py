from __future__ import annotations

import pytest
import torch

from kernels.gpu.silu_mul import COLUMNS, silu_mul_triton
from kernels.silu_mul import silu_mul


@pytest.mark.parametrize("size", [1, 40, COLUMNS + 1])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-6), (torch.float16, 2e-3)])
def test_it_is_the_reference(size: int, dtype: torch.dtype, tolerance: float) -> None:
    gate_up = (torch.randn(3, 2 * size + 4) * 3).to(dtype)[:, : 2 * size]
    expected = silu_mul(gate_up)
    assert torch.allclose(silu_mul_triton(gate_up), expected, rtol=tolerance, atol=tolerance)


def test_no_rows() -> None:
    assert silu_mul_triton(torch.zeros(0, 8)).shape == (0, 4)
