"""One streamed completion over plain HTTP/1.1: events as they come, on a connection of its own.

Shell: a socket.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import closing
from typing import Any, Final
from urllib.parse import urlsplit

MAX_LINE_BYTES: Final = 1 << 20
DONE: Final = "[DONE]"


class HttpRefused(Exception):
    """An answer that is no stream. code: of the error in it, or of what was missing."""

    def __init__(self, code: str) -> None:
        super().__init__(code)
        self.code = code


class HttpCut(Exception):
    """The connection ended before the stream did."""


async def stream(url: str, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
    """The events of one /v1/completions stream, [DONE] left out.

    Raises HttpRefused before the first event, HttpCut after it.
    """
    parts = urlsplit(url)
    try:
        reader, writer = await asyncio.open_connection(
            parts.hostname, parts.port, limit=MAX_LINE_BYTES
        )
    except OSError:
        raise HttpRefused("unreachable") from None
    with closing(writer):
        try:
            writer.write(_request(parts.netloc, json.dumps(body | {"stream": True}).encode()))
            await _begin(reader)
        except (OSError, EOFError):
            raise HttpRefused("unreachable") from None
        try:
            async for line in _lines(reader):
                data = line.removeprefix("data: ").strip()
                if data == DONE:
                    return
                if data:
                    yield json.loads(data)
        except (OSError, EOFError):
            raise HttpCut from None
        raise HttpCut


def _request(host: str, body: bytes) -> bytes:
    head = [
        "POST /v1/completions HTTP/1.1",
        f"Host: {host}",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
        "Connection: close",
    ]
    return ("\r\n".join(head) + "\r\n\r\n").encode() + body


async def _begin(reader: asyncio.StreamReader) -> None:
    """Read the head. Raises HttpRefused where the status is not 200."""
    status = int((await reader.readuntil(b"\r\n")).split()[1])
    while (await reader.readuntil(b"\r\n")).strip():
        continue
    if status != 200:
        raise HttpRefused(_error_code(await reader.read(), status))


def _error_code(body: bytes, status: int) -> str:
    try:
        return str(json.loads(body)["error"]["code"])
    except (ValueError, KeyError, TypeError):
        return f"http_{status}"


async def _lines(reader: asyncio.StreamReader) -> AsyncGenerator[str, None]:
    """Lines of a chunked body; ends with the body."""
    rest = b""
    while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
        rest += await reader.readexactly(size)
        await reader.readexactly(2)
        *whole, rest = rest.split(b"\n")
        for line in whole:
            yield line.decode()
