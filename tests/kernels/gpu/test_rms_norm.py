from __future__ import annotations

import pytest
import torch

from kernels.gpu.rms_norm import rms_norm_triton
from kernels.rms_norm import fused_add_rms_norm, rms_norm


@pytest.mark.parametrize("size", [1, 40, 576])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-6), (torch.float16, 2e-3)])
def test_it_is_the_reference(size: int, dtype: torch.dtype, tolerance: float) -> None:
    wide = torch.randn(3, size + 8).to(dtype)
    x, weight = wide[:, :size], torch.randn(size).to(dtype)
    out, same = rms_norm_triton(x, None, weight, 1e-5)
    assert same is x
    assert torch.allclose(out, rms_norm(x, weight, 1e-5), rtol=tolerance, atol=tolerance)
    residual = torch.randn(3, size).to(dtype)
    out, total = rms_norm_triton(x, residual, weight, 1e-5)
    expected, expected_total = fused_add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, expected_total)
    assert torch.allclose(out, expected, rtol=tolerance, atol=tolerance)


def test_no_rows() -> None:
    assert rms_norm_triton(torch.zeros(0, 8), None, torch.ones(8), 1e-5)[0].shape == (0, 8)
