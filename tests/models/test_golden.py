"""The embedded model against the reference's greedy tokens: chunked, batched, through the pool."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpu_worker.check import perplexity, teacher_forced_logprobs
from gpu_worker.runner import ModelRunner
from tests.models.driver import Driver, Lane

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(150)]

NUM_SLOTS = 8192
LOGPROB_TOLERANCE = 1e-3
"""The reference's numbers are rounded to 5 digits, and its sums run in another order."""

BFLOAT16_PERPLEXITY_TOLERANCE = 0.01
INT8_PERPLEXITY_TOLERANCE = 0.03
"""400 tokens are few; over 4,096 it is below 0.01 (``kernels/NOTES.md``)."""


def load(model_path: Path, dtype: str, block_size: int, quantization: str = "none") -> ModelRunner:
    return ModelRunner(
        model_path,
        dtype,
        num_blocks=NUM_SLOTS // block_size,
        block_size=block_size,
        max_model_len=2048,
        progress=lambda fraction, text: None,
        num_threads=2,
        quantization=quantization,
    )


@pytest.fixture(scope="module", params=[16, 32])
def float32_runner(request: pytest.FixtureRequest, model_path: Path) -> Iterator[ModelRunner]:
    yield load(model_path, "float32", request.param)


@pytest.fixture(scope="module")
def bfloat16_runner(model_path: Path) -> Iterator[ModelRunner]:
    yield load(model_path, "bfloat16", 16)


@pytest.mark.parametrize("budget", [48, 2048])
def test_greedy_tokens_equal_the_reference(
    float32_runner: ModelRunner, golden_cases: list[dict[str, Any]], budget: int
) -> None:
    """All cases at once; every other combination runs fewer tokens, to keep the time down."""
    whole = (budget == 48) == (float32_runner.block_size == 32)
    num_tokens = 64 if whole else 12
    lanes = [
        Lane(list(case["prompt_token_ids"]), num_tokens, num_logprobs=0) for case in golden_cases
    ]
    Driver(float32_runner, budget).run(lanes)
    for case, lane in zip(golden_cases, lanes, strict=True):
        assert lane.generated == case["greedy_token_ids"][:num_tokens], case["name"]
        for entry, expected in zip(lane.logprobs, case["logprobs"], strict=False):
            assert entry is not None
            assert entry.chosen_logprob == pytest.approx(expected, abs=LOGPROB_TOLERANCE)


def test_a_sequence_is_the_same_alone_and_in_company(
    float32_runner: ModelRunner, golden_cases: list[dict[str, Any]]
) -> None:
    """Seeded sampling, with the same chunks: equal to the last bit, not only in its tokens."""
    prompts = [case["prompt_token_ids"] for case in golden_cases[:6]]

    def run(chosen: list[int]) -> list[Lane]:
        lanes = [
            Lane(list(prompts[index]), 8, temperature=1.0, seed=index, num_logprobs=2)
            for index in chosen
        ]
        Driver(float32_runner, 512).run(lanes)
        return lanes

    together = run([0, 1, 2, 3, 4, 5])
    for index in (0, 4):
        alone = run([index])[0]
        assert alone.generated == together[index].generated
        for ours, theirs in zip(alone.logprobs, together[index].logprobs, strict=True):
            assert ours is not None and theirs is not None
            assert ours.chosen_logprob == theirs.chosen_logprob
            assert ours.values.tolist() == theirs.values.tolist()


def test_teacher_forcing_agrees_with_the_reference(
    bfloat16_runner: ModelRunner, golden_path: Path, golden_cases: list[dict[str, Any]]
) -> None:
    result = teacher_forced_logprobs(bfloat16_runner, golden_path)
    assert result["num_tokens"] == 64 * len(golden_cases)
    assert result["mean_logprob"] == pytest.approx(result["reference_mean_logprob"], rel=0.02)


def test_perplexity_of_bfloat16_stays_near_float32(
    bfloat16_runner: ModelRunner,
    float32_runner: ModelRunner,
    golden_cases: list[dict[str, Any]],
) -> None:
    text = max((case["prompt_token_ids"] for case in golden_cases), key=len)
    exact = perplexity(float32_runner, text, 400)
    assert perplexity(float32_runner, text, 400, chunk_tokens=37) == pytest.approx(exact, rel=1e-4)
    rounded = perplexity(bfloat16_runner, text, 400)
    assert rounded == pytest.approx(exact, rel=BFLOAT16_PERPLEXITY_TOLERANCE)


def test_perplexity_of_int8_stays_near_float32(
    model_path: Path, float32_runner: ModelRunner, golden_cases: list[dict[str, Any]]
) -> None:
    int8_runner = load(model_path, "bfloat16", 16, "int8")
    text = max((case["prompt_token_ids"] for case in golden_cases), key=len)
    exact = perplexity(float32_runner, text, 400)
    rounded = perplexity(int8_runner, text, 400)
    assert rounded == pytest.approx(exact, rel=INT8_PERPLEXITY_TOLERANCE)
    # Exact sums: how a text is cut into chunks changes what attention rounds, and nothing else.
    assert perplexity(int8_runner, text, 400, chunk_tokens=37) == rounded
