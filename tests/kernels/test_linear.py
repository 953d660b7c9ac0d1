from __future__ import annotations

import pytest
import torch

from kernels.linear import make_linear
from kernels.native import NativeKernels, NativeUnavailable, load_native


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("shape", [(960, 576), (576, 1536), (7, 5), (33, 64), (7, 6), (129, 40)])
@pytest.mark.parametrize("rows", [0, 1, 2, 3, 17])
def test_product(
    maybe_native: NativeKernels | None,
    rows: int,
    shape: tuple[int, int],
    dtype: torch.dtype,
    tolerance: float,
) -> None:
    weight = torch.randn(shape).to(dtype)
    x = torch.randn(rows, shape[1]).to(dtype)
    result = make_linear(weight, maybe_native)(x)
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
def test_a_row_is_the_same_alone_and_in_company(
    maybe_native: NativeKernels | None, shape: tuple[int, int]
) -> None:
    if not torch.backends.mkldnn.is_available():
        pytest.skip("this build of torch has no packed linear")
    linear = make_linear(torch.randn(shape), maybe_native)
    x = torch.randn(65, shape[1])
    together = linear(x)
    for rows in (1, 2, 3, 5, 12, 33, 64):
        assert torch.equal(linear(x[:rows]), together[:rows])


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_native_bfloat16_rows_have_the_same_bits_in_any_company(
    native: NativeKernels, num_threads: int
) -> None:
    if native.isa != "avx512bf16":
        pytest.skip("the native linear takes bfloat16 only where products of it are native")
    linear, x = make_linear(torch.randn(200, 576).bfloat16(), native), torch.randn(65, 576)
    together = linear(x.bfloat16())
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(num_threads)
        for rows in (1, 2, 5, 6, 7, 12, 33, 64):
            assert torch.equal(linear(x[:rows].bfloat16()), together[:rows])
    finally:
        torch.set_num_threads(threads)


def test_an_instruction_set_that_is_not_faster_leaves_it_to_torch() -> None:
    try:
        baseline = load_native(isa="baseline")
    except NativeUnavailable as error:
        pytest.skip(f"needs the native kernels: {error}")
    weight, x = torch.randn(8, 16), torch.randn(3, 16)
    assert torch.equal(make_linear(weight, baseline)(x), make_linear(weight)(x))
