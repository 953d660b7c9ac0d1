"""The product in e4m3: the reference here, torch's own operator in `tests/gpu`."""

from __future__ import annotations

import pytest
import torch

from kernels.linear_fp8 import Fp8Linear, fits_fp8, multiplies_fp8
from kernels.quantise_fp8 import quantise_rows_fp8


def relative_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 7])
def test_it_is_the_product_of_what_is_stored(dtype: torch.dtype, rows: int) -> None:
    x, weight = torch.randn(rows, 96).to(dtype), torch.randn(48, 96).to(dtype)
    linear = Fp8Linear(weight)
    quantised = quantise_rows_fp8(x)
    exact = (quantised.values.double() * quantised.scales[:, None]) @ (
        linear.values.double() * linear.scales[:, None]
    ).T
    found = linear(x)
    assert found.dtype == dtype and torch.equal(found, linear(quantised))
    assert relative_error(found, exact) < (1e-6 if dtype == torch.float32 else 3e-3)
    # Rounding x and weight to 4 bits of mantissa leaves an error of 2.6 % each, at random.
    assert relative_error(found, x.double() @ weight.double().T) < 6e-2


def test_one_large_feature_or_row_costs_the_others_nothing() -> None:
    x, weight = torch.randn(8, 64), torch.randn(32, 64)
    linear = Fp8Linear(weight)
    small = linear(x)
    x[3] *= 1e4
    weight[5] *= 2.0**-14
    assert torch.equal(linear(x)[[0, 1, 2, 4]], small[[0, 1, 2, 4]])
    assert torch.equal(Fp8Linear(weight)(x)[:, 5], linear(x)[:, 5] * 2.0**-14)


def test_a_row_that_is_not_finite_spoils_itself_alone() -> None:
    x = torch.randn(3, 16)
    x[1, 2] = float("inf")
    found = Fp8Linear(torch.randn(16, 16))(x)
    assert found[1].isnan().all() and torch.isfinite(found[[0, 2]]).all()


def test_shapes_and_devices_that_do_not_fit() -> None:
    assert Fp8Linear(torch.randn(16, 32))(torch.zeros(0, 32)).shape == (0, 16)
    assert not fits_fp8(16, 24) and not multiplies_fp8(torch.device("cpu"))
    with pytest.raises(ValueError, match="not 24 and 16"):
        Fp8Linear(torch.randn(16, 24))
