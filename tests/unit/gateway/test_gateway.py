"""The gateway as a process, on a real bus, before a fake admission, asked by OpenAI's client."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from openai import APIError, AsyncOpenAI, BadRequestError, NotFoundError, RateLimitError

from services.contracts.errors import ErrorCode
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
from tests.unit.gateway.exposition import samples

pytestmark = [pytest.mark.nats, pytest.mark.asyncio(loop_scope="module")]

ROOT = Path(__file__).parents[3]
BEAT_S = 0.1
TEXT = "t0 t1 t2 "


class Process:
    """`python -m services.gateway`, ready."""

    def __init__(self, process: asyncio.subprocess.Process, url: str) -> None:
        self.process = process
        self.url = url


@contextlib.asynccontextmanager
async def gateway_process(nats_url: str, **settings: str) -> AsyncIterator[Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "services.gateway"),
        cwd=ROOT,
        env={**os.environ, "STREETCAR_NATS_URL": nats_url, **settings},
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(20):
            status = json.loads(await process.stdout.readline())
        assert status["event"] == "ready", status
        yield Process(process, status["fields"]["http_url"])
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def get_json(url: str) -> tuple[int, Any]:
    async with httpx.AsyncClient() as http:
        answer = await http.get(url)
        return answer.status_code, answer.json()


async def until_ready(url: str) -> None:
    async with asyncio.timeout(10):
        while (await get_json(f"{url}/readyz"))[0] != 200:
            await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def beating(fake: FakeAdmission) -> AsyncIterator[None]:
    async def beat() -> None:
        while True:
            await fake.beat_as_mesh(num_running=1, num_blocks_held=10)
            await asyncio.sleep(BEAT_S)

    task = asyncio.create_task(beat())
    try:
        yield
    finally:
        task.cancel()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[FakeAdmission]:
    run_dir = tmp_path_factory.mktemp("nats")
    async with (
        NatsServer(run_dir) as server,
        FakeAdmission(server.url) as fake,
        gateway_process(server.url) as gateway,
        beating(fake),
    ):
        await until_ready(gateway.url)
        fake.gateway_url = gateway.url
        yield fake


@pytest_asyncio.fixture(loop_scope="module")
async def fake(mesh: FakeAdmission) -> FakeAdmission:
    mesh.reset()
    return mesh


@pytest_asyncio.fixture(loop_scope="module")
async def openai(fake: FakeAdmission) -> AsyncIterator[AsyncOpenAI]:
    url = f"{fake.gateway_url}/v1"
    async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client


@pytest_asyncio.fixture(loop_scope="module")
async def http(fake: FakeAdmission) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=fake.gateway_url, timeout=10) as client:
        yield client


async def metrics(http: httpx.AsyncClient) -> dict[str, float]:
    return samples((await http.get("/metrics")).content)


# --- answers ---


async def test_a_completion(fake: FakeAdmission, openai: AsyncOpenAI) -> None:
    answer = await openai.completions.create(
        model=MODEL, prompt="hi", max_tokens=3, extra_body={"top_k": 7, "ignore_eos": True}
    )
    assert answer.id.startswith("cmpl-")
    assert answer.object == "text_completion"
    assert answer.choices[0].text == TEXT
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (5, 8)
    (request,) = fake.requests
    assert request.pop("seed") >= 0
    assert request == {
        "request_id": answer.id.removeprefix("cmpl-") + "-0",
        "prompt": "hi",
        "max_tokens": 3,
        "top_k": 7,
        "ignore_eos": True,
    }


async def test_a_chat(fake: FakeAdmission, openai: AsyncOpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    answer = await openai.chat.completions.create(
        model=MODEL, messages=messages, logprobs=True, top_logprobs=2
    )
    assert answer.id.startswith("chatcmpl-")
    choice = answer.choices[0]
    assert (choice.message.role, choice.message.content) == ("assistant", TEXT)
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert [entry.token for entry in choice.logprobs.content] == ["t0 ", "t1 ", "t2 "]
    assert [top.token for top in choice.logprobs.content[0].top_logprobs] == ["r0", "r1"]
    assert choice.logprobs.content[0].bytes == list(b"t0 ")
    assert fake.requests[0]["messages"] == messages
    back = [*messages, choice.message.model_dump(), messages[0]]
    assert await openai.chat.completions.create(model=MODEL, messages=back)


async def test_completion_logprobs_are_aligned(openai: AsyncOpenAI) -> None:
    answer = await openai.completions.create(model=MODEL, prompt="hi", max_tokens=3, logprobs=1)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == ["t0 ", "t1 ", "t2 "]
    assert logprobs.text_offset == [0, 3, 6]
    assert logprobs.token_logprobs == [-0.5] * 3
    assert logprobs.top_logprobs is not None
    assert logprobs.top_logprobs[0] == {"r0": -1.0, "t0 ": -0.5}
    stream = await openai.completions.create(
        model=MODEL, prompt="hi", max_tokens=3, logprobs=1, stream=True
    )
    offsets = [chunk.choices[0].logprobs.text_offset async for chunk in stream]  # type: ignore[union-attr]
    assert offsets == [[0], [3], [6]]


async def test_prompt_logprobs(fake: FakeAdmission, http: httpx.AsyncClient) -> None:
    async def script(fake: FakeAdmission, request: Request, reply: str) -> None:
        entry = {"token_id": 4, "token": "x", "logprob": -2.0, "top": []}
        await fake.send(
            reply,
            request,
            0,
            text="a",
            token_ids=[1],
            prompt_logprobs=[None, entry],
            finish_reason="length",
            usage=usage(request, 1),
        )

    fake.script = script
    body = {"model": MODEL, "prompt": "hi", "prompt_logprobs": 0}
    answer = (await http.post("/v1/completions", json=body)).json()
    expected = [None, {"4": {"logprob": -2.0, "decoded_token": "x"}}]
    assert answer["choices"][0]["prompt_logprobs"] == expected


async def test_choices_and_prompts(fake: FakeAdmission, openai: AsyncOpenAI) -> None:
    answer = await openai.completions.create(
        model=MODEL, prompt=["a", "b"], n=2, seed=42, extra_body={"cache_salt": "s"}
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.usage is not None
    # 16 tokens where no number is named; each prompt counts once.
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (10, 64)
    by_id = {request["request_id"].rpartition("-")[2]: request for request in fake.requests}
    assert [by_id[str(index)]["prompt"] for index in range(4)] == ["a", "a", "b", "b"]
    seeds = [by_id[str(index)]["seed"] for index in range(4)]
    assert seeds[0] == seeds[2] == 42
    assert seeds[1] == seeds[3] != 42
    assert {request["cache_salt"] for request in fake.requests} == {"s"}


async def test_a_chat_stream(openai: AsyncOpenAI) -> None:
    stream = await openai.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "hi"}], n=2, stream=True
    )
    chunks = [chunk async for chunk in stream]
    assert [chunk.choices[0].delta.role for chunk in chunks[:2]] == ["assistant"] * 2
    assert all(chunk.choices[0].delta.role is None for chunk in chunks[2:])
    for index in range(2):
        mine = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == index]
        assert "".join(choice.delta.content or "" for choice in mine) == TEXT
        assert [choice.finish_reason for choice in mine] == [None, None, None, "length"]
    assert len({chunk.id for chunk in chunks}) == 1


@pytest.mark.parametrize("route", ["completions", "chat/completions"])
@pytest.mark.parametrize("include_usage", [True, False])
async def test_case_17_usage_comes_once_and_only_on_request(
    http: httpx.AsyncClient, route: str, include_usage: bool
) -> None:
    body: dict[str, Any] = {"model": MODEL, "max_tokens": 3, "stream": True}
    if route == "completions":
        body["prompt"] = "hi"
    else:
        body["messages"] = [{"role": "user", "content": "hi"}]
    if include_usage:
        body["stream_options"] = {"include_usage": True}
    answer = await http.post(f"/v1/{route}", json=body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    *events, done, rest = answer.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    assert all(chunk.get("usage") is None for chunk in chunks if chunk["choices"])
    totals = [chunk["usage"] for chunk in chunks if not chunk["choices"]]
    expected = {
        "prompt_tokens": 5,
        "completion_tokens": 3,
        "total_tokens": 8,
        "prompt_tokens_details": {"cached_tokens": 2},
    }
    assert totals == ([expected] if include_usage else [])


# --- refusals ---


def error_of(answer: httpx.Response) -> dict[str, Any]:
    assert answer.headers["content-type"] == "application/json"
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "not JSON"),
        (b"[1]", "must be a JSON object"),
        (b"", "not JSON"),
        (b'{"model": "toy", "prompt": "\xff"}', "not JSON"),
        (b'{"model": "toy"}', "`prompt`"),
        (b'{"model": "toy", "prompt": "a", "n": 1000000}', "`n` must be at most 16"),
        (b'{"model": "toy", "prompt": "a", "temperature": NaN}', "not JSON"),
        (b"[" * 100_000, "not JSON|must be a JSON object"),
    ],
)
async def test_bad_bodies(
    fake: FakeAdmission, http: httpx.AsyncClient, content: bytes, message: str
) -> None:
    answer = await http.post("/v1/completions", content=content)
    error = error_of(answer)
    assert answer.status_code == 400
    assert any(part in error["message"] for part in message.split("|"))
    assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_request")
    assert fake.requests == []


async def test_the_field_at_fault_is_the_param(openai: AsyncOpenAI) -> None:
    with pytest.raises(BadRequestError) as caught:
        await openai.completions.create(model=MODEL, prompt="hi", stop=["ok", ""])
    assert caught.value.param == "stop"
    assert "may not be empty" in caught.value.message


async def test_unknown_models_are_refused_with_the_known_ones(openai: AsyncOpenAI) -> None:
    with pytest.raises(NotFoundError, match="known: toy") as caught:
        await openai.completions.create(model="gpt-99", prompt="hi")
    assert caught.value.code == "model_not_found"
    with pytest.raises(NotFoundError, match="known: toy"):
        await openai.models.retrieve("gpt-99")


async def test_models(openai: AsyncOpenAI) -> None:
    assert [model.id async for model in openai.models.list()] == [MODEL]
    assert (await openai.models.retrieve(MODEL)).owned_by == "streetcar"


@pytest.mark.parametrize("stream", [True, False])
async def test_errors_of_the_mesh_are_statuses(
    fake: FakeAdmission, openai: AsyncOpenAI, stream: bool
) -> None:
    fake.script = failing(ErrorCode.QUEUE_FULL, "1024 requests wait")
    with pytest.raises(RateLimitError, match="1024 requests wait") as caught:
        await openai.completions.create(model=MODEL, prompt="hi", stream=stream, n=2)
    assert caught.value.response.headers["retry-after"] == "1"
    assert caught.value.code == "queue_full"


async def test_an_error_in_a_stream_is_an_event(fake: FakeAdmission, openai: AsyncOpenAI) -> None:
    async def script(fake: FakeAdmission, request: Request, reply: str) -> None:
        await fake.send(reply, request, 0, text="a", token_ids=[0])
        await failing(ErrorCode.NUMERICS, "not finite")(fake, request, reply)

    fake.script = script
    stream = await openai.completions.create(model=MODEL, prompt="hi", stream=True)
    with pytest.raises(APIError, match="not finite"):
        async for chunk in stream:
            assert chunk.choices[0].text == "a"


@pytest.mark.parametrize("declared", [True, False])
async def test_a_body_over_the_bus_limit(
    fake: FakeAdmission, http: httpx.AsyncClient, declared: bool
) -> None:
    size = 9 << 20
    body = b'{"model": "toy", "prompt": "' + b"x" * size + b'"}'

    async def chunks() -> AsyncIterator[bytes]:
        for start in range(0, len(body), 1 << 20):
            yield body[start : start + (1 << 20)]

    answer = await http.post("/v1/completions", content=body if declared else chunks())
    error = error_of(answer)
    assert answer.status_code == 413
    assert error["code"] == "payload_too_large"
    assert str(len(body)) in error["message"]
    assert str(8 << 20) in error["message"]
    assert fake.requests == []


async def test_a_body_that_claims_to_be_endless_is_not_read(fake: FakeAdmission) -> None:
    host, port = fake.gateway_url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\ncontent-length: 99999999999\r\n\r\n"
    )
    async with asyncio.timeout(5):
        assert b"413" in await reader.readline()
    writer.close()


async def test_unknown_paths_and_methods_answer_json(http: httpx.AsyncClient) -> None:
    missing = await http.get("/v2/nothing")
    assert missing.status_code == 404
    assert "/v2/nothing" in error_of(missing)["message"]
    wrong = await http.get("/v1/completions")
    assert wrong.status_code == 405
    assert wrong.headers["allow"] == "POST"
    error_of(wrong)


# --- clients that leave ---


@pytest.mark.parametrize("num_choices", [1, 3])
@pytest.mark.parametrize(
    ("stream", "script"),
    [(True, one_token_then_wait), (True, silence), (False, one_token_then_wait), (False, silence)],
)
async def test_cases_08_and_19_a_client_that_leaves_cancels(
    fake: FakeAdmission, http: httpx.AsyncClient, num_choices: int, stream: bool, script: Any
) -> None:
    fake.script = script
    name = f'vllm:request_success_total{{finished_reason="abort",model_name="{MODEL}"}}'
    before = (await metrics(http)).get(name, 0)
    body = {"model": MODEL, "prompt": "hi", "stream": stream, "n": num_choices}
    async with httpx.AsyncClient(base_url=fake.gateway_url) as leaving:

        async def ask() -> None:
            async with leaving.stream("POST", "/v1/completions", json=body) as answer:
                async for _ in answer.aiter_bytes():
                    pass

        task = asyncio.create_task(ask())
        await fake.until(lambda: len(fake.requests) == num_choices)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    await fake.until(lambda: len(fake.cancelled) == num_choices)
    assert sorted(fake.cancelled) == sorted(request["request_id"] for request in fake.requests)
    assert (await metrics(http))[name] == before + num_choices


# --- health and metrics ---


async def test_case_50_intervals_are_positive_and_ordered(
    openai: AsyncOpenAI, http: httpx.AsyncClient
) -> None:
    before = await metrics(http)
    started = time.monotonic()
    for _ in range(2):
        stream = await openai.completions.create(model=MODEL, prompt="hi", stream=True)
        assert [chunk async for chunk in stream]
        await openai.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "hi"}]
        )
    took = time.monotonic() - started
    after = await metrics(http)

    def rise(name: str) -> float:
        key = f'vllm:{name}{{model_name="{MODEL}"}}'
        return after[key] - before.get(key, 0)

    assert rise("e2e_request_latency_seconds_count") == 4
    first = rise("time_to_first_token_seconds_sum")
    assert 0 < first <= rise("e2e_request_latency_seconds_sum") < took
    assert rise("prompt_tokens_total") == 20
    assert after[f'vllm:num_requests_running{{engine="s",model_name="{MODEL}"}}'] == 1
    assert after[f'vllm:kv_cache_usage_perc{{engine="s",model_name="{MODEL}"}}'] == 0.1


async def test_health(http: httpx.AsyncClient) -> None:
    assert (await http.get("/livez")).json() == {"live": True}
    assert (await http.get("/readyz")).json() == {"ready": True, "missing": []}


async def test_a_gateway_without_a_mesh_says_what_is_missing(tmp_path: Path) -> None:
    async with NatsServer(tmp_path) as server, gateway_process(server.url) as gateway:
        status, answer = await get_json(f"{gateway.url}/readyz")
        assert status == 503
        assert [text.partition(":")[0] for text in answer["missing"]] == [
            "route",
            "worker",
            "blocks",
        ]
        async with httpx.AsyncClient(base_url=gateway.url) as http:
            body = {"model": MODEL, "prompt": "hi"}
            refused = await http.post("/v1/completions", json=body)
            assert refused.status_code == 503
            assert refused.headers["retry-after"] == "1"
            assert error_of(refused)["code"] == "no_worker"


async def test_a_stop_finishes_what_has_begun(tmp_path: Path) -> None:
    async with (
        NatsServer(tmp_path) as server,
        FakeAdmission(server.url) as fake,
        gateway_process(server.url) as gateway,
    ):
        fake.script = one_token_then_wait
        async with AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none") as openai:
            stream = await openai.completions.create(model=MODEL, prompt="hi", stream=True)
            chunks = aiter(stream)
            assert (await anext(chunks)).choices[0].text == "t0 "
            gateway.process.send_signal(signal.SIGTERM)
            fake.resume.set()
            assert (await anext(chunks)).choices[0].finish_reason == "length"
        async with asyncio.timeout(5):
            assert await gateway.process.wait() == 0


async def test_a_taken_port_is_said(tmp_path: Path, fake: FakeAdmission) -> None:
    port = fake.gateway_url.rpartition(":")[2]
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "services.gateway"),
        cwd=ROOT,
        env={**os.environ, "STREETCAR_NATS_URL": fake.url, "STREETCAR_HTTP_PORT": port},
        stdout=asyncio.subprocess.PIPE,
    )
    output, _ = await process.communicate()
    status = json.loads(output)
    assert (process.returncode, status["event"]) == (1, "fatal")
    assert port in status["message"]


async def test_a_reader_that_does_not_read_loses_its_request_and_nobody_elses(
    fake: FakeAdmission, http: httpx.AsyncClient
) -> None:
    num_frames, text = 8192, "x" * 2000

    async def flood(fake: FakeAdmission, request: Request, reply: str) -> None:
        if request["prompt"] != "flood":
            await answer(fake, request, reply)
            return
        for index in range(num_frames):
            await fake.send(reply, request, index, text=text, token_ids=[index])

    fake.script = flood
    address = httpx.URL(fake.gateway_url)
    reader, writer = await asyncio.open_connection(address.host, address.port)
    try:
        asked = json.dumps({"model": MODEL, "prompt": "flood", "stream": True}).encode()
        lines = ["POST /v1/completions HTTP/1.1", "Host: localhost"]
        head = "\r\n".join([*lines, f"Content-Length: {len(asked)}", "", ""])
        writer.write(head.encode() + asked)
        # The stream reader of asyncio stops reading by itself once its buffer is full.
        await fake.until(lambda: len(fake.cancelled) == 1)
        body = {"model": MODEL, "prompt": "hi", "max_tokens": 3}
        other = await http.post("/v1/completions", json=body)
        assert other.json()["choices"][0]["text"] == TEXT
        async with asyncio.timeout(20):
            tail = b""
            while b"[DONE]" not in tail:
                tail = tail[-500:] + await reader.read(1 << 16)
        assert b'"slow_client"' in tail
    finally:
        writer.close()
