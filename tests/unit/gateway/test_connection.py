"""Hostile and vanished clients of one connection: what they are told, and what it costs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from services.gateway import connection
from services.gateway.connection import CHUNK_BYTES, MAX_CHUNKS
from tests.unit.gateway.http_server import (
    WAIT_S,
    Running,
    ScriptedClient,
    http_server,
    post,
    read_answer,
)

HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"


@pytest.fixture
async def client() -> ScriptedClient:
    return ScriptedClient()


@pytest.fixture
async def running(client: ScriptedClient) -> AsyncIterator[Running]:
    async with http_server(client) as server:
        yield server


async def _refused(running: Running, *parts: bytes) -> tuple[int, str]:
    """(status, code) of the answer, after which the connection ends."""
    reader, writer = await running.connect()
    try:
        for part in parts:
            writer.write(part)
            await writer.drain()
        head, body = await read_answer(reader)
        assert b"connection: close" in head
        async with asyncio.timeout(WAIT_S):
            assert await reader.read() == b""
        return int(head.split()[1]), body["error"]["code"]
    finally:
        writer.close()


async def test_a_head_that_does_not_end_times_out(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "HEAD_TIMEOUT_S", 0.05)
    assert await _refused(running, HEAD) == (408, "request_timeout")
    reader, writer = await running.connect()
    async with asyncio.timeout(WAIT_S):
        assert await reader.read() == b"", "who says nothing is told nothing"
    writer.close()


async def test_a_byte_now_and_then_buys_a_head_no_time(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "HEAD_TIMEOUT_S", 0.2)
    reader, writer = await running.connect()

    async def drip() -> None:
        for byte in HEAD * 1000:
            writer.write(bytes([byte]))
            await asyncio.sleep(0.01)

    dripping = asyncio.create_task(drip())
    head, _ = await read_answer(reader)
    assert b" 408 " in head
    dripping.cancel()
    writer.close()


async def test_a_body_that_nobody_wants_holds_no_connection(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "HEAD_TIMEOUT_S", 0.1)
    reader, writer = await running.connect()
    writer.write(b"POST /nothing HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000\r\n\r\n")
    head, _ = await read_answer(reader)
    assert b" 404 " in head
    writer.write(b"x")
    async with asyncio.timeout(WAIT_S):
        assert await reader.read() == b""
    writer.close()


async def test_a_used_connection_may_be_idle_for_longer_than_a_head(
    running: Running, client: ScriptedClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "HEAD_TIMEOUT_S", 0.05)
    client.go.set()
    reader, writer = await running.connect()
    for _ in range(2):
        writer.write(post())
        await read_answer(reader)
        await asyncio.sleep(0.15)
    assert not reader.at_eof()
    writer.close()


@pytest.mark.parametrize(
    "parts",
    [[b"x: " + b"y" * (1 << 20)], [b"x%d: y\r\n" % number for number in range(10_000)]],
    ids=["long", "many"],
)
async def test_a_head_that_is_too_large(running: Running, parts: list[bytes]) -> None:
    """The client still sends when it is refused, and reads why all the same."""
    assert await _refused(running, HEAD, *parts) == (431, "headers_too_large")


async def test_what_is_no_http(running: Running) -> None:
    assert await _refused(running, b"\x16\x03\x01\r\n\r\n") == (400, "invalid_request")


async def test_as_many_chunks_as_a_body_is_worth(running: Running, client: ScriptedClient) -> None:
    client.go.set()
    reader, writer = await running.connect()
    _, _, body = post().partition(b"\r\n\r\n")
    body = body.ljust(MAX_CHUNKS)
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"
    writer.write(HEAD + b"transfer-encoding: chunked\r\n\r\n" + chunks)
    head, _ = await read_answer(reader)
    assert b" 200 " in head
    writer.close()
    flood = b"1\r\nx\r\n" * (MAX_CHUNKS + MAX_CHUNKS // CHUNK_BYTES + 1)
    chunked = HEAD + b"transfer-encoding: chunked\r\n\r\n"
    assert await _refused(running, chunked, flood) == (400, "invalid_request")


@pytest.mark.parametrize("early", [b"", b"GET /livez HTTP/1.1\r\nhost: localhost\r\n\r\n"])
async def test_a_client_that_goes_without_reading_is_noticed_at_once(
    running: Running, client: ScriptedClient, early: bytes
) -> None:
    """No stream was asked for; with `early`, it had sent its next request already."""
    _, writer = await running.connect()
    writer.write(post())
    async with asyncio.timeout(WAIT_S):
        await client.asked.acquire()
        writer.write(early)
        await writer.drain()
        await asyncio.sleep(0.05)
        writer.close()
        await client.cancelled.acquire()
