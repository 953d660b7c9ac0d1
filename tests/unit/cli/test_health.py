"""`streetcar health` against a real bus."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import nats
import pytest

from services.cli import health
from services.contracts.subjects import Subjects
from services.runtime.nats_server import NatsServer
from services.runtime.problem import Problem

pytestmark = pytest.mark.nats
PREFIX = "streetcar.v1"


async def _beat_for_ever(url: str, kind: str) -> None:
    client = await nats.connect(url)
    try:
        while True:
            await client.publish(Subjects(PREFIX).beat(kind, "x-0"), b"")
            await asyncio.sleep(0.02)
    finally:
        await client.close()


async def test_a_heartbeat_of_that_kind_is_health(tmp_path: Path) -> None:
    async with NatsServer(tmp_path) as server:
        beating = asyncio.create_task(_beat_for_ever(server.url, "scheduler"))
        assert await health._wait_for_beat(server.url, PREFIX, "scheduler") >= 0
        beating.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await beating


async def test_silence_and_other_kinds_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "BEAT_TIMEOUT_S", 0.3)
    async with NatsServer(tmp_path) as server:
        beating = asyncio.create_task(_beat_for_ever(server.url, "scheduler"))
        with pytest.raises(Problem, match="no heartbeat of a gateway"):
            await health._wait_for_beat(server.url, PREFIX, "gateway")
        beating.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await beating


async def test_no_bus_and_no_such_kind_are_told() -> None:
    with pytest.raises(Problem, match="cannot be reached"):
        await health._wait_for_beat("nats://127.0.0.1:1", PREFIX, "gateway")
    with pytest.raises(Problem, match="No such kind"):
        await health._wait_for_beat("nats://127.0.0.1:1", PREFIX, "kvstore")
