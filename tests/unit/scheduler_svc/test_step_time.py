"""The step-time model and the lead."""

from __future__ import annotations

import pytest

from scheduler_svc.step_time import (
    FIRST_LEAD_NS,
    MAX_LEAD_NS,
    MIN_LEAD_NS,
    Lead,
    StepTimeModel,
)

MS = 1_000_000
STEPS = [(1, 0), (8, 400), (64, 3000), (256, 100), (32, 9000)]


def _time(tokens: int, kv: int, *, scale: int = 1) -> int:
    return scale * (2 * MS + tokens * 10_000 + kv * 500)


def _trained(scale: int = 1) -> StepTimeModel:
    model = StepTimeModel()
    for tokens, kv in STEPS * 60:
        model.observe(tokens, kv, _time(tokens, kv, scale=scale))
    return model


def test_nothing_is_predicted_before_the_first_step() -> None:
    assert StepTimeModel().predict_ns(100, 100) == 0


def test_one_step_predicts_itself() -> None:
    model = StepTimeModel()
    model.observe(10, 100, 5 * MS)
    assert model.predict_ns(10, 100) == pytest.approx(5 * MS, rel=0.01)
    assert model.longest_seen == 10


def test_the_plane_is_found() -> None:
    model = _trained()
    for tokens, kv in [(1, 0), (512, 0), (1, 20_000), (128, 5000)]:
        assert model.predict_ns(tokens, kv) == pytest.approx(_time(tokens, kv), rel=0.02)


def test_it_follows_a_machine_that_gets_slower() -> None:
    model = _trained()
    for tokens, kv in STEPS * 80:
        model.observe(tokens, kv, _time(tokens, kv, scale=2))
    assert model.predict_ns(512, 1000) == pytest.approx(_time(512, 1000, scale=2), rel=0.03)


def test_steps_of_one_size_predict_that_size_and_stay_finite() -> None:
    model = StepTimeModel()
    for _ in range(10_000):
        model.observe(16, 1000, 3 * MS)
    assert model.predict_ns(16, 1000) == pytest.approx(3 * MS, rel=0.01)


def test_more_work_never_predicts_less() -> None:
    model = StepTimeModel()
    for _ in range(50):
        model.observe(1, 5000, 9 * MS)
        model.observe(100, 10, 1 * MS)
    assert model.predict_ns(1000, 0) >= model.predict_ns(1, 0) >= 0
    assert model.predict_ns(1, 50_000) >= model.predict_ns(1, 0)


def test_the_lead_rises_fast_and_falls_slowly_between_its_bounds() -> None:
    lead = Lead()
    assert lead.ns == FIRST_LEAD_NS
    lead.observe(0)
    assert lead.ns > 1.2 * FIRST_LEAD_NS
    risen = lead.ns
    lead.observe(5 * MS)
    assert 0.99 * risen < lead.ns < risen
    for _ in range(100):
        lead.observe(0)
    assert lead.ns == MAX_LEAD_NS
    for _ in range(5000):
        lead.observe(5 * MS)
    assert lead.ns == MIN_LEAD_NS
