from __future__ import annotations

import numpy as np
import pytest
import torch

from kernels.sampling import NUM_CANDIDATES, sample_tokens
from kernels.uniform import uniform


def draw(
    logits: torch.Tensor,
    temperature: float,
    top_k: int,
    top_p: float,
    uniforms: list[float] | torch.Tensor,
) -> list[int]:
    """One row of logits, drawn once for each uniform number."""
    numbers = torch.as_tensor(uniforms, dtype=torch.float32)
    rows = numbers.shape[0]
    return sample_tokens(
        logits.expand(rows, -1),
        torch.full((rows,), temperature),
        torch.full((rows,), top_k, dtype=torch.int32),
        torch.full((rows,), top_p),
        numbers,
    ).tolist()


GRID = torch.linspace(0.0005, 0.9995, 1000)


@pytest.mark.parametrize("temperature", [0.0, 1e-12, 1e-6, 1e-5, 1e-4, 1e-3])
@pytest.mark.parametrize("top_k, top_p", [(0, 1.0), (2, 1.0), (0, 0.9)])
def test_case_20_tiny_temperatures_are_greedy(temperature: float, top_k: int, top_p: float) -> None:
    logits = torch.tensor([2.0, 9.0, 1.0])
    assert set(draw(logits, temperature, top_k, top_p, GRID)) == {1}


def test_greedy_takes_the_lowest_of_equals() -> None:
    assert draw(torch.tensor([1.0, 5.0, 5.0]), 0.0, 0, 1.0, [0.5]) == [1]


@pytest.mark.parametrize("top_k", [-1, 0, 128, 9999999])
def test_case_21_a_mixed_batch_and_every_way_to_turn_top_k_off(top_k: int) -> None:
    logits = torch.arange(256, dtype=torch.float32).reshape(2, 128)
    uniforms = torch.tensor([0.5, 0.3])
    tokens = sample_tokens(
        logits,
        torch.tensor([0.0, 1.0]),
        torch.tensor([0, top_k], dtype=torch.int32),
        torch.tensor([1.0, 1.0]),
        uniforms,
    )
    assert tokens[0] == 127
    assert draw(logits[1], 1.0, 0, 1.0, GRID) == draw(logits[1], 1.0, top_k, 1.0, GRID)


def test_case_21_top_k_with_top_p() -> None:
    logits = torch.arange(128, dtype=torch.float32)
    # The three largest hold 1 - e^-3 = 0.9502 of the mass.
    assert set(draw(logits, 1.0, 64, 0.95, GRID)) == {125, 126, 127}


@pytest.mark.parametrize("top_k, top_p, kept", [(0, 1.0, 4), (3, 1.0, 3), (0, 0.6, 2)])
def test_min_p_leaves_out_what_is_far_from_the_likeliest(
    top_k: int, top_p: float, kept: int
) -> None:
    logits = torch.tensor([0.5, 0.3, 0.1, 0.06, 0.04]).log()
    rows = len(GRID)
    tokens = sample_tokens(
        logits.expand(rows, -1),
        torch.ones(rows),
        torch.full((rows,), top_k),
        torch.full((rows,), top_p),
        GRID,
        # 0.05 of all is left out, 0.06 is not.
        torch.full((rows,), 0.11),
    )
    assert sorted(set(tokens.tolist())) == list(range(kept))


def test_min_p_of_many_tokens_looks_past_the_candidates() -> None:
    flat = torch.zeros(2, 2 * NUM_CANDIDATES)
    ones = torch.ones(2)
    none = torch.zeros(2, dtype=torch.int32)
    ends = torch.tensor([0.0001, 0.9999])
    tokens = sample_tokens(flat, ones, none, ones, ends, ones)
    assert tokens.tolist() == [0, 2 * NUM_CANDIDATES - 1]


