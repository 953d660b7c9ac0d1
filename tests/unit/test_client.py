from __future__ import annotations

import ast
import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import nats
import nats.errors
import pytest

import services.client
from services.client import Client, Frame, StreetcarClientError
from services.contracts.errors import ErrorCode
from services.runtime.nats_server import NatsServer
from tests.unit.fake_admission import (
    MODEL,
    FakeAdmission,
    Request,
    failing,
    one_token_then_wait,
    silence,
    usage,
)

pytestmark = pytest.mark.nats


@pytest.fixture
async def fake(tmp_path: Path) -> AsyncIterator[FakeAdmission]:
    async with NatsServer(tmp_path) as server, FakeAdmission(server.url) as admission:
        yield admission


@pytest.fixture
async def client(fake: FakeAdmission) -> AsyncIterator[Client]:
    async with Client(fake.url, first_frame_timeout_s=0.3, next_frame_timeout_s=0.3) as client:
        yield client


async def collect(client: Client, **fields: Any) -> list[Frame]:
    return [frame async for frame in client.generate(MODEL, **{"prompt": "hi", **fields})]


def text(frames: list[Frame]) -> str:
    return "".join(frame["text"] for frame in frames)


async def test_frames_come_in_order_and_end_with_usage(fake: FakeAdmission, client: Client) -> None:
    frames = await collect(client, max_tokens=3, traceparent="00-aa-bb-01")
    assert text(frames) == "t0 t1 t2 "
    assert [frame["offset"] for frame in frames] == [0, 1, 2]
    assert frames[-1]["finish_reason"] == "length"
    assert frames[-1]["usage"]["completion_tokens"] == 3
    assert fake.headers[0]["traceparent"] == "00-aa-bb-01"
    assert fake.cancelled == []


async def test_many_requests_share_a_connection(client: Client) -> None:
    answers = await asyncio.gather(*(collect(client, max_tokens=n) for n in range(1, 20)))
    assert [len(frames) for frames in answers] == list(range(1, 20))


async def test_what_the_reader_has_is_dropped(fake: FakeAdmission, client: Client) -> None:
    async def repeat(fake: FakeAdmission, request: Request, reply: str) -> None:
        logprobs = [{"token_id": i} for i in range(4)]
        await fake.send(reply, request, 0, text="ab", token_ids=[0, 1], logprobs=logprobs[:2])
        await fake.send(reply, request, 2, text="c", token_ids=[2], logprobs=logprobs[2:3])
        await fake.send(reply, request, 0, text="ab", token_ids=[0, 1], logprobs=logprobs[:2])
        await fake.send(reply, request, 0, text="abcd", token_ids=[0, 1, 2, 3], logprobs=logprobs)
        await fake.send(reply, request, 4, text="!", finish_reason="stop", usage=usage(request, 4))

    fake.script = repeat
    frames = await collect(client)
    assert text(frames) == "abcd!"
    assert [frame["offset"] for frame in frames] == [0, 2, 3, 4]
    assert [i for frame in frames for i in frame["token_ids"]] == [0, 1, 2, 3]
    assert [entry for frame in frames for entry in frame["logprobs"] or []] == [
        {"token_id": i} for i in range(4)
    ]


async def test_case_46_a_gap_is_an_error_and_cancels(fake: FakeAdmission, client: Client) -> None:
    async def skip(fake: FakeAdmission, request: Request, reply: str) -> None:
        await fake.send(reply, request, 0, text="a", token_ids=[0])
        await fake.send(reply, request, 2, text="c", token_ids=[2])

    fake.script = skip
    with pytest.raises(StreetcarClientError, match="lost_frames"):
        await collect(client, request_id="r1")
    await fake.until(lambda: fake.cancelled == ["r1"])


