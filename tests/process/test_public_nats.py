"""The public interface as its readers use it: by hand over NATS, with the client, over HTTP with
the `openai` package; and what is freed when they go away.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import httpx
import msgpack
import nats
import pytest
from nats.aio.client import Client as Connection
from openai import AsyncOpenAI, BadRequestError, NotFoundError

from services.cli.bus import connect
from services.client import Client, StreetcarClientError
from tests.process.mesh import (
    GENERATE,
    MODEL,
    Beats,
    Mesh,
    ask,
    by_hand,
    collect,
    greedy,
    heartbeats,
    is_quiet,
    observer_url,
)

pytestmark = pytest.mark.nats

CANCEL_S = 1.0
"""From a cancel, or a client's disappearance, to blocks that are free again; the heartbeats that
say so come every 250 ms.
"""

BEAT_S = 0.5
ASKED = ((21, 150), (22, 20))
FORGED = (
    *("streetcar.v1.engine.engine-0.result", "streetcar.v1.generate.smollm2-135m"),
    *("$SRV.PING", "$SYS.REQ.SERVER.PING", "_INBOX", "_INBOXES.x", "_INBOX_admission.x.y"),
    *("_INBOX_scheduler.x.y", "_INBOX_kv_store.x", "_INBOX_observer.x", "somewhere.else"),
)
"""Reply subjects that are no client's inbox."""

LONG = {"max_tokens": 4000, "ignore_eos": True, "temperature": 0.0}


@pytest.fixture
async def connection(stub_mesh: Mesh) -> AsyncIterator[Connection]:
    connected = await nats.connect(stub_mesh.nats_url)
    yield connected
    await connected.close()


@pytest.fixture
async def http(stub_mesh: Mesh) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=stub_mesh.http_url, timeout=60) as client:
        yield client


# ---- by hand


async def test_a_request_by_hand(connection: Connection) -> None:
    """`nats request streetcar.v1.generate.MODEL '{"prompt": "Hi", "max_tokens": 5}' --replies 0`"""
    answer = await by_hand(connection, b'{"prompt": "Hi", "max_tokens": 5}')
    assert [frame["offset"] for frame in answer.frames] == list(range(0, 5)) or answer.frames[0][
        "offset"
    ] == 0
    assert len(answer.token_ids) == 5
    assert answer.text == "".join(f"{token_id} " for token_id in answer.token_ids)
    ids = {frame["request_id"] for frame in answer.frames}
    assert len(ids) == 1
    assert ids.pop().startswith("req-")
    assert [frame["finish_reason"] for frame in answer.frames[:-1]] == [None] * (
        len(answer.frames) - 1
    )
    assert answer.last["finish_reason"] == "length"
    assert answer.usage == {"prompt_tokens": 2, "completion_tokens": 5, "cached_tokens": 0}
    assert all(payload[:1] == b"{" for payload in answer.raw)


async def test_messagepack_is_answered_in_kind(connection: Connection) -> None:
    fields = {"prompt_token_ids": [5, 6, 7], "max_tokens": 5, "temperature": 0.0}
    packed = await by_hand(connection, msgpack.packb(fields))
    plain = await by_hand(connection, json.dumps(fields).encode())
    assert all(payload[:1] != b"{" for payload in packed.raw)
    assert packed.token_ids == plain.token_ids
    assert packed.last.keys() == plain.last.keys()
    assert packed.usage | {"cached_tokens": 0} == plain.usage | {"cached_tokens": 0}


async def test_only_the_last_frame_where_nobody_reads_a_stream(connection: Connection) -> None:
    answer = await by_hand(connection, b'{"prompt": "Hi", "max_tokens": 40, "stream": false}')
    assert len(answer.frames) == 1
    assert len(answer.token_ids) == 40


async def test_a_request_without_an_inbox_does_nothing(
    connection: Connection, stub_beats: Beats
) -> None:
    await connection.publish(GENERATE, b'{"prompt": "Hi", "max_tokens": 4000}')
    # Nor may an answer be written where the mesh itself listens.
    for forged in FORGED:
        await connection.publish(GENERATE, b'{"prompt": "Hi", "max_tokens": 4000}', reply=forged)
    await connection.flush()
    await stub_beats.until(is_quiet)
    assert (await by_hand(connection, b'{"prompt": "Hi", "max_tokens": 1}')).token_ids


