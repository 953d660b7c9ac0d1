from __future__ import annotations

import ast
import asyncio
import os
import random
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import nats
import nats.errors
import pytest

import services.client
from services.client import Client, Frame, Received, StreetcarClientError
from services.contracts.errors import ErrorCode
from services.contracts.spans import SpanKind, SpanRecord
from services.runtime.nats_server import NatsServer
from tests.unit.fake_admission import (
    MODEL,
    FakeAdmission,
    Request,
    answer,
    failing,
    one_token_then_wait,
    silence,
    usage,
)

pytestmark = pytest.mark.nats
WAIT_S = 20.0


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


async def test_the_span_of_a_request_is_the_callers_and_the_mesh_is_below_it(
    fake: FakeAdmission,
) -> None:
    spans: list[dict[str, Any]] = []
    caller, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    async with Client(fake.url, on_span=spans.append) as client:
        await collect(client, max_tokens=3, request_id="r1", temperature=0.5)
        given = {"traceparent": f"00-{caller}-{parent}-01", "tracestate": "a=1"}
        await collect(client, **given)
        await collect(client, traceparent=f"00-{caller}-{parent}-00")
        fake.script = failing(ErrorCode.QUEUE_FULL, "1024 requests wait")
        with pytest.raises(StreetcarClientError):
            await collect(client)
    own, child, failed = [SpanRecord(**s | {"kind": SpanKind(s["kind"])}) for s in spans]
    assert own.parent_id == "" and (child.trace_id, child.parent_id) == (caller, parent)
    assert child.tracestate == "a=1"
    for span, headers in zip((own, child), fake.headers[:2], strict=True):
        assert headers["traceparent"] == f"00-{span.trace_id}-{span.span_id}-01"
    assert fake.headers[2]["traceparent"].endswith("-00"), "what a caller does not sample is let be"
    assert (own.name, own.kind, own.request_id) == (
        f"text_completion {MODEL}",
        SpanKind.CLIENT,
        "r1",
    )
    assert own.attributes["gen_ai.request.temperature"] == 0.5
    assert own.attributes["gen_ai.response.finish_reasons"] == "length"
    assert own.attributes["gen_ai.usage.output_tokens"] == 3
    first_s = own.attributes["gen_ai.response.time_to_first_chunk"]
    assert isinstance(first_s, float) and 0 < first_s <= own.duration_ns / 1e9
    assert (own.attributes["streetcar.num_sent"], own.error) == (1, "")
    assert failed.error == "queue_full" and "hi" not in str(spans)


async def test_a_request_that_is_closed_early_has_a_span_all_the_same(fake: FakeAdmission) -> None:
    fake.script = one_token_then_wait
    spans: list[dict[str, Any]] = []
    async with (
        Client(fake.url, on_span=spans.append) as client,
        aclosing(client.generate(MODEL, prompt="hi")) as frames,
    ):
        await anext(frames)
    (span,) = spans
    assert "gen_ai.response.finish_reasons" not in span["attributes"] and not span["error"]


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


