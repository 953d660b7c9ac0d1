"""The drill's streams: what a client sees, judged as it comes."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest

from services.client import Client, StreetcarClientError
from services.simulator.drill import load as module
from services.simulator.drill.cases import Case, Plan, draw_plan, stub_cases
from services.simulator.drill.checker import Wrong
from services.simulator.drill.http_stream import HttpCut, HttpRefused, stream
from services.simulator.drill.load import Load

EXPECTED = list(range(50, 70))
CASE = Case([1, 2, 3], EXPECTED)
WHOLE = Plan(CASE, len(EXPECTED))
Frame = dict[str, Any]


class _Client:
    """Gives prepared frames, then an error if there is one."""

    def __init__(self, frames: list[Frame], error: str = "", hangs: bool = False) -> None:
        self._frames = frames
        self._error = error
        self._hangs = hangs

    async def generate(self, _model: str, **_fields: Any) -> AsyncGenerator[Frame, None]:
        for frame in self._frames:
            yield frame
        if self._error:
            raise StreetcarClientError(self._error, "", 500)
        if self._hangs:
            await asyncio.Event().wait()


def _frames(token_ids: list[int], size: int = 6, end: str | None = "length") -> list[Frame]:
    parts = [token_ids[at : at + size] for at in range(0, len(token_ids), size)]
    frames = [
        {"offset": at * size, "token_ids": part, "finish_reason": None}
        for at, part in enumerate(parts)
    ]
    frames[-1]["finish_reason"] = end
    return frames


def _load(client: _Client) -> Load:
    return Load(cast(Client, client), "", "stub", lambda _rng: WHOLE, 0)


async def test_a_whole_answer_is_complete() -> None:
    record = await _load(_Client(_frames(EXPECTED))).run(WHOLE)
    assert (record.complete, record.code, record.wrong, record.num_tokens) == (True, "", None, 20)


@pytest.mark.parametrize(
    ("token_ids", "wrong"),
    [
        (EXPECTED[:6] + EXPECTED[:14], Wrong.DUPLICATED),
        (EXPECTED[:6] + EXPECTED[8:], Wrong.LOST),
        ([*EXPECTED[:-1], 7], Wrong.OTHER),
    ],
)
async def test_wrong_tokens_end_the_stream(token_ids: list[int], wrong: Wrong) -> None:
    record = await _load(_Client(_frames(token_ids))).run(WHOLE)
    assert (record.wrong, record.complete) == (wrong, False)


async def test_a_frame_at_the_wrong_offset_is_wrong() -> None:
    frames = _frames(EXPECTED)
    del frames[1]
    assert (await _load(_Client(frames)).run(WHOLE)).wrong is Wrong.REORDERED


async def test_an_end_before_the_last_token_is_no_end() -> None:
    record = await _load(_Client(_frames(EXPECTED[:12], end="stop"))).run(WHOLE)
    assert not record.complete
    assert record.code == "finished as stop after 12 tokens"


async def test_errors_and_silence_have_their_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    part = _frames(EXPECTED[:12], end=None)
    record = await _load(_Client(part, error="lost_frames")).run(WHOLE)
    assert (record.code, record.complete) == ("lost_frames", False)
    monkeypatch.setattr(module, "STREAM_TIMEOUT_S", 0.05)
    record = await _load(_Client(part, hangs=True)).run(WHOLE)
    assert (record.code, record.complete) == ("no_end", False)


async def test_a_cancelled_stream_is_left_after_its_tokens() -> None:
    record = await _load(_Client(_frames(EXPECTED))).run(Plan(CASE, 20, cancel_after=7))
    assert (record.cancelled, record.num_tokens) == (True, 12)


async def test_who_was_refused_asks_again() -> None:
    answered = asyncio.Event()

    class Refusing(_Client):
        asked = 0

        async def generate(self, _model: str, **_fields: Any) -> AsyncGenerator[Frame, None]:
            Refusing.asked += 1
            if Refusing.asked < 3:
                raise StreetcarClientError("no_worker", "", 503)
            answered.set()
            await asyncio.sleep(0)
            for frame in _frames(EXPECTED):
                yield frame

    load = _load(Refusing([]))
    load.begin(1)
    await answered.wait()
    await load.end()
    assert [record.refused for record in load.streams[:3]] == [True, True, False]
    assert load.streams[2].complete


def test_plans_are_of_every_kind() -> None:
    rng, cases = random.Random(1), stub_cases(1)
    plans = [draw_plan(rng, cases) for _ in range(500)]
    assert {plan.over_http for plan in plans} == {True, False}
    assert any(plan.cancel_after for plan in plans)
    assert any(plan.deadline_ms for plan in plans)
    assert all(1 <= plan.max_tokens <= len(plan.case.expected) for plan in plans)
    prefixes = {tuple(case.prompt_token_ids[:16]) for case in cases}
    assert len(prefixes) < len(cases), "some prompts share a prefix"


# ---- HTTP


@asynccontextmanager
async def _answering(answer: bytes) -> AsyncIterator[str]:
    """A server that reads a request, writes `answer` and hangs up."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        assert json.loads(await reader.readexactly(length))["stream"] is True
        writer.write(answer)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


def _chunk(text: str) -> bytes:
    return f"{len(text):x}\r\n{text}\r\n".encode()


HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


async def test_events_of_any_chunking() -> None:
    text = 'data: {"n": 1}\n\ndata: {"n": 2}\n\ndata: [DONE]\n\n'
    for size in (5, 16, len(text)):
        parts = [text[at : at + size] for at in range(0, len(text), size)]
        body = b"".join(map(_chunk, parts)) + b"0\r\n\r\n"
        async with _answering(HEAD + body) as url:
            assert [event async for event in stream(url, {})] == [{"n": 1}, {"n": 2}]


@pytest.mark.parametrize("half", [b"", b"5", b"5\r\nda"])
async def test_a_connection_that_ends_early_is_cut(half: bytes) -> None:
    async with _answering(HEAD + _chunk('data: {"n": 1}\n\n') + half) as url:
        events = stream(url, {})
        assert await anext(events) == {"n": 1}
        with pytest.raises(HttpCut):
            await anext(events)


async def test_refusals_have_their_codes() -> None:
    refusal = b'{"error": {"code": "queue_full"}}'
    async with _answering(b"HTTP/1.1 429 Busy\r\n\r\n" + refusal) as url:
        with pytest.raises(HttpRefused, match="queue_full"):
            await anext(stream(url, {}))
    async with _answering(b"HTTP/1.1 500 Oh\r\n\r\noops") as url:
        with pytest.raises(HttpRefused, match="http_500"):
            await anext(stream(url, {}))
    with pytest.raises(HttpRefused, match="unreachable"):
        await anext(stream(url, {}))
