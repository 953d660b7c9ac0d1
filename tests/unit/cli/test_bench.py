"""`streetcar bench`: the figures are there and hang together, with no bar on time; and it ends."""

from __future__ import annotations

import asyncio
import contextlib
import json

import pytest

from services.cli import bench_mesh
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


async def test_an_answer_that_loses_its_cancel_does_not_hang_the_measurement(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bench_mesh, "END_TIMEOUT_S", 0.1)
    ended = asyncio.Event()

    async def deaf() -> None:
        while not ended.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await ended.wait()

    lane = asyncio.create_task(deaf())
    await asyncio.sleep(0)
    await bench_mesh._end([lane])
    assert not lane.done()
    ended.set()
    await lane
