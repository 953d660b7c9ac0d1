"""Bodies that come in an odd way."""

from __future__ import annotations

import asyncio

import pytest
from starlette.requests import Request

from services.gateway import reading
from services.gateway.reading import read_body
from services.gateway.refusals import Refusal


def _request(*chunks: bytes, ends: bool = True) -> Request:
    todo = list(chunks)

    async def receive() -> dict[str, object]:
        if not todo and not ends:
            await asyncio.get_running_loop().create_future()
        chunk = todo.pop(0) if todo else b""
        return {"type": "http.request", "body": chunk, "more_body": bool(todo) or not ends}

    return Request({"type": "http", "method": "POST", "headers": []}, receive)


async def test_a_body_of_single_bytes_is_one_body() -> None:
    body = b'{"a": [1, 2, 3]}'
    assert await read_body(_request(*(bytes([byte]) for byte in body)), 1000) == {"a": [1, 2, 3]}


async def test_a_body_that_never_ends_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "BODY_TIMEOUT_S", 0.05)
    with pytest.raises(Refusal) as caught:
        await read_body(_request(b"{", ends=False), 1000)
    assert (caught.value.status, caught.value.code) == (408, "request_timeout")


@pytest.mark.parametrize("size", [1000, 1001])
async def test_the_limit_is_where_it_says(size: int) -> None:
    body = b'{"a": "' + b"x" * (size - 9) + b'"}'
    assert len(body) == size
    if size == 1000:
        assert await read_body(_request(body[:500], body[500:]), 1000)
        return
    with pytest.raises(Refusal, match="1001 bytes"):
        await read_body(_request(body[:500], body[500:]), 1000)
