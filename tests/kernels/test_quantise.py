from __future__ import annotations

import pytest
import torch

from kernels.attention import varlen_paged_attention
from kernels.native import INSTRUCTION_SETS, NativeKernels, load_native
from kernels.quantise import (
    ROTATED,
    ZERO_BYTE,
    QuantisedRows,
    empty_rows,
    quantise_rows,
    rotate,
    rotation_gain,
)
from kernels.rms_norm import fused_add_rms_norm, rms_norm
from kernels.silu_mul import silu_mul

DTYPES = [torch.float32, torch.bfloat16]


def hadamard() -> torch.Tensor:
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while matrix.shape[0] < ROTATED:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix


def assert_same(rows: QuantisedRows, others: QuantisedRows) -> None:
    assert torch.equal(rows.values, others.values)
    assert torch.equal(rows.scales.isnan(), others.scales.isnan())
    assert torch.equal(rows.scales.nan_to_num(7.0), others.scales.nan_to_num(7.0))


def test_rotation_is_the_hadamard_matrix_within_blocks_that_do_not_divide() -> None:
    x = torch.randn(3, 5 * ROTATED)
    expected = (x.double().view(3, 5, ROTATED) @ hadamard()).view(3, -1)
    assert torch.allclose(rotate(x).double(), expected, atol=1e-5)


@pytest.mark.parametrize("features", [1, 64, 100, 192, 320, 576, 1536])
def test_rotation_is_orthogonal_but_for_its_gain(features: int) -> None:
    matrix = rotate(torch.eye(features)).double()
    expected = rotation_gain(features) * torch.eye(features, dtype=torch.float64)
    assert torch.equal(matrix @ matrix.T, expected)


@pytest.mark.parametrize("features", [192, 576, 1024, 1536])
def test_one_large_feature_is_spread_over_the_row(features: int) -> None:
    """By Hadamard alone evenly; each factor of three leaves at most two thirds of it."""
    x = torch.zeros(1, features)
    x[0, 77] = 1.0
    rotated = rotate(x).abs() / rotation_gain(features) ** 0.5
    assert (rotated > 0).all() and float(rotated.max()) <= 1.4 * features**-0.5 * 3**0.5


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows, features", [(0, 64), (1, 64), (5, 576), (300, 192), (4, 100)])
def test_bytes_are_within_half_a_step(
    maybe_native: NativeKernels | None, rows: int, features: int, dtype: torch.dtype
) -> None:
    x = (torch.randn(rows, features) * torch.randn(rows, 1).exp()).to(dtype)
    values, scales = quantise_rows(x, maybe_native)
    restored = (values.float() - ZERO_BYTE) * scales[:, None]
    assert ((restored - rotate(x)).abs() <= scales[:, None] * 0.5001).all()
    if features and rows:
        assert int((values.int() - ZERO_BYTE).abs().max()) == 127


@pytest.mark.parametrize("isa", INSTRUCTION_SETS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("features", [320, 576, 1000])
def test_every_instruction_set_gives_the_bits_of_the_reference(
    native: NativeKernels, isa: str, dtype: torch.dtype, features: int
) -> None:
    if isa not in native.available:
        pytest.skip(f"this processor has no {isa}")
    x = (torch.randn(40, features) * 3).to(dtype)
    x[3] = 0
    x[4] = 1e-36
    x[5, 7] = float("nan")
    x[6, 300] = float("-inf")
    x[7, 0] = 1e4
    wide = torch.cat((x, x), dim=1)[:, :features]
    rows = quantise_rows(wide, load_native(isa=isa))
    assert_same(rows, quantise_rows(x))
    assert rows.scales[3] == rows.scales[4] == 0 and (rows.values[3:5] == ZERO_BYTE).all()
    assert rows.scales[5].isnan() and rows.scales[6].isnan() and rows.scales[7] > 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_producers_quantise_what_they_return(
    maybe_native: NativeKernels | None, dtype: torch.dtype
) -> None:
    x, residual = torch.randn(2, 9, 128).to(dtype).unbind(0)
    weight = torch.randn(128).to(dtype)
    into = empty_rows(9, 128)
    assert_same(into, quantise_rows(rms_norm(x, weight, 1e-5, maybe_native, into)))
    y, _ = fused_add_rms_norm(x, residual, weight, 1e-5, maybe_native, into)
    assert_same(into, quantise_rows(y))
    assert_same(into, quantise_rows(silu_mul(torch.cat((x, residual), 1), maybe_native, into)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_quantises_rows_over_all_heads(
    maybe_native: NativeKernels | None, dtype: torch.dtype
) -> None:
    q, caches = torch.randn(6, 4, 32).to(dtype), torch.randn(2, 5, 16, 2, 32).to(dtype)
    into = empty_rows(6, 128)
    out = varlen_paged_attention(
        q,
        *caches.unbind(0),
        torch.tensor([0, 1, 6], dtype=torch.int32),
        torch.tensor([30, 9], dtype=torch.int32),
        torch.tensor([[3, 1], [2, 0]], dtype=torch.int32),
        max_seqlen_q=5,
        max_seqlen_k=30,
        scale=0.2,
        native=maybe_native,
        into=into,
    )
    assert_same(into, quantise_rows(out.view(6, 128)))
