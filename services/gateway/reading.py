"""Reads a request's body, at most as much as the bus would take.

Invariant: never more than the limit is held in memory, and for no longer than BODY_TIMEOUT_S,
whatever a client sends.

Shell: reads from the connection.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

import msgspec
from starlette.requests import ClientDisconnect, Request

from services.contracts.errors import ErrorCode
from services.gateway.disconnect import ClientGone
from services.gateway.refusals import Refusal, invalid

MAX_DISCARDED_BYTES: Final = 64 * 1024 * 1024
"""Of a body that is too large: a client that is still sending would not see the refusal."""

BODY_TIMEOUT_S: Final = 60.0
"""For a body to arrive in; the largest one then needs 140 kB/s."""

REQUEST_TIMEOUT: Final = 408

_decoder = msgspec.json.Decoder(dict[str, Any])


async def read_body(request: Request, limit: int) -> dict[str, Any]:
    """The JSON object in the body. Raises Refusal: 413 with both sizes, 408, or 400."""
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            body = await _read(request, limit)
    except TimeoutError:
        message = f"the body has not arrived within {BODY_TIMEOUT_S:g} s"
        raise Refusal(REQUEST_TIMEOUT, "request_timeout", message) from None
    try:
        return _decoder.decode(body)
    except msgspec.ValidationError:
        raise invalid("the body must be a JSON object") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise invalid(f"the body is not JSON: {error}") from None


async def _read(request: Request, limit: int) -> bytearray:
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > MAX_DISCARDED_BYTES:
        raise _too_large(f"{int(declared)} bytes", limit)
    # One buffer: a body of single bytes would be forty times as large as a list of them.
    body = bytearray()
    size = 0
    try:
        async for chunk in request.stream():
            size += len(chunk)
            if size <= limit:
                body += chunk
                continue
            body.clear()
            if size > MAX_DISCARDED_BYTES:
                raise _too_large(f"more than {MAX_DISCARDED_BYTES} bytes", limit)
    except ClientDisconnect:
        raise ClientGone from None
    if size > limit:
        raise _too_large(f"{size} bytes", limit)
    return body


def _too_large(size: str, limit: int) -> Refusal:
    message = f"the body has {size}; the bus takes messages of at most {limit} bytes"
    return Refusal(413, ErrorCode.PAYLOAD_TOO_LARGE.value, message)
