"""Step-time models against numbers worked by hand."""

from __future__ import annotations

import dataclasses

import pytest

from services.contracts.step import StepEvent
from services.simulator.capacity.fitting import TooFewSteps, fit
from services.simulator.capacity.step_time import (
    GPUS,
    MODELS,
    LinearStepTime,
    RooflineStepTime,
    StepLoad,
)


def test_linear_terms_add_up() -> None:
    model = LinearStepTime(4.0, token_ms=0.5, prompt_token_ms=0.25, kv_token_ms=0.001)
    load = StepLoad(num_seqs=3, num_decode_tokens=2, num_prefill_tokens=8, num_kv_tokens=1000)
    assert model.ms(load) == pytest.approx(4.0 + 5.0 + 2.0 + 1.0)
    assert model.text == ("t = 4 + 0.5 · tokens + 0.25 · prompt tokens + 0.001 · KV tokens ms")


def test_8b_on_h100_has_its_ridge_near_batch_295() -> None:
    model = RooflineStepTime(GPUS["h100"], MODELS["8b"])
    assert model.ridge_tokens == pytest.approx(295.2, abs=0.1)
    flat = model.ms(StepLoad(1, 1, 0, 0))
    assert flat == pytest.approx(16e9 / 3.35e12 * 1e3)
    assert model.ms(StepLoad(295, 295, 0, 0)) == flat
    assert model.ms(StepLoad(590, 590, 0, 0)) == pytest.approx(2 * 8e9 * 590 / 989e12 * 1e3)


def test_kv_bytes_are_read_on_top() -> None:
    model = RooflineStepTime(GPUS["a100"], MODELS["7b"])
    empty, full = (model.ms(StepLoad(1, 1, 0, kv)) for kv in (0, 10_000))
    assert MODELS["7b"].kv_token_bytes == 128 * 1024
    assert full - empty == pytest.approx(10_000 * 131_072 / 2.039e12 * 1e3)


def test_more_gpus_divide_all_but_the_base() -> None:
    one = RooflineStepTime(GPUS["h200"], MODELS["70b"], base_ms=1.0)
    four = dataclasses.replace(one, num_gpus=4)
    load = StepLoad(64, 64, 0, 64_000)
    assert four.ms(load) - 1.0 == pytest.approx((one.ms(load) - 1.0) / 4)


def test_what_does_not_fit_has_no_room_for_kv() -> None:
    assert RooflineStepTime(GPUS["h100"], MODELS["70b"]).max_kv_tokens < 0
    assert RooflineStepTime(GPUS["h100"], MODELS["70b"], num_gpus=4).max_kv_tokens > 100_000


# ---- fitted


def _event(num_tokens: int, num_blocks: int, elapsed_us: int) -> StepEvent:
    numbers = {field: 0 for field in StepEvent.__struct_fields__ if field != "engine"}
    numbers.update(num_decode_tokens=num_tokens, num_blocks_held=num_blocks, elapsed_us=elapsed_us)
    return StepEvent(engine="engine-0", **numbers)


def test_a_line_is_found_again() -> None:
    steps = [
        _event(tokens, blocks, 4200 + 23 * tokens + 2 * 16 * blocks)
        for tokens in (1, 64, 256, 2048)
        for blocks in (0, 10, 100, 1000, 5000)
    ]
    found = fit(steps, block_size=16)
    assert found.step_time.base_ms == pytest.approx(4.2)
    assert found.step_time.token_ms == pytest.approx(0.023)
    assert found.step_time.kv_token_ms == pytest.approx(0.002)
    assert found.r2 == pytest.approx(1.0)


def test_no_term_is_negative_where_noise_says_so() -> None:
    steps = [_event(n, 1000 - n, 5000 - n) for n in range(1, 200)]
    found = fit(steps, block_size=16)
    assert found.step_time.token_ms >= 0 and found.step_time.kv_token_ms >= 0
    assert found.step_time.base_ms >= 0


def test_steps_that_are_all_alike_give_a_constant() -> None:
    found = fit([_event(8, 5, 3000)] * 30, block_size=16)
    assert found.step_time == LinearStepTime(3.0)
    assert found.r2 == 1.0


def test_too_few_steps_are_refused() -> None:
    with pytest.raises(TooFewSteps, match="19 steps; 20"):
        fit([_event(8, 5, 3000)] * 19, block_size=16)
