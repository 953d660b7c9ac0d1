from __future__ import annotations

import pytest
import torch

from kernels.greedy import greedy_tokens
from kernels.native import NativeKernels


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [1, 7, 100, 49152])
def test_the_largest_logit_wins(
    maybe_native: NativeKernels | None, vocab_size: int, dtype: torch.dtype
) -> None:
    logits = torch.randn(9, vocab_size).to(dtype)
    tokens, finite = greedy_tokens(logits, maybe_native)
    for row in range(9):
        assert tokens[row] == int((logits[row] == logits[row].max()).nonzero()[0])
    assert finite.tolist() == [True] * 9


def test_the_lower_of_equal_ids_wins(maybe_native: NativeKernels | None) -> None:
    logits = torch.zeros(3, 200)
    logits[1, [150, 33, 34]] = 1.0
    logits[2] = -5.0
    assert greedy_tokens(logits, maybe_native)[0].tolist() == [0, 33, 0]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("place", [0, 63, 99])
def test_a_sick_row_gives_token_0_and_harms_no_other(
    maybe_native: NativeKernels | None, bad: float, place: int
) -> None:
    logits = torch.randn(3, 100)
    expected = logits.argmax(dim=-1)
    logits[1, place] = bad
    tokens, finite = greedy_tokens(logits, maybe_native)
    assert finite.tolist() == [True, False, True]
    assert tokens.tolist() == [int(expected[0]), 0, int(expected[2])]


def test_no_rows(maybe_native: NativeKernels | None) -> None:
    tokens, finite = greedy_tokens(torch.zeros(0, 10), maybe_native)
    assert tokens.shape == finite.shape == (0,)
