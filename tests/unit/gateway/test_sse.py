"""A connection that takes nothing any more ends its stream; the generator of events is closed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

import services.gateway.sse
from services.gateway.disconnect import OpenWork
from services.gateway.sse import EventStream

SCOPE: dict[str, Any] = {"type": "http"}


class Events:
    """`count` events; `closed` once the generator has ended, for whatever reason."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.closed = False

    async def stream(self) -> AsyncGenerator[bytes, None]:
        try:
            for number in range(self.count):
                yield b"%d" % number
        finally:
            self.closed = True


async def _never() -> dict[str, Any]:
    await asyncio.Event().wait()
    return {}


async def test_a_reader_that_takes_nothing_ends_the_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(services.gateway.sse, "SLOW_READER_S", 0.02)
    events, sent, slow = Events(10), [], []

    async def send(message: Any) -> None:
        sent.append(message)
        if len(sent) > 4:
            await asyncio.Event().wait()

    def on_slow() -> None:
        slow.append(events.closed)

    await EventStream(b"first", events.stream(), on_slow, OpenWork())(SCOPE, _never, send)
    assert slow == [False], "it is told before the generations are cancelled"
    assert events.closed and len(sent) == 5


async def test_a_reader_that_keeps_up_gets_everything() -> None:
    events, bodies, slow = Events(3), [], []

    async def send(message: Any) -> None:
        bodies.append(message.get("body"))

    await EventStream(b"first", events.stream(), lambda: slow.append(1), OpenWork())(
        SCOPE, _never, send
    )
    assert bodies == [None, b"first", b"0", b"1", b"2", b""]
    assert events.closed and slow == []