async def test_a_retry_shows_everything_again(connection: Connection) -> None:
    """The same request_id on a new inbox: one sequence, its frames from the first token on."""
    fields = {"prompt": "again", "max_tokens": 150, "temperature": 0.0, "request_id": "again"}
    first = await connection.subscribe(inbox := connection.new_inbox())
    await connection.publish(GENERATE, json.dumps(fields).encode(), reply=inbox)
    await first.next_msg(5)
    answer = await by_hand(connection, json.dumps(fields | {"retry": True}).encode())
    await first.unsubscribe()
    assert answer.last["finish_reason"] == "length"
    assert len(answer.token_ids) == 150


async def test_logprobs_and_retries_leave_the_mesh_alive(connection: Connection) -> None:
    """Whatever a worker gives, an answer that asked for log-probabilities ends."""
    fields = {"prompt": "Hi", "max_tokens": 100, "logprobs": 2, "request_id": "logprobs-again"}
    first = await connection.subscribe(inbox := connection.new_inbox())
    await connection.publish(GENERATE, json.dumps(fields).encode(), reply=inbox)
    await first.next_msg(5)
    answer = await by_hand(connection, json.dumps(fields | {"retry": True}).encode())
    await first.unsubscribe()
    assert answer.last["finish_reason"] in {"length", "error"}
    assert (await by_hand(connection, b'{"prompt": "Hi", "max_tokens": 1}')).token_ids


@pytest.mark.parametrize("verb", ["PING", "INFO", "STATS"])
async def test_every_service_answers_the_service_interface(stub_mesh: Mesh, verb: str) -> None:
    names: dict[str, dict[str, Any]] = {}
    async with connect(observer_url(stub_mesh.nats_url)) as observer, asyncio.timeout(10):
        subscription = await observer.subscribe(inbox := observer.new_inbox())
        await observer.publish(f"$SRV.{verb}", b"", reply=inbox)
        async for message in subscription.messages:
            reply = json.loads(message.data)
            assert reply["type"] == f"io.nats.micro.v1.{verb.lower()}_response"
            names[reply["name"]] = reply
            if len(names) == 5:
                break
    assert sorted(names) == [
        *("streetcar-admission", "streetcar-gateway", "streetcar-gpu-worker"),
        *("streetcar-kv-store", "streetcar-scheduler"),
    ]
    if verb == "STATS":
        generate = names["streetcar-admission"]["endpoints"][0]
        assert (generate["name"], generate["num_requests"] > 0) == ("generate", True)


# ---- going away


async def test_cancel(connection: Connection, stub_beats: Beats) -> None:
    """One terminal frame, the sequence gone, and its blocks free, within a second."""
    subscription = await connection.subscribe(inbox := connection.new_inbox())
    fields = {"prompt": "Hi", "request_id": "to-cancel", **LONG}
    await connection.publish(GENERATE, json.dumps(fields).encode(), reply=inbox)
    await stub_beats.until(lambda beats: beats.engine.num_blocks_held > 0)
    reply = await connection.request("streetcar.v1.cancel.to-cancel", b"", timeout=5)
    assert json.loads(reply.data) == {"request_id": "to-cancel"}
    answer = await collect(subscription)
    assert answer.last["finish_reason"] == "abort"
    assert answer.usage["completion_tokens"] == len(answer.token_ids)
    assert await stub_beats.until(is_quiet) < CANCEL_S + BEAT_S
    await subscription.unsubscribe()


async def test_a_cancel_that_comes_first(connection: Connection) -> None:
    await connection.publish("streetcar.v1.cancel.too-early", b"")
    fields = {"prompt": "Hi", "request_id": "too-early", "max_tokens": 5}
    answer = await by_hand(connection, json.dumps(fields).encode())
    assert (answer.last["finish_reason"], answer.token_ids) == ("abort", [])
    again = await by_hand(connection, json.dumps(fields).encode())
    assert again.last["finish_reason"] == "length"


async def test_a_reader_that_leaves_its_generator(stub_mesh: Mesh, stub_beats: Beats) -> None:
    async with Client(stub_mesh.nats_url) as client:
        for _ in range(3):
            async with aclosing(client.generate(MODEL, prompt="Hi", **LONG)) as frames:
                await anext(frames)
        assert await stub_beats.until(is_quiet) < CANCEL_S + BEAT_S


