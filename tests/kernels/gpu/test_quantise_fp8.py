from __future__ import annotations

import pytest
import torch

from kernels.gpu.quantise_fp8 import quantise_rows_triton, rms_norm_fp8_triton
from kernels.quantise_fp8 import Fp8Rows, quantise_rows_fp8
from kernels.rms_norm import fused_add_rms_norm, rms_norm


def restored(rows: Fp8Rows) -> torch.Tensor:
    return rows.values.float() * rows.scales[:, None]


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_rows_are_those_of_the_reference() -> None:
    x = (torch.randn(5, 80) * torch.randn(5, 1).exp())[:, :72]
    x[1] = 0
    x[2, 7] = float("nan")
    found, expected = quantise_rows_triton(x), quantise_rows_fp8(x)
    assert torch.equal(found.values.float(), expected.values.float())
    assert torch.allclose(found.scales, expected.scales, rtol=1e-6, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("adds", [False, True])
def test_fused_with_the_norm_it_is_both_in_turn(dtype: torch.dtype, adds: bool) -> None:
    x, residual, weight = torch.randn(3, 40), torch.randn(3, 40), torch.randn(40)
    x, residual, weight = x.to(dtype), residual.to(dtype), weight.to(dtype)
    found, total = rms_norm_fp8_triton(x, residual if adds else None, weight, 1e-5)
    if adds:
        normed, expected_total = fused_add_rms_norm(x, residual, weight, 1e-5)
        assert torch.equal(total, expected_total)
    else:
        normed = rms_norm(x, weight, 1e-5)
        assert total is x
    expected = restored(quantise_rows_fp8(normed))
    # A last bit of the norm may carry a number over to the next step of e4m3.
    assert float((restored(found) - expected).norm() / expected.norm()) < 5e-3


def test_no_rows() -> None:
    assert quantise_rows_triton(torch.zeros(0, 8)).values.shape == (0, 8)
