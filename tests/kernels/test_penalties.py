from __future__ import annotations

import torch

from kernels.penalties import apply_penalties


def entries(tokens: list[tuple[int, int, int]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of (row, token, count)."""
    rows, ids, counts = torch.tensor(tokens, dtype=torch.int32).T.contiguous()
    return rows, ids, counts


FACTORS = torch.tensor([[2.0, 0.0, 0.0], [1.0, 0.5, 0.25], [1.0, 0.0, 0.0], [0.5, -1.0, 0.0]])
TOKENS = [(0, 1, 0), (0, 3, 5), (1, 0, 0), (1, 1, 1), (1, 2, 4), (2, 2, 9), (3, 4, 1)]


def test_each_row_by_its_own_rule() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0, -4.0, 5.0]]).repeat(4, 1)
    apply_penalties(logits, *entries(TOKENS), FACTORS)
    assert logits.tolist() == [
        # Repetition counts the prompt: what is there is divided, or moved away from zero.
        [1.0, 1.0, 3.0, -8.0, 5.0],
        # Presence and frequency count the output alone.
        [1.0, 1.25, 1.5, -4.0, 5.0],
        [1.0, 2.0, 3.0, -4.0, 5.0],
        # Below 1 and below 0 they favour what is there.
        [1.0, 2.0, 3.0, -4.0, 11.0],
    ]


def test_no_entries_change_nothing() -> None:
    logits = torch.randn(2, 4)
    before = logits.clone()
    none = torch.zeros(0, dtype=torch.int64)
    apply_penalties(logits, none, none, none.int(), FACTORS[:2])
    assert torch.equal(logits, before)
