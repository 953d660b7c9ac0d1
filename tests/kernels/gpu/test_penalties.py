from __future__ import annotations

import torch

from kernels.gpu.penalties import ENTRIES, apply_penalties_triton
from kernels.penalties import apply_penalties
from tests.kernels.test_penalties import FACTORS, TOKENS, entries


def test_it_is_the_reference_with_strided_rows_and_more_entries_than_a_tile() -> None:
    wide = torch.randn(4, ENTRIES + 40)
    many = [(2, token, token % 3) for token in range(3, ENTRIES + 20)]
    for tokens in (TOKENS, TOKENS + many):
        logits, expected = wide[:, :-8].clone(), wide[:, :-8].clone()
        strided = torch.cat((logits, torch.full((4, 8), 7.0)), dim=1)
        apply_penalties(expected, *entries(tokens), FACTORS)
        apply_penalties_triton(strided[:, :-8], *entries(tokens), FACTORS)
        assert torch.allclose(strided[:, :-8], expected)
        assert bool((strided[:, -8:] == 7.0).all())


def test_no_entries() -> None:
    none = torch.zeros(0, dtype=torch.int64)
    logits = torch.arange(4.0)[None]
    apply_penalties_triton(logits, none, none, none.int(), FACTORS[:1])
    assert logits.tolist() == [[0.0, 1.0, 2.0, 3.0]]
