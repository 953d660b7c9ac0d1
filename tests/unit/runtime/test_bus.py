"""The bus of services: two members of a queue group, one of which leaves; a server that is away."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import nats.errors
import pytest

from services.runtime.bus import Delivery, Endpoint, NatsBus, RequestTimeout
from services.runtime.nats_server import NatsServer

pytestmark = pytest.mark.nats
GROUP = "group"


class Member:
    """heard: what it was given, of a service's endpoint and of a plain subscription."""

    def __init__(self, name: str) -> None:
        self.bus = NatsBus(name)
        self.heard: list[str] = []
        self.everything: list[str] = []

    async def join(self, url: str) -> None:
        await self.bus.connect(url)
        endpoint = Endpoint("ask", "ask.*", self._hear, queue=GROUP)
        await self.bus.serve("member", "", [endpoint])
        await self.bus.subscribe("tell.*", self._hear, queue=GROUP)
        await self.bus.subscribe("*.*", lambda d: self.everything.append(d.subject))
        await self.bus.flush()

    def _hear(self, delivery: Delivery) -> None:
        self.heard.append(delivery.subject)


async def test_who_leaves_a_group_handles_what_was_delivered_and_gets_no_more(
    tmp_path: Path,
) -> None:
    first, second = Member("first"), Member("second")
    async with NatsServer(tmp_path) as server, asyncio.timeout(20):
        await first.join(server.url)
        await second.join(server.url)
        sent = [f"{word}.{n}" for n in range(50) for word in ("ask", "tell")]
        for subject in sent:
            await second.bus.publish(subject, b"")
        await second.bus.flush()
        await first.bus.leave(GROUP)
        before = len(first.heard)
        assert before
        later = [f"{word}.{n}" for n in range(50, 70) for word in ("ask", "tell")]
        for subject in later:
            await second.bus.publish(subject, b"")
        while len(first.heard) + len(second.heard) < len(sent + later):
            await asyncio.sleep(0.01)
        assert len(first.heard) == before
        assert sorted(first.heard + second.heard) == sorted(sent + later), "each once"
        while len(first.everything) < len(sent + later):
            await asyncio.sleep(0.01)
        await first.bus.close()
        await second.bus.close()


@pytest.mark.parametrize(
    "error",
    [
        nats.errors.OutboundBufferLimitError(),
        nats.errors.ConnectionClosedError(),
        RuntimeError("unable to perform operation on <TCPTransport closed=True>"),
    ],
)
async def test_a_connection_that_has_closed_drops_what_is_sent(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last is uvloop's word for one that nats-py does not know to be closed yet."""

    async def refuse(*_arguments: Any, **_more: Any) -> None:
        raise error

    async with NatsServer(tmp_path) as server:
        bus = NatsBus("test")
        await bus.connect(server.url)
        try:
            monkeypatch.setattr(bus.client, "publish", refuse)
            monkeypatch.setattr(bus.client, "request", refuse)
            assert not await bus.publish("a", b"x")
            with pytest.raises(RequestTimeout, match="away"):
                await bus.request("a", b"x", timeout_s=1.0)
            assert bus.dropped == {"publish_disconnected": 1, "request_disconnected": 1}
        finally:
            await bus.close()