@pytest.mark.parametrize("top_k, top_p", [(0, 1.0), (5, 1.0), (0, 0.8), (5, 0.8)])
def test_frequencies_follow_the_distribution(top_k: int, top_p: float) -> None:
    logits = torch.tensor([1.0, 3.0, 2.0, 0.0, 2.5, -1.0, 0.5, 1.5])
    temperature = 0.7
    probabilities = torch.softmax(logits.double() / temperature, 0)
    order = probabilities.argsort(descending=True)
    kept = order[: top_k or 8]
    mass = probabilities[kept].cumsum(0)
    kept = kept[: int((mass < top_p * mass[-1]).sum()) + 1]
    expected = torch.zeros(8, dtype=torch.float64)
    expected[kept] = probabilities[kept] / probabilities[kept].sum()
    tokens = torch.tensor(draw(logits, temperature, top_k, top_p, GRID))
    observed = torch.bincount(tokens, minlength=8).double() / len(GRID)
    assert torch.allclose(observed, expected, atol=2e-3)


@pytest.mark.parametrize("top_k, top_p", [(0, 0.5), (0, 0.999), (300, 1.0), (999, 0.9)])
def test_full_sort_when_the_candidates_do_not_suffice(top_k: int, top_p: float) -> None:
    vocab_size = 4 * NUM_CANDIDATES
    logits = torch.zeros(vocab_size)
    tokens = draw(logits, 1.0, top_k, top_p, GRID)
    kept = (top_k or vocab_size) * top_p
    assert max(tokens) < kept
    assert len(set(tokens)) > 0.6 * min(kept, len(GRID))


@pytest.mark.parametrize("count", [1, 4])
def test_equal_logits_are_kept_by_lower_id(count: int) -> None:
    logits = torch.tensor([0.0, -0.0, 7.0, 7.0, 7.0, 7.0, 7.0, -3.0])
    assert set(draw(logits, 1.0, count, 1.0, GRID)) == set(range(2, 2 + count))


@pytest.mark.parametrize("uniform", [1e-7, 1 - 2**-24])
@pytest.mark.parametrize("top_k, top_p", [(0, 1.0), (3, 1.0), (0, 0.9), (3000, 0.9)])
def test_ids_stay_valid_at_the_ends(uniform: float, top_k: int, top_p: float) -> None:
    logits = torch.randn(5000, generator=torch.Generator().manual_seed(1)) * 4
    token = draw(logits, 1.3, top_k, top_p, [uniform])[0]
    assert 0 <= token < 5000
    if top_k == 3:
        assert token in logits.topk(3).indices.tolist()


def test_a_row_is_the_same_alone_and_in_company() -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(12, 2000, generator=generator) * 2
    temperature = torch.tensor([0.0, 0.7, 1.0] * 4)
    top_k = torch.tensor([0, 40, 0, 700] * 3, dtype=torch.int32)
    top_p = torch.tensor([1.0, 0.9, 1.0, 0.5, 0.99, 1.0] * 2)
    uniforms = torch.rand(12, generator=generator)
    together = sample_tokens(logits, temperature, top_k, top_p, uniforms)
    for row in range(12):
        part = slice(row, row + 1)
        alone = sample_tokens(
            logits[part], temperature[part], top_k[part], top_p[part], uniforms[part]
        )
        assert alone.tolist() == together[part].tolist()


def test_case_22_a_seeded_row_does_not_see_its_neighbours() -> None:
    """A seeded request's draws, alone and beside three that have other seeds or none."""
    logits = torch.randn(16, 500, generator=torch.Generator().manual_seed(5))
    seed, positions = np.uint64(42), np.arange(16, dtype=np.uint64)
    warm, off, full = torch.full((1,), 0.8), torch.zeros(1, dtype=torch.int32), torch.ones(1)
    alone = []
    for position in positions:
        draw = torch.from_numpy(uniform(np.array([seed]), np.array([position])))
        alone += sample_tokens(logits[int(position), None], warm, off, full, draw).tolist()
    for others in ([1, 2, 3], [7, 42, 2**63], [42, 42, 42], [0, 0, 0]):
        for position in positions:
            seeds = np.array([*others[:2], seed, others[2]], dtype=np.uint64)
            draws = uniform(seeds, np.array([0, 99, position, position], dtype=np.uint64))
            rows = torch.stack([logits[0], logits[1], logits[int(position)], logits[2]])
            tokens = sample_tokens(
                rows, warm.expand(4), off.expand(4), full.expand(4), torch.from_numpy(draws)
            )
            assert tokens[2] == alone[int(position)]
    assert len(set(alone)) > 4, "it is a draw"