@pytest.mark.parametrize("stream", [True, False])
async def test_case_19_an_http_client_that_disconnects(
    stub_mesh: Mesh, stub_beats: Beats, stream: bool
) -> None:
    body = {"model": MODEL, "prompt": "Hi", "stream": stream, **LONG}
    async with httpx.AsyncClient(base_url=stub_mesh.http_url, timeout=60) as http:
        tasks = [
            asyncio.create_task(_read_stream(http, body) if stream else _post(http, body))
            for _ in range(3)
        ]
        await stub_beats.until(lambda beats: beats.engine.num_running == 3)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    assert await stub_beats.until(is_quiet) < CANCEL_S + BEAT_S


async def test_case_19_an_http_client_that_disconnects_in_the_queue(narrow_mesh: Mesh) -> None:
    """The one lane is taken; the request that waits goes, and the one that runs stays."""
    async with (
        heartbeats(narrow_mesh.nats_url) as beats,
        Client(narrow_mesh.nats_url) as client,
        httpx.AsyncClient(base_url=narrow_mesh.http_url, timeout=60) as http,
    ):
        running = client.generate(MODEL, prompt="Hi", max_tokens=200, ignore_eos=True)
        async with aclosing(running):
            await anext(running)
            for stream in (True, False):
                body = {"model": MODEL, "prompt": "x", "max_tokens": 9, "stream": stream}
                work = _read_stream(http, body) if stream else _post(http, body)
                task = asyncio.create_task(work)
                await beats.until(lambda beats: beats.engine.num_waiting == 1)
                task.cancel()
                await asyncio.wait({task})
                gone = await beats.until(lambda beats: beats.engine.num_waiting == 0)
                assert gone < CANCEL_S + BEAT_S
            assert beats.engine.num_running == 1
        await beats.until(is_quiet)


async def _post(http: httpx.AsyncClient, body: dict[str, Any]) -> None:
    await http.post("/v1/completions", json=body)


async def _read_stream(http: httpx.AsyncClient, body: dict[str, Any]) -> None:
    async with http.stream("POST", "/v1/completions", json=body) as response:
        async for _line in response.aiter_lines():
            pass


async def test_case_45_a_queued_request_outlives_the_worker(narrow_mesh: Mesh) -> None:
    """One runs, one is accepted and waits, the worker is killed: both are answered, once."""
    mesh, worker = narrow_mesh, narrow_mesh.child_pid("gpu_worker")
    async with Client(mesh.nats_url) as client, heartbeats(mesh.nats_url) as beats:
        expected = [(await greedy(client, [first, 7], count)).token_ids for first, count in ASKED]
        running = asyncio.create_task(greedy(client, [ASKED[0][0], 7], ASKED[0][1]))
        await beats.until(lambda beats: beats.engine.num_running == 1)
        waiting = asyncio.create_task(greedy(client, [ASKED[1][0], 7], ASKED[1][1]))
        await beats.until(lambda beats: beats.engine.num_waiting == 1)
        os.kill(worker, signal.SIGKILL)
        async with asyncio.timeout(60):
            answers = await asyncio.gather(running, waiting)
        assert [answer.token_ids for answer in answers] == expected
        await beats.until(is_quiet)
    assert mesh.child_pid("gpu_worker") not in {0, worker}


async def test_case_48_answers_of_one_call_do_not_mix_with_those_of_the_next(
    stub_mesh: Mesh,
) -> None:
    """Two batches one after the other, and two at once: each gets its own, in the order asked."""
    prompts = [[100 + number] * (5 + number) for number in range(8)]
    async with (
        Client(stub_mesh.nats_url) as client,
        httpx.AsyncClient(base_url=stub_mesh.http_url, timeout=60) as http,
    ):
        alone = [(await greedy(client, prompt, 6)).text for prompt in prompts]
        assert len(set(alone)) == len(alone), "answers that can be told apart"

        async def call(first: int) -> list[str]:
            body = {"model": MODEL, "prompt": prompts[first : first + 2], "max_tokens": 6}
            fields = body | {"temperature": 0.0, "ignore_eos": True}
            choices = (await http.post("/v1/completions", json=fields)).json()["choices"]
            assert [choice["index"] for choice in choices] == [0, 1]
            return [choice["text"] for choice in choices]

        for first in (0, 2):
            assert await call(first) == alone[first : first + 2]
        both = await asyncio.gather(*(call(first) for first in range(0, 8, 2)))
        assert [text for texts in both for text in texts] == alone
        # A generator that has given its last frame ends, and takes nothing of another's.
        streams = [client.generate(MODEL, prompt_token_ids=p, max_tokens=3) for p in prompts]
        for stream in streams:
            frames = [frame async for frame in stream]
            assert [frame["finish_reason"] for frame in frames[:-1]] == [None] * (len(frames) - 1)
            assert frames[-1]["finish_reason"] in {"length", "stop"}
            assert [frame async for frame in stream] == []


