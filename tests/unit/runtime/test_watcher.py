"""The watcher of a cluster against a real bus that is slow, hung, or new."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import nats
import pytest

from services.contracts import codec
from services.contracts.beats import Beat, ServiceKind
from services.contracts.subjects import Subjects
from services.runtime.nats_server import NatsServer
from services.runtime.watcher import Watcher

pytestmark = [pytest.mark.nats, pytest.mark.slow]

NAMES = Subjects("streetcar.v1")
WAIT_S = 30.0


class _Rig:
    """A bus, a service that beats on it, and who is called hung."""

    def __init__(self, bus: NatsServer) -> None:
        self.bus = bus
        self.hung: list[str] = []
        self.tasks: list[asyncio.Task[None]] = []
        self.bus_hung = asyncio.Event()
        self.watcher = Watcher(
            {(ServiceKind.KV_STORE, "kv-0"): "kv_store"},
            lambda name, _silent_s: self.hung.append(name),
            lambda _silent_s: self.bus_hung.set(),
            lambda _name: 0.0,
        )
        self.watcher.heartbeats.expect("kv_store")

    @property
    def heard_s(self) -> float:
        return self.watcher.heartbeats._heard.get("kv_store", 0.0)

    async def until_heard_anew(self) -> None:
        before_s = self.heard_s
        async with asyncio.timeout(WAIT_S):
            while self.heard_s <= before_s:
                await asyncio.sleep(0.01)


async def _beat(url: str) -> None:
    async def ignore(_error: Exception) -> None:
        """The connection mends itself."""

    connection = await nats.connect(
        url, max_reconnect_attempts=-1, reconnect_time_wait=0.1, error_cb=ignore
    )
    payload = codec.encode(Beat(ServiceKind.KV_STORE, "kv-0"))
    try:
        while True:
            await connection.publish(NAMES.beat("kv_store", "kv-0"), payload)
            await asyncio.sleep(0.05)
    finally:
        await connection.close()


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[_Rig]:
    async with NatsServer(tmp_path) as bus:
        rig = _Rig(bus)
        tasks = [
            asyncio.create_task(_beat(bus.url)),
            asyncio.create_task(rig.watcher.run(bus.url, NAMES)),
        ]
        await rig.until_heard_anew()
        rig.tasks = tasks
        yield rig
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def test_a_slow_bus_does_not_make_the_watcher_deaf(
    rig: _Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A ping that comes back late must be no error (nats-py stops reading at one)."""
    given_up = asyncio.Event()

    async def answers() -> bool:
        came = await original()
        if not came:
            given_up.set()
        return came

    original = rig.watcher._bus_answers
    monkeypatch.setattr(rig.watcher, "_bus_answers", answers)
    os.kill(rig.bus.pid, signal.SIGSTOP)
    async with asyncio.timeout(WAIT_S):
        await given_up.wait()
    os.kill(rig.bus.pid, signal.SIGCONT)
    await rig.until_heard_anew()
    await rig.until_heard_anew()
    assert not rig.hung


async def test_a_hung_bus_is_named_and_its_services_are_not(rig: _Rig) -> None:
    """Also after it was slow, and also the next one on its port."""
    for _ in range(2):
        os.kill(rig.bus.pid, signal.SIGSTOP)
        async with asyncio.timeout(WAIT_S):
            await rig.bus_hung.wait()
        rig.bus_hung.clear()
        rig.bus.kill()
        await rig.bus.wait()
        await rig.bus.start()
        await rig.until_heard_anew()
    assert not rig.hung


async def test_a_new_bus_does_not_end_the_watching(rig: _Rig) -> None:
    """A ping was under way when the old one went."""
    for _ in range(3):
        os.kill(rig.bus.pid, signal.SIGSTOP)
        ping = rig.watcher._ping
        async with asyncio.timeout(WAIT_S):
            while rig.watcher._ping is ping or rig.watcher._ping is None:
                await asyncio.sleep(0.005)
        rig.bus.kill()
        await rig.bus.wait()
        await rig.bus.start()
        await rig.until_heard_anew()
    assert await rig.watcher._bus_answers()
    assert not any(task.done() for task in rig.tasks)


async def test_a_service_that_falls_silent_is_named(
    rig: _Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rig.watcher.heartbeats, "_silent_s", 0.5)
    monkeypatch.setattr(rig.watcher, "_names", {})
    async with asyncio.timeout(WAIT_S):
        while not rig.hung:
            await asyncio.sleep(0.01)
    assert rig.hung == ["kv_store"]
    assert not rig.bus_hung.is_set()