async def test_case_46_a_gap_is_asked_for_and_nothing_is_shown_twice(
    fake: FakeAdmission, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(services.client, "RETRY_AFTER_S", -1.0)

    async def skip(fake: FakeAdmission, request: Request, reply: str) -> None:
        await fake.send(reply, request, 0, text="a", token_ids=[0])
        await fake.send(reply, request, 2, text="c", token_ids=[2])
        await fake.until(lambda: fake.resumed != [])
        await fake.send(reply, request, 1, text="bc", token_ids=[1, 2])
        await fake.send(reply, request, 3, finish_reason="length", usage=usage(request, 3))

    fake.script = skip
    frames = await collect(client)
    assert text(frames) == "abc"
    assert fake.resumed == [1] and fake.cancelled == []


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


async def test_a_gap_that_nobody_fills_has_an_end(fake: FakeAdmission, client: Client) -> None:
    async def skip(fake: FakeAdmission, request: Request, reply: str) -> None:
        await fake.send(reply, request, 2, text="c", token_ids=[2])

    fake.script = skip
    with pytest.raises(StreetcarClientError, match="timeout"):
        await collect(client, request_id="r1")
    await fake.until(lambda: fake.cancelled == ["r1"])


async def test_after_a_silence_the_owner_is_asked_and_then_the_request_is_sent_again(
    fake: FakeAdmission, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(services.client, "ASK_AFTER_S", 0.02)

    async def answer_the_retry(fake: FakeAdmission, request: Request, reply: str) -> None:
        if request.get("retry"):
            await answer(fake, request, reply)

    fake.script = answer_the_retry
    client.first_frame_timeout_s = WAIT_S
    assert text(await collect(client)) == "t0 t1 t2 "
    first, second = fake.requests
    assert second == {**first, "retry": True} and first["seed"] >= 0
    assert fake.resumed == [0, 0, 0]


async def test_a_connection_that_has_just_closed_is_the_bus_being_away(
    fake: FakeAdmission, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """uvloop raises RuntimeError then, which is none of nats-py's errors."""
    monkeypatch.setattr(services.client, "ASK_AFTER_S", 0.02)
    publish, refused = client._connection.publish, []

    async def publish_once(subject: str, payload: bytes, **more: Any) -> None:
        if ".resume." in subject and not refused:
            refused.append(subject)
            raise RuntimeError("unable to perform operation on <TCPTransport closed=True>")
        await publish(subject, payload, **more)

    async def answer_who_asks(fake: FakeAdmission, request: Request, reply: str) -> None:
        await fake.until(lambda: fake.resumed != [])
        await answer(fake, request, reply)

    monkeypatch.setattr(client._connection, "publish", publish_once)
    fake.script = answer_who_asks
    client.first_frame_timeout_s = WAIT_S
    assert text(await collect(client)) == "t0 t1 t2 " and refused


async def test_a_request_that_is_somebodys_is_not_sent_again(
    fake: FakeAdmission, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(services.client, "ASK_AFTER_S", 0.02)
    monkeypatch.setattr(services.client, "MAX_ASK_AFTER_S", 0.02)

    async def queued(fake: FakeAdmission, request: Request, reply: str) -> None:
        for asked in range(1, 9):
            await fake.until(lambda least=asked: len(fake.resumed) >= least)  # type: ignore[misc]
            await fake.send(reply, request, 0)
        await answer(fake, request, reply)

    fake.script = queued
    client.first_frame_timeout_s = WAIT_S
    assert text(await collect(client)) == "t0 t1 t2 "
    assert len(fake.requests) == 1


async def test_silence_has_an_end(fake: FakeAdmission, client: Client) -> None:
    fake.script = silence
    with pytest.raises(StreetcarClientError, match="timeout") as caught:
        await collect(client, request_id="r1")
    assert caught.value.status == 504
    await fake.until(lambda: fake.cancelled == ["r1"])


async def test_a_lost_last_frame_is_asked_for(
    fake: FakeAdmission, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(services.client, "ASK_AFTER_S", 0.02)

    async def lose_the_last(fake: FakeAdmission, request: Request, reply: str) -> None:
        await fake.send(reply, request, 0, text="a", token_ids=[0])
        await fake.until(lambda: fake.resumed != [])
        await fake.send(reply, request, 1, finish_reason="length", usage=usage(request, 1))

    fake.script = lose_the_last
    client.next_frame_timeout_s = WAIT_S
    frames = await collect(client)
    assert (text(frames), frames[-1]["finish_reason"]) == ("a", "length")
    assert set(fake.resumed) == {1}


async def test_an_admission_that_leaves_sends_new_requests_to_another(
    fake: FakeAdmission, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    await collect(client)
    fake.reset()

    async def leave_first(fake: FakeAdmission, request: Request, reply: str) -> None:
        if len(fake.requests) < 3:
            await failing(ErrorCode.DRAINING, "bye")(fake, request, reply)
        else:
            await answer(fake, request, reply)

    fake.script = leave_first
    client.first_frame_timeout_s = WAIT_S
    assert text(await collect(client)) == "t0 t1 t2 "
    assert [bool(request.get("retry")) for request in fake.requests] == [False, True, True]
    fake.reset()
    fake.script = failing(ErrorCode.DRAINING, "bye")
    monkeypatch.setattr(services.client, "ABSENCE_S", 0.1)
    with pytest.raises(StreetcarClientError, match="draining"):
        await collect(client)


async def test_a_mesh_that_was_there_is_waited_for(
    fake: FakeAdmission, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    await collect(client)
    client.first_frame_timeout_s = WAIT_S
    await fake.leave()
    asked = asyncio.create_task(collect(client))
    async with FakeAdmission(fake.url):
        assert text(await asked) == "t0 t1 t2 "
    monkeypatch.setattr(services.client, "ABSENCE_S", 0.1)
    with pytest.raises(StreetcarClientError, match="nobody serves"):
        await collect(client)


async def test_a_reader_that_is_too_slow_loses_its_request_and_nobody_elses(
    fake: FakeAdmission, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(services.client, "MAX_QUEUED_FRAMES", 4)
    client.next_frame_timeout_s = WAIT_S
    async with aclosing(client.generate(MODEL, prompt="hi", max_tokens=9, request_id="r1")) as slow:
        first = await anext(slow)
        assert first["text"] == "t0 "
        await fake.until(lambda: fake.cancelled == ["r1"])
        assert text(await collect(client, max_tokens=2)) == "t0 t1 "
        with pytest.raises(StreetcarClientError, match="slow_client") as caught:
            async for _frame in slow:
                pass
    assert caught.value.status == 499


@pytest.mark.parametrize("seed", range(20))
def test_any_senders_and_any_losses_make_one_answer(seed: int) -> None:
    """Frames of several senders, cut anywhere, some lost: after each gap the owner goes on from
    where the reader is.
    """
    rng = random.Random(seed)
    for _ in range(20):
        tokens = list(range(rng.randint(1, 20)))
        words = [f"{token} " * (token % 3) for token in tokens]
        received, at = Received(), 0
        got: list[int] = []
        shown = ""
        while len(got) < len(tokens):
            end = rng.randint(at + 1, len(tokens))
            frame = {
                "offset": at,
                "token_ids": tokens[at:end],
                "text": "".join(words[at:end]),
                "finish_reason": None,
                "prompt_logprobs": [None] if at == 0 else None,
            }
            at = end
            if rng.random() < 0.7:
                if received.trim(frame) is None:
                    at = received.num_tokens
                    continue
                got += frame["token_ids"]
                shown += frame["text"]
            if at == len(tokens) or rng.random() < 0.2:
                # Another sender, which begins at the first token, or a resume.
                at = rng.choice([0, received.num_tokens])
        assert got == tokens and shown == "".join(words)


async def test_closing_early_cancels(fake: FakeAdmission, client: Client) -> None:
    fake.script = one_token_then_wait
    async with aclosing(client.generate(MODEL, prompt="hi", request_id="r1")) as frames:
        async for frame in frames:
            assert frame["text"] == "t0 "
            break
    await fake.until(lambda: fake.cancelled == ["r1"])
    assert client._calls == {}


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


async def test_a_server_that_takes_nothing_does_not_keep_a_client_from_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """nats-py waits without a bound for what is still to be sent."""
    monkeypatch.setattr(services.client, "CLOSE_TIMEOUT_S", 0.2)
    async with NatsServer(tmp_path) as server:
        async with asyncio.timeout(WAIT_S), Client(server.url) as client:
            os.kill(server.pid, signal.SIGSTOP)
            for _ in range(4):
                await client.publish("anything", bytes(4 << 20))
                await asyncio.sleep(0)
        os.kill(server.pid, signal.SIGCONT)


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