async def test_case_43_a_huge_body_does_not_hold_up_the_others(
    stub_mesh: Mesh, stub_client: Client
) -> None:
    """5 MB and 27 MB of chat, while the probes answer and a stream runs to its end."""
    url = stub_mesh.http_url
    async with httpx.AsyncClient(base_url=url, timeout=60) as http:
        stream = asyncio.create_task(greedy(stub_client, [3] * 5, 100))
        for size, allowed in ((5 << 20, {400, 413}), (27 << 20, {413})):
            message = {"role": "user", "content": "word " * (size // 5)}
            body = {"model": MODEL, "messages": [message]}
            asking = asyncio.create_task(http.post("/v1/chat/completions", json=body))
            async with httpx.AsyncClient(base_url=url, timeout=5) as probe:
                while not asking.done():
                    assert (await probe.get("/livez")).status_code == 200
                    assert (await probe.get("/readyz")).status_code == 200
                    await asyncio.sleep(0.02)
            assert (await asking).status_code in allowed
        assert len((await stream).token_ids) == 100
        short = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
        moved = await http.post(
            "/v1/chat/completions", json=short | {"chat_template_kwargs": {"tokenize": True}}
        )
        assert (moved.status_code, "chat_template_kwargs" in moved.text) == (400, True)


async def test_a_storm_of_cancels(stub_mesh: Mesh, stub_beats: Beats) -> None:
    """400 requests, each cancelled at another moment of its life; nothing is left of them."""

    async def start_and_leave(client: Client, number: int) -> None:
        request_id = f"storm-{number}"
        fields = {"prompt_token_ids": [number + 1] * (number % 60 + 1), **LONG}
        asking = asyncio.create_task(ask(client, request_id=request_id, **fields))
        for _ in range(number % 9):
            await asyncio.sleep(0.004)
        await client.cancel(request_id)
        answer = await asking
        assert answer.last["finish_reason"] == "abort"

    async with Client(stub_mesh.nats_url) as client:
        await asyncio.gather(*(start_and_leave(client, number) for number in range(400)))
        await stub_beats.until(is_quiet)
        pool = stub_beats.pool
        assert pool.num_free + pool.num_leased + pool.num_cached == pool.num_blocks - 1
        assert len((await greedy(client, [1, 2], 3)).token_ids) == 3


async def test_a_flood(stub_mesh: Mesh, stub_beats: Beats) -> None:
    """300 at once on 64 lanes: every one gets what it would get alone."""
    prompts = [[number % 7 + 1] * (number % 5 + 1) for number in range(300)]
    async with Client(stub_mesh.nats_url) as client:
        alone = {tuple(p): (await greedy(client, p, 9)).token_ids for p in prompts[:35]}
        answers = await asyncio.gather(*(greedy(client, prompt, 9) for prompt in prompts))
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.token_ids == alone[tuple(prompt)]
    await stub_beats.until(is_quiet)


async def test_a_reader_that_does_not_read(stub_mesh: Mesh, stub_beats: Beats) -> None:
    """Its connection fills up; others go on, and when it leaves, all that it held is free."""
    body = json.dumps({"model": MODEL, "prompt": "Hi", "stream": True, **LONG}).encode()
    host, _, port = stub_mesh.http_url.removeprefix("http://").partition(":")
    _reader, writer = await asyncio.open_connection(host, int(port), limit=1024)
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    writer.write(head.encode() + body)
    await stub_beats.until(lambda beats: beats.engine.num_running == 1)
    async with Client(stub_mesh.nats_url) as client:
        for _ in range(20):
            assert len((await greedy(client, [1, 2, 3], 5)).token_ids) == 5
    writer.transport.abort()
    await stub_beats.until(is_quiet)


async def test_deadline(stub_client: Client, stub_beats: Beats) -> None:
    with pytest.raises(StreetcarClientError) as caught:
        await ask(stub_client, prompt="Hi", deadline_ms=200, **LONG)
    assert (caught.value.code, caught.value.status) == ("deadline_exceeded", 504)
    await stub_beats.until(is_quiet)


# ---- what is asked for


async def test_the_salt_parts_the_prefix_cache(stub_client: Client) -> None:
    """Same salt hits, another does not (CVE-2025-46570)."""
    prompt = list(range(1000, 1161))
    cached = []
    for salt in ("a", "b", "b", "a"):
        answer = await greedy(stub_client, prompt, 2, cache_salt=salt)
        cached.append(answer.usage["cached_tokens"])
    assert cached == [0, 0, 160, 160]


async def test_a_prompt_as_long_as_the_context(stub_client: Client) -> None:
    answer = await greedy(stub_client, [7] * 8191, 1)
    assert answer.usage["prompt_tokens"] == 8191
    assert len(answer.token_ids) == 1


async def test_max_tokens_is_what_the_context_leaves(narrow_mesh: Mesh) -> None:
    """Without `max_tokens`, a pool smaller than the context must still be usable, or say why
    not.
    """
    async with Client(narrow_mesh.nats_url) as client:
        with pytest.raises(StreetcarClientError) as caught:
            await ask(client, prompt="Hi", ignore_eos=True)
    assert caught.value.code == "never_fits"


async def test_metrics_and_health(http: httpx.AsyncClient) -> None:
    assert (await http.get("/livez")).json() == {"live": True}
    assert (await http.get("/readyz")).json() == {"ready": True, "missing": []}
    models = (await http.get("/v1/models")).json()["data"]
    assert [(model["id"], model["max_model_len"]) for model in models] == [(MODEL, 8192)]
    body = {"model": MODEL, "prompt": "count me", "max_tokens": 7}
    before = await _metric(http, "vllm:generation_tokens_total")
    await http.post("/v1/completions", json=body)
    assert await _metric(http, "vllm:generation_tokens_total") == before + 7
    assert await _metric(http, "vllm:kv_cache_usage_perc") <= 1


async def _metric(http: httpx.AsyncClient, name: str) -> float:
    lines = (await http.get("/metrics")).text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name + "{"))


