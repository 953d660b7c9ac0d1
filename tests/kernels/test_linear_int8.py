from __future__ import annotations

import pytest
import torch

from kernels.linear_int8 import Int8Linear, quantise_weight
from kernels.native import INSTRUCTION_SETS, NativeKernels, load_native
from kernels.quantise import ZERO_BYTE, QuantisedRows, quantise_rows

SHAPES = [(960, 576), (7, 64), (129, 1088), (65, 100), (3, 1)]


def exact(weight: torch.Tensor, rows: QuantisedRows) -> torch.Tensor:
    """The product of the quantised numbers, in float64: nothing is rounded but the inputs."""
    weights, scales = quantise_weight(weight)
    signed = (rows.values.double() - ZERO_BYTE) * rows.scales.double()[:, None]
    return signed @ (weights.double() * scales.double()[:, None]).T


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-6), (torch.bfloat16, 4e-3)])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rows", [0, 1, 2, 3, 17])
def test_product(
    maybe_native: NativeKernels | None,
    rows: int,
    shape: tuple[int, int],
    dtype: torch.dtype,
    tolerance: float,
) -> None:
    weight, x = torch.randn(shape).to(dtype), torch.randn(rows, shape[1]).to(dtype)
    linear = Int8Linear(weight, maybe_native)
    result = linear(x)
    assert result.shape == (rows, shape[0]) and result.dtype == dtype
    expected = exact(weight, quantise_rows(x))
    assert torch.allclose(result.double(), expected, rtol=tolerance, atol=1e-5)
    # A step of a byte is 1/127 of the peak; errors of many features average out.
    whole = x.double() @ weight.double().T
    assert float((result.double() - whole).norm()) <= 0.02 * float(whole.norm())


@pytest.mark.parametrize("isa", INSTRUCTION_SETS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_instruction_set_gives_the_bits_of_the_reference(
    native: NativeKernels, isa: str, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    if isa not in native.available:
        pytest.skip(f"this processor has no {isa}")
    weight = torch.randn(shape).to(dtype)
    linear, reference = Int8Linear(weight, load_native(isa=isa)), Int8Linear(weight)
    for rows in (1, 5, 14):
        x = torch.randn(rows, shape[1]).to(dtype)
        assert torch.equal(linear(x), reference(x))


def test_the_largest_sums_do_not_overflow(maybe_native: NativeKernels | None) -> None:
    """Bytes of the largest size everywhere, of either sign: 16-bit sums on the way would not do."""
    weight = torch.zeros(3, 65536)
    # The rotation of a first feature alone gives every feature the same value.
    weight[0, 0] = 1.0
    weight[1, 0] = -1.0
    x = weight[:2] * 5
    result = Int8Linear(weight, maybe_native)(x)
    expected = torch.tensor([[5.0, -5.0, 0.0], [-5.0, 5.0, 0.0]])
    assert torch.allclose(result, expected, rtol=1e-6)


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_a_row_has_the_same_bits_in_any_company(
    maybe_native: NativeKernels | None, num_threads: int
) -> None:
    linear = Int8Linear(torch.randn(200, 576).bfloat16(), maybe_native)
    x = torch.randn(65, 576).bfloat16()
    together = linear(x)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(num_threads)
        for rows in (1, 2, 5, 6, 7, 12, 33, 64):
            assert torch.equal(linear(x[:rows]), together[:rows])
    finally:
        torch.set_num_threads(threads)


def test_a_row_that_is_not_finite_spoils_only_itself(maybe_native: NativeKernels | None) -> None:
    linear, x = Int8Linear(torch.randn(10, 64), maybe_native), torch.randn(4, 64)
    clean = linear(x)
    x[1, 3] = float("inf")
    dirty = linear(x)
    assert dirty[1].isnan().all()
    assert torch.equal(dirty[[0, 2, 3]], clean[[0, 2, 3]])


def test_more_features_than_sums_can_hold_are_refused() -> None:
    with pytest.raises(ValueError, match="at most 65,536 features"):
        Int8Linear(torch.randn(1, 65537))
