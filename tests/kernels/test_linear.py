from __future__ import annotations

import pytest
import torch

from kernels.linear import make_linear


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("shape", [(960, 576), (576, 1536), (7, 5), (33, 64)])
@pytest.mark.parametrize("rows", [0, 1, 2, 3, 17])
def test_product(rows: int, shape: tuple[int, int], dtype: torch.dtype, tolerance: float) -> None:
    weight = torch.randn(shape).to(dtype)
    x = torch.randn(rows, shape[1]).to(dtype)
    result = make_linear(weight)(x)
    expected = x.double() @ weight.double().T
    assert result.shape == (rows, shape[0]) and result.dtype == dtype
    assert float((result.double() - expected).norm()) <= tolerance * float(expected.norm())


def test_a_wrong_packed_operator_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "kernels.linear._packed", lambda layout: lambda x: torch.zeros(x.shape[0], 8)
    )
    weight, x = torch.randn(8, 16), torch.randn(3, 16)
    assert torch.equal(make_linear(weight)(x), torch.nn.functional.linear(x, weight))


def test_a_missing_packed_operator_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(layout: torch.Tensor) -> None:
        raise AttributeError("no such operator")

    monkeypatch.setattr("kernels.linear._packed", missing)
    weight, x = torch.randn(8, 16), torch.randn(3, 16)
    assert torch.equal(make_linear(weight)(x), torch.nn.functional.linear(x, weight))


@pytest.mark.parametrize("shape", [(960, 576), (576, 1536)])
def test_a_row_is_the_same_alone_and_in_company(shape: tuple[int, int]) -> None:
    if not torch.backends.mkldnn.is_available():
        pytest.skip("this build of torch has no packed linear")
    linear = make_linear(torch.randn(shape))
    x = torch.randn(65, shape[1])
    together = linear(x)
    for rows in (1, 2, 3, 5, 12, 33, 64):
        assert torch.equal(linear(x[:rows]), together[:rows])
