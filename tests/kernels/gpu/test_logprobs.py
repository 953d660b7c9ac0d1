from __future__ import annotations

import pytest
import torch

from kernels.gpu.logprobs import token_logprobs_triton
from kernels.logprobs import token_logprobs


@pytest.mark.parametrize("num_top", [0, 6, 60])
def test_it_is_the_reference(num_top: int) -> None:
    """Strided rows with ties, and more tokens wanted than there are."""
    logits = (torch.randn(2, 56) * 3).round(decimals=0)[:, :50]
    targets = torch.tensor([49, 3])
    found, expected = (f(logits, targets, num_top) for f in (token_logprobs_triton, token_logprobs))
    assert torch.allclose(found[0], expected[0], atol=1e-5)
    assert torch.equal(found[1], expected[1])
    assert torch.allclose(found[2], expected[2], atol=1e-5)


def test_more_tokens_than_a_tile() -> None:
    logits = torch.randn(1, 5000)
    logits[0, 4999] = logits[0, 17] = 9.0
    found, expected = (
        f(logits, torch.tensor([4998]), 3) for f in (token_logprobs_triton, token_logprobs)
    )
    assert found[1].tolist() == expected[1].tolist() and found[1][0, :2].tolist() == [17, 4999]
    assert torch.allclose(found[0], expected[0], atol=1e-5)


def test_no_rows() -> None:
    none = torch.zeros(0, dtype=torch.int64)
    assert token_logprobs_triton(torch.zeros(0, 8), none, 2)[1].shape == (0, 2)
