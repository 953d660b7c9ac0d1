"""`streetcar bench scheduler`: the figures are there and hang together; no bar on time."""

from __future__ import annotations

import json

import pytest

from services.cli.bench import scheduler
from services.simulator.steady import measure


def test_the_scheduler_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert scheduler(8, 50, json=True) == 0
    figures = json.loads(capsys.readouterr().out)
    assert (figures["lanes"], figures["steps"]) == (8, 50)
    assert 0 < figures["p50_us"] <= figures["p99_us"]


@pytest.mark.parametrize("lanes", [1, 64])
def test_a_steady_plan_is_small_whatever_the_batch(lanes: int) -> None:
    """Plans of at most 64 bytes and 8 for each appended block."""
    assert measure(lanes, 40).plan_bytes_beyond_appends <= 64
