from __future__ import annotations

import math

import pytest
import torch

from kernels.rope import apply_rope, build_rope_table


def rotate(head: list[float], position: int, theta: float, factors: list[float]) -> list[float]:
    """By the definition: element i pairs with element i + half."""
    half = len(head) // 2
    out = list(head)
    for i in range(half):
        angle = position * theta ** (-2 * i / len(head)) / factors[i]
        a, b = head[i], head[i + half]
        out[i] = a * math.cos(angle) - b * math.sin(angle)
        out[i + half] = b * math.cos(angle) + a * math.sin(angle)
    return out


@pytest.mark.parametrize("factors", [None, [1.0, 1.0, 4.0, 8.0]])
def test_case_55_rotation_matches_definition(factors: list[float] | None) -> None:
    positions = torch.tensor([0, 1, 9000])
    x = torch.randn(3, 2, 8)
    table = build_rope_table(8, 9001, 10000.0, factors)
    rotated = apply_rope(x, table[positions])
    for token, position in enumerate(positions.tolist()):
        for head in range(2):
            expected = rotate(x[token, head].tolist(), position, 10000.0, factors or [1.0] * 4)
            assert rotated[token, head].tolist() == pytest.approx(expected, abs=1e-5)
    assert torch.equal(rotated[0], x[0])


def test_partial_rotation_passes_the_rest_through() -> None:
    x = torch.randn(1, 1, 12)
    rotated = apply_rope(x, build_rope_table(8, 4, 10000.0)[3:])
    assert torch.equal(rotated[..., 8:], x[..., 8:])
    assert not torch.equal(rotated[..., :8], x[..., :8])


def test_bfloat16_is_rounded_once() -> None:
    x = torch.randn(5, 3, 64).bfloat16()
    rows = build_rope_table(64, 8192, 1e5)[8000:8005]
    assert torch.equal(apply_rope(x, rows), apply_rope(x.float(), rows).bfloat16())


def test_scores_depend_on_distance_only() -> None:
    q, k = torch.randn(1, 1, 64), torch.randn(1, 1, 64)
    table = build_rope_table(64, 8192, 1e5)

    def score(at: int, behind: int) -> float:
        return float((apply_rope(q, table[at, None]) * apply_rope(k, table[behind, None])).sum())

    assert score(8000, 7990) == pytest.approx(score(10, 0), abs=1e-3)
