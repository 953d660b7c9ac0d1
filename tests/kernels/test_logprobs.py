from __future__ import annotations

import torch

from kernels.logprobs import token_logprobs


def test_logprobs_are_of_the_unscaled_distribution() -> None:
    logits = torch.randn(3, 50)
    targets = torch.tensor([4, 0, 49])
    chosen, ids, values = token_logprobs(logits, targets, 5)
    expected = torch.log_softmax(logits.double(), -1)
    assert torch.allclose(chosen.double(), expected[range(3), targets], atol=1e-6)
    best = expected.topk(5)
    assert torch.equal(ids, best.indices)
    assert torch.allclose(values.double(), best.values, atol=1e-6)
    assert token_logprobs(logits, targets, 0)[1].shape == (3, 0)


def test_of_equals_the_lower_ids_come_first_in_every_dtype() -> None:
    logits = torch.tensor([[1.0, 3.0, -0.0, 3.0, 0.0]]).bfloat16()
    _, ids, values = token_logprobs(logits, torch.tensor([0]), 9)
    assert ids.tolist() == [[1, 3, 0, 2, 4]]
    assert values.dtype == torch.float32
