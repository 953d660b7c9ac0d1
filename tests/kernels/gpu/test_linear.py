"""The product with fixed tiles, in the interpreter, against float64."""

from __future__ import annotations

import pytest
import torch

from kernels.gpu.linear import TILE_IN, TILE_OUT, TILE_ROWS, TritonLinear, linear_triton


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-6), (torch.float16, 1e-3)])
@pytest.mark.parametrize(
    "rows, out_features, in_features",
    [(1, 5, 7), (TILE_ROWS + 1, TILE_OUT + 3, TILE_IN + 1), (3, TILE_OUT, 3 * TILE_IN)],
)
def test_it_is_the_product(
    rows: int, out_features: int, in_features: int, dtype: torch.dtype, tolerance: float
) -> None:
    # A view whose rows are apart, as the tensors of a step are.
    x = torch.randn(rows, in_features + 8).to(dtype)[:, :in_features]
    weight = torch.randn(out_features, in_features).to(dtype)
    expected = x.double() @ weight.double().T
    error = (linear_triton(x, weight).double() - expected).norm() / expected.norm()
    assert float(error) < tolerance


def test_a_row_has_the_same_bits_in_any_company() -> None:
    x, weight = torch.randn(2 * TILE_ROWS, 100), torch.randn(20, 100)
    linear = TritonLinear(weight)
    together = linear(x)
    for first, past in ((0, 1), (5, 9), (TILE_ROWS - 1, TILE_ROWS + 2)):
        assert torch.equal(linear(x[first:past]), together[first:past])


def test_what_is_not_finite_stays_in_its_row() -> None:
    x, weight = torch.randn(3, 70), torch.randn(4, 70)
    x[1, 69] = float("nan")
    out = linear_triton(x, weight)
    assert torch.isfinite(out[[0, 2]]).all() and torch.isnan(out[1]).all()


def test_no_rows() -> None:
    assert linear_triton(torch.zeros(0, 8), torch.zeros(3, 8)).shape == (0, 3)
