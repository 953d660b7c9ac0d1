"""The sorting-free draw against the sorted reference, which works in float64."""

from __future__ import annotations

import pytest
import torch

from kernels.gpu.sampling import sample_tokens_triton
from kernels.sampling import MIN_TEMPERATURE, sample_tokens

GRID = torch.tensor([0.001, 0.21, 0.5, 0.83, 0.999])


def both(
    logits: torch.Tensor,
    temperature: float,
    top_k: int,
    top_p: float,
    uniforms: torch.Tensor,
    min_p: float = 0.0,
) -> tuple[list[int], list[int]]:
    rows = uniforms.shape[0]
    arguments = (
        logits.expand(rows, -1),
        torch.full((rows,), temperature),
        torch.full((rows,), top_k, dtype=torch.int32),
        torch.full((rows,), top_p),
        uniforms,
        torch.full((rows,), min_p),
    )
    got = sample_tokens_triton(*arguments, MIN_TEMPERATURE)
    return got.tolist(), sample_tokens(*arguments).tolist()


@pytest.mark.parametrize("temperature", [0.0, 0.7, 3.0])
@pytest.mark.parametrize("top_k, top_p", [(0, 1.0), (5, 1.0), (0, 0.6), (7, 0.5), (1, 1.0)])
def test_it_is_the_reference(temperature: float, top_k: int, top_p: float) -> None:
    logits = torch.randn(50) * 2
    got, expected = both(logits, temperature, top_k, top_p, GRID)
    assert got == expected


@pytest.mark.parametrize("min_p, top_k, top_p", [(0.3, 0, 1.0), (0.05, 3, 0.8)])
def test_min_p_is_the_reference(min_p: float, top_k: int, top_p: float) -> None:
    logits = torch.randn(50) * 2
    got, expected = both(logits, 0.8, top_k, top_p, GRID[1:4], min_p)
    assert got == expected


@pytest.mark.parametrize("top_k, top_p", [(3, 1.0), (0, 0.5), (4, 0.6)])
def test_of_equal_logits_the_lower_ids_are_kept(top_k: int, top_p: float) -> None:
    logits = torch.tensor([0.0, 2.0, 1.0, 2.0, 1.0, -0.0, 1.0])
    got, expected = both(logits, 1.0, top_k, top_p, GRID)
    assert got == expected


def test_more_tokens_than_a_tile_and_strided_rows() -> None:
    logits = (torch.randn(2, 5000) * 3)[:, :4999]
    arguments = (
        logits,
        torch.tensor([0.9, 0.0]),
        torch.tensor([40, 0], dtype=torch.int32),
        torch.tensor([0.95, 1.0]),
        torch.tensor([0.4, 0.4]),
        torch.tensor([0.0, 0.0]),
    )
    got = sample_tokens_triton(*arguments, MIN_TEMPERATURE)
    assert got.tolist() == sample_tokens(*arguments).tolist()


def test_the_ends_of_the_uniform_stay_inside_the_kept_set() -> None:
    logits = torch.tensor([1.0, 5.0, 4.0, -9.0])
    ends = torch.tensor([2.0**-25, 1.0 - 2.0**-24])
    got, expected = both(logits, 1.0, 2, 1.0, ends)
    assert got == expected == [1, 2]


def test_no_rows() -> None:
    none = torch.zeros(0)
    tokens = sample_tokens_triton(
        torch.zeros(0, 8), none, none.int(), none, none, none, MIN_TEMPERATURE
    )
    assert tokens.shape == (0,)