async def test_case_46_what_was_read_is_not_pending(tmp_path: Path) -> None:
    """65 bytes twice through a limit of 100: the library counts what has been taken out."""
    async with NatsServer(tmp_path) as server:
        errors: list[Exception] = []

        async def on_error(error: Exception) -> None:
            errors.append(error)

        connection = await nats.connect(server.url, error_cb=on_error)
        subscription = await connection.subscribe("t", pending_bytes_limit=100)
        for _ in range(2):
            for _ in range(5):
                await connection.publish("t", b"thirteen byte")
            assert [len((await subscription.next_msg(5)).data) for _ in range(5)] == [13] * 5
            assert subscription.pending_bytes == 0
        assert errors == []
        # Past the limit the loss is told, and what is left is less than what was sent.
        for _ in range(20):
            await connection.publish("t", b"thirteen byte")
        await connection.flush()
        await connection.flush()
        assert errors and all(isinstance(e, nats.errors.SlowConsumerError) for e in errors)
        assert subscription.pending_msgs + len(errors) == 20
        await connection.close()


async def test_silence_is_retried_once_with_the_same_id(
    fake: FakeAdmission, client: Client
) -> None:
    fake.script = silence
    with pytest.raises(StreetcarClientError, match="timeout") as caught:
        await collect(client)
    assert caught.value.status == 504
    first, second = fake.requests
    assert second == {**first, "retry": True}
    await fake.until(lambda: fake.cancelled == [first["request_id"]])


async def test_a_stalled_answer_times_out(fake: FakeAdmission, client: Client) -> None:
    fake.script = one_token_then_wait
    with pytest.raises(StreetcarClientError, match="timeout"):
        await collect(client, request_id="r1")
    await fake.until(lambda: fake.cancelled == ["r1"])
    assert len(fake.requests) == 1


async def test_closing_early_cancels(fake: FakeAdmission, client: Client) -> None:
    fake.script = one_token_then_wait
    async with aclosing(client.generate(MODEL, prompt="hi", request_id="r1")) as frames:
        async for frame in frames:
            assert frame["text"] == "t0 "
            break
    await fake.until(lambda: fake.cancelled == ["r1"])
    assert client._queues == {}


async def test_error_frames_are_raised(fake: FakeAdmission, client: Client) -> None:
    fake.script = failing(ErrorCode.QUEUE_FULL, "1024 requests wait")
    with pytest.raises(StreetcarClientError) as caught:
        await collect(client)
    assert (caught.value.code, caught.value.status) == ("queue_full", 429)
    assert caught.value.message == "1024 requests wait"
    assert fake.cancelled == []


@pytest.mark.parametrize(
    ("fields", "code", "status"),
    [
        ({"prompt": "x" * (9 << 20)}, "payload_too_large", 413),
        ({"request_id": "a.b"}, "invalid_request", 400),
        ({"request_id": ""}, None, None),
    ],
)
async def test_what_cannot_be_sent_is_refused_here(
    fake: FakeAdmission, client: Client, fields: dict[str, Any], code: str | None, status: int
) -> None:
    if code is None:
        assert text(await collect(client, **fields)) == "t0 t1 t2 "
        return
    with pytest.raises(StreetcarClientError) as caught:
        await collect(client, **fields)
    assert (caught.value.code, caught.value.status) == (code, status)
    assert fake.requests == []


@pytest.mark.parametrize("model", ["a.b", "a b", "*", ">", "", "a\r\nPUB x 0"])
async def test_a_model_is_one_token_of_a_subject(client: Client, model: str) -> None:
    with pytest.raises(StreetcarClientError, match="model_not_found"):
        async for _ in client.generate(model, prompt="hi"):
            pass


async def test_nobody_there_is_said_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(services.client, "CONNECT_TIMEOUT_S", 0.3)
    async with NatsServer(tmp_path) as server, Client(server.url) as client:
        with pytest.raises(StreetcarClientError, match="nobody serves") as caught:
            await collect(client)
        assert (caught.value.code, caught.value.status) == ("no_worker", 503)
        await server.stop()
        with pytest.raises(StreetcarClientError) as caught:
            await collect(client)
        assert (caught.value.code, caught.value.status) == ("no_server", 503)
    with pytest.raises(StreetcarClientError, match="no nats-server"):
        async with Client(server.url):
            pass


def test_the_client_is_small_enough_to_copy() -> None:
    source = Path(services.client.__file__).read_text()
    imported = {
        name.partition(".")[0]
        for node in ast.walk(ast.parse(source))
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    assert imported - sys.stdlib_module_names == {"nats", "msgpack"}
