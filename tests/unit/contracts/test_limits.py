"""Ceilings fit each other."""

from __future__ import annotations

from services.contracts import limits
from services.contracts.vectors import MAX_VECTOR_BYTES


def test_the_longest_prompt_fits_a_vector_and_a_payload() -> None:
    assert 4 * limits.MAX_PROMPT_TOKENS <= MAX_VECTOR_BYTES
    assert MAX_VECTOR_BYTES + limits.PAYLOAD_MARGIN_BYTES < limits.MAX_PAYLOAD_BYTES


def test_a_lane_vector_names_every_lane() -> None:
    assert 4 * limits.MAX_LANES <= MAX_VECTOR_BYTES


def test_kept_plans_cover_what_is_in_flight() -> None:
    assert limits.KEPT_PLANS > limits.MAX_STEPS_IN_FLIGHT == 2
