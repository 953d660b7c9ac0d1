"""A gateway that is replaced, or stopped: what is open goes on, what is new is not begun."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from services.gateway import connection, server
from tests.unit.gateway.http_server import (
    BODY,
    WAIT_S,
    Running,
    ScriptedClient,
    http_server,
    post,
    read_answer,
)


async def _events(response: httpx.Response) -> AsyncIterator[Any]:
    async for line in response.aiter_lines():
        if line and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data: "))


async def _until_refused(running: Running) -> None:
    """Nobody accepts any more."""
    async with asyncio.timeout(WAIT_S):
        while True:
            try:
                _, writer = await running.connect()
            except OSError:
                return
            writer.close()
            await asyncio.sleep(0.01)


async def test_open_streams_go_on_and_nothing_new_is_accepted() -> None:
    client = ScriptedClient()
    async with http_server(client) as running, httpx.AsyncClient(base_url=running.url) as http:
        stream = http.stream("POST", "/v1/completions", json={**BODY, "stream": True})
        whole = asyncio.create_task(http.post("/v1/completions", json=BODY))
        async with stream as response:
            events = _events(response)
            assert (await anext(events))["choices"][0]["text"] == "a "
            await client.asked.acquire()
            await client.asked.acquire()
            running.server.leave()
            await _until_refused(running)
            assert not running.task.done()
            client.go.set()
            rest = [event["choices"][0] async for event in events]
            assert [choice["text"] for choice in rest] == ["b "]
        answer = await whole
        assert answer.json()["choices"][0]["text"] == "a b "
        assert answer.headers["connection"] == "close"
        await running.until_gone()
    assert client.cancelled.locked(), "nothing was ended early"


async def test_a_request_that_was_on_its_way_is_answered() -> None:
    """On a connection that was used before, and on one that was not; then both are closed."""
    client = ScriptedClient()
    client.go.set()
    async with http_server(client) as running:
        used, fresh = await running.connect(), await running.connect()
        used[1].write(post())
        head, _ = await read_answer(used[0])
        assert b"connection: close" not in head
        running.server.leave()
        await _until_refused(running)
        for reader, writer in (used, fresh):
            writer.write(post())
            head, body = await read_answer(reader)
            assert body["choices"][0]["text"] == "a b "
            assert b"connection: close" in head
            assert await reader.read() == b""
            writer.close()
        await running.until_gone()


async def test_idle_connections_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "IDLE_GRACE_S", 0.02)
    async with http_server(ScriptedClient()) as running:
        reader, writer = await running.connect()
        writer.write(b"GET /livez HTTP/1.1\r\nhost: localhost\r\n\r\n")
        await read_answer(reader)
        running.server.leave()
        async with asyncio.timeout(WAIT_S):
            assert await reader.read() == b""
        writer.close()
        await running.until_gone()


@pytest.mark.parametrize("for_good", [False, True])
async def test_what_is_open_at_the_limit_is_told(
    monkeypatch: pytest.MonkeyPatch, for_good: bool
) -> None:
    monkeypatch.setattr(server, "END_S", 0.1)
    client = ScriptedClient()
    async with (
        http_server(client, drain_s=60.0 if for_good else 0.1) as running,
        httpx.AsyncClient(base_url=running.url) as http,
    ):
        whole = asyncio.create_task(http.post("/v1/completions", json=BODY))
        stream = http.stream("POST", "/v1/completions", json={**BODY, "stream": True})
        async with stream as response:
            events = _events(response)
            await anext(events)
            await client.asked.acquire()
            await client.asked.acquire()
            if for_good:
                running.server.leave()
                running.server.end()
            else:
                running.server.leave()
            (event,) = [event async for event in events]
        assert event["error"]["code"] == "draining"
        assert "0.1 s" in event["error"]["message"]
        answer = await whole
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "draining")
        await running.until_gone()
        await client.cancelled.acquire()
        await client.cancelled.acquire()