# ---- the official client


@pytest.fixture
async def openai(stub_mesh: Mesh) -> AsyncIterator[AsyncOpenAI]:
    url = f"{stub_mesh.http_url}/v1"
    async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client


async def test_openai_completions(openai: AsyncOpenAI) -> None:
    assert [model.id async for model in openai.models.list()] == [MODEL]
    whole = await openai.completions.create(
        model=MODEL, prompt=["one", "two"], n=2, max_tokens=6, seed=5
    )
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 24
    assert whole.usage.prompt_tokens == 6
    stream = await openai.completions.create(
        model=MODEL,
        prompt="one",
        n=2,
        max_tokens=6,
        seed=5,
        stream=True,
        stream_options={"include_usage": True},
    )
    texts, usage = ["", ""], None
    async for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [choice.text for choice in whole.choices[:2]]
    assert usage is not None
    assert usage.completion_tokens == 12


async def test_openai_errors(openai: AsyncOpenAI) -> None:
    with pytest.raises(BadRequestError, match="temperature"):
        await openai.completions.create(model=MODEL, prompt="Hi", temperature=-1)
    with pytest.raises(NotFoundError, match=MODEL):
        await openai.completions.create(model="gpt-9", prompt="Hi")


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.timeout(240)
async def test_openai_chat(small_steps_mesh: Mesh) -> None:
    url = f"{small_steps_mesh.http_url}/v1"
    messages: Any = [{"role": "user", "content": "What is the capital of France?"}]
    async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        whole = await client.chat.completions.create(
            model=MODEL,
            messages=messages,
            max_tokens=12,
            temperature=0,
            logprobs=True,
            top_logprobs=2,
        )
        stream = await client.chat.completions.create(
            model=MODEL, messages=messages, max_tokens=12, temperature=0, stream=True
        )
        parts = [chunk.choices[0] async for chunk in stream]
    [choice] = whole.choices
    assert "Paris" in (choice.message.content or "")
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    entries = choice.logprobs.content
    assert "".join(entry.token for entry in entries) == choice.message.content
    assert all(len(entry.top_logprobs) == 2 for entry in entries)
    assert parts[0].delta.role == "assistant"
    assert "".join(part.delta.content or "" for part in parts) == choice.message.content
    assert parts[-1].finish_reason == choice.finish_reason
