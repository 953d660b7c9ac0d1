from __future__ import annotations

import pytest
import torch

from kernels.native import NativeKernels
from kernels.silu_mul import silu_mul


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-6), (torch.bfloat16, 5e-3)])
@pytest.mark.parametrize("rows", [0, 1, 7, 1000])
def test_formula(
    maybe_native: NativeKernels | None, rows: int, dtype: torch.dtype, tolerance: float
) -> None:
    x = (torch.randn(rows, 26) * 4).to(dtype)
    gate, up = x[:, :13].double(), x[:, 13:].double()
    expected = gate / (1 + torch.exp(-gate)) * up
    result = silu_mul(x, maybe_native)
    assert result.dtype == dtype
    assert torch.allclose(result.double(), expected, rtol=tolerance, atol=tolerance)


def test_large_values_do_not_overflow(maybe_native: NativeKernels | None) -> None:
    x = torch.tensor([[-1e4, 1e4, 2.0, 2.0]])
    assert silu_mul(x, maybe_native).tolist() == [[0.0, 2e4]]
