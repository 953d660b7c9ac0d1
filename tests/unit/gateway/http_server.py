"""The gateway's HTTP server in this process, on a real socket, before a client that is scripted.

Shell: sockets.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from services.client import Frame
from services.gateway.app import build_app
from services.gateway.guard import Guard
from services.gateway.mesh_view import MeshView
from services.gateway.server import Server
from services.gateway.serving import Gateway
from services.runtime.listener import listen, url_of

WAIT_S = 10.0
BODY = {"model": "toy", "prompt": "hi"}


class ScriptedClient:
    """Each request: "a ", and, when `go` is set, "b " and the end. cancelled: those ended early."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.asked = asyncio.Semaphore(0)
        self.cancelled = asyncio.Semaphore(0)

    async def generate(self, model: str, **_fields: Any) -> AsyncGenerator[Frame, None]:
        self.asked.release()
        try:
            yield _frame(0, "a ", None)
            await self.go.wait()
            yield _frame(1, "b ", "length")
        except (GeneratorExit, asyncio.CancelledError):
            self.cancelled.release()
            raise


def _frame(offset: int, text: str, finish_reason: str | None) -> Frame:
    usage = {"prompt_tokens": 1, "completion_tokens": 2, "cached_tokens": 0}
    return {
        "offset": offset,
        "text": text,
        "token_ids": [offset],
        "logprobs": None,
        "prompt_logprobs": None,
        "finish_reason": finish_reason,
        "usage": usage if finish_reason else None,
    }


class Running:
    """url: where it listens. task: ends with the server."""

    def __init__(self, server: Server, gateway: Gateway, listener: socket.socket) -> None:
        self.server = server
        self.gateway = gateway
        self.url = url_of(listener)
        self.address: tuple[str, int] = listener.getsockname()
        self.task = asyncio.create_task(server.serve(sockets=[listener]))

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(*self.address)

    async def until_gone(self) -> None:
        async with asyncio.timeout(WAIT_S):
            await self.task


@asynccontextmanager
async def http_server(client: ScriptedClient, drain_s: float = 60.0) -> AsyncIterator[Running]:
    gateway = Gateway(client, MeshView())
    app = Guard(build_app(gateway), None, local=True)
    running = Running(Server(app, gateway, drain_s), gateway, listen("127.0.0.1", 0))
    await running.server.listening.wait()
    try:
        yield running
    finally:
        client.go.set()
        running.server.end()
        await running.until_gone()


def post(**fields: Any) -> bytes:
    """A whole request for a completion, as bytes."""
    body = json.dumps({**BODY, **fields}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


async def read_answer(reader: asyncio.StreamReader) -> tuple[bytes, Any]:
    """(head, JSON body) of an answer that says how long it is."""
    async with asyncio.timeout(WAIT_S):
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        length = int(head.partition(b"content-length: ")[2].split(b"\r\n")[0])
        return head, json.loads(await reader.readexactly(length))
