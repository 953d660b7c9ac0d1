from __future__ import annotations

import pytest
import torch

from kernels.native import NativeKernels
from kernels.rms_norm import fused_add_rms_norm, rms_norm


def reference(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    wide = x.double()
    return wide / torch.sqrt((wide**2).mean(-1, keepdim=True) + epsilon) * weight.double()


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("shape", [(1, 576), (7, 13), (0, 64)])
def test_formula(
    maybe_native: NativeKernels | None,
    shape: tuple[int, int],
    dtype: torch.dtype,
    tolerance: float,
) -> None:
    x = (torch.randn(shape) * 3).to(dtype)
    weight = torch.randn(shape[1]).to(dtype)
    y = rms_norm(x, weight, 1e-5, maybe_native)
    assert y.dtype == dtype
    assert torch.allclose(y.double(), reference(x, weight, 1e-5), rtol=tolerance, atol=tolerance)


def test_bfloat16_is_rounded_before_the_weight(maybe_native: NativeKernels | None) -> None:
    x, weight = torch.randn(64, 32).bfloat16(), torch.randn(32).bfloat16()
    wide = x.float()
    normed = (wide * torch.rsqrt((wide**2).mean(-1, keepdim=True) + 1e-5)).bfloat16()
    assert torch.equal(rms_norm(x, weight, 1e-5, maybe_native), normed * weight)


def test_epsilon_keeps_zero_finite(maybe_native: NativeKernels | None) -> None:
    y = rms_norm(torch.zeros(2, 4), torch.ones(4), 1e-5, maybe_native)
    assert torch.equal(y, torch.zeros(2, 4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows, size", [(3, 8), (5, 576), (300, 70)])
def test_residual_is_added_and_returned(
    maybe_native: NativeKernels | None, rows: int, size: int, dtype: torch.dtype
) -> None:
    x, residual = torch.randn(2, rows, size).to(dtype).unbind(0)
    weight = torch.randn(size).to(dtype)
    y, total = fused_add_rms_norm(x, residual, weight, 1e-5, maybe_native)
    assert torch.equal(total, x + residual)
    assert torch.equal(y, rms_norm(total, weight, 1e-5, maybe_native))


def test_a_row_is_the_same_alone_and_in_company() -> None:
    x, weight = torch.randn(37, 576), torch.randn(576)
    assert torch.equal(rms_norm(x, weight, 1e-5)[5:6], rms_norm(x[5:6], weight, 1e-5))
