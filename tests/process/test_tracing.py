"""What can be seen of a real mesh: whole traces whatever dies, honest metrics, and no secret."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Final

import httpx
import msgspec
import nats
import pytest

from services.cli.trace import gather
from services.contracts.spans import SpanRecord
from services.runtime.nats_server import NatsServer
from tests.process.conftest import running
from tests.process.mesh import (
    MODEL,
    WAIT_S,
    Beats,
    Mesh,
    command,
    environment,
    heartbeats,
    is_quiet,
    observer_url,
    run,
)
from tests.unit.gateway.exposition import samples

TOLERANCE: Final = 0.02
PREFIX: Final = "streetcar.v1"
CANARY: Final = "canary7f3a"
COMPLETIONS: Final = "/v1/completions"
CHAT: Final = "/v1/chat/completions"


@pytest.fixture(scope="module")
def traced_mesh(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Iterator[Mesh]:
    """No model; chunks of 32 tokens, 63 blocks of 16, which three long answers do not fit."""
    yield from running(
        tmp_path_factory.mktemp("traced"),
        cache,
        *("--worker", "stub", "--step-ms", "3", "--num-blocks", "64"),
        *("--max-num-batched-tokens", "32"),
        *("--max-num-seqs", "4", "--margin", "watermark", "--log-level", "debug"),
    )


@pytest.fixture
async def http(traced_mesh: Mesh) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=traced_mesh.http_url, timeout=60) as client:
        yield client


def body(first: int, prompt: int, max_tokens: int, **more: Any) -> dict[str, Any]:
    token_ids = [first + n for n in range(prompt)]
    fixed = {"model": MODEL, "ignore_eos": True, "temperature": 0}
    return {**fixed, "prompt": token_ids, "max_tokens": max_tokens, **more}


async def stream(http: httpx.AsyncClient, asked: dict[str, Any]) -> tuple[str, int]:
    """One streamed completion to its end -> its id, and how many tokens it says it has."""
    answer_id, num_tokens = "", 0
    options = {"stream": True, "stream_options": {"include_usage": True}}
    async with http.stream("POST", COMPLETIONS, json={**asked, **options}) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line.removeprefix("data: "))
                assert "error" not in chunk, chunk
                answer_id = chunk["id"]
                num_tokens = (chunk.get("usage") or {}).get("completion_tokens", num_tokens)
    return answer_id, num_tokens


async def trace_of(mesh: Mesh, answer_id: str) -> list[SpanRecord]:
    spans, notes = await gather(observer_url(mesh.nats_url), PREFIX, answer_id)
    assert not notes
    return spans


def total(spans: list[SpanRecord]) -> int:
    return sum(span.duration_ns for span in spans)


def check_whole(spans: list[SpanRecord], *, lost: int = 0) -> list[SpanRecord]:
    """One trace, every span closed and within the root, no parent missing but the phases that a
    dead scheduler had open, `lost` at most; admission's phases fill the request -> its own spans,
    those that link to it left out.
    """
    (root,) = [span for span in spans if span.kind.value == "server"]
    own = [span for span in spans if span.trace_id == root.trace_id]
    ids = {span.span_id for span in own}
    slack_ns = root.duration_ns * TOLERANCE
    orphans = [span for span in own if span is not root and span.parent_id not in ids]
    assert all(span.service.startswith("scheduler/") for span in orphans), orphans
    assert len({span.parent_id for span in orphans}) <= lost, orphans
    for span in own:
        assert root.start_unix_ns - slack_ns <= span.start_unix_ns, span
        end_ns = span.start_unix_ns + span.duration_ns
        assert end_ns <= root.start_unix_ns + root.duration_ns + slack_ns, span
    for step in spans:
        assert step in own or root.trace_id in {link.trace_id for link in step.links}
    services = {span.service.partition("/")[0] for span in spans}
    assert services == {"gateway", "admission", "scheduler", "gpu_worker"}
    phases = [s for s in own if s.service.startswith("admission/") and s.kind.value == "internal"]
    assert total(phases) == pytest.approx(root.duration_ns, rel=TOLERANCE)
    return own


def of_scheduler(spans: list[SpanRecord], *names: str) -> list[SpanRecord]:
    return [s for s in spans if s.service.startswith("scheduler/") and s.name in names]


async def with_victim(
    mesh: Mesh, http: httpx.AsyncClient, module: str, first: int
) -> tuple[str, int]:
    """A long answer that is preempted by two more urgent ones, and loses a process after that."""
    async with heartbeats(mesh.nats_url) as beats:
        before = await _preemptions(beats)
        victim = asyncio.create_task(stream(http, body(first, 96, 380, priority=10)))
        await beats.until(lambda seen: seen.engine.num_running == 1)
        others = [
            asyncio.create_task(stream(http, body(first + 1000 * n, 64, 380))) for n in (1, 2)
        ]
        await beats.until(lambda seen: seen.engine.num_preemptions > before)
        os.kill(mesh.child_pid(module), signal.SIGKILL)
        answers = await asyncio.gather(victim, *others)
    assert [num_tokens for _, num_tokens in answers] == [380] * 3
    return answers[0]


async def _preemptions(beats: Beats) -> int:
    await beats.until(is_quiet)
    return beats.engine.num_preemptions


async def test_a_chunked_preempted_request_whose_worker_dies(
    traced_mesh: Mesh, http: httpx.AsyncClient
) -> None:
    answer_id, _ = await with_victim(traced_mesh, http, "gpu_worker", 20_000)
    spans = await trace_of(traced_mesh, answer_id)
    own = check_whole(spans)
    assert len(of_scheduler(own, "prefill chunk")) >= 3
    assert of_scheduler(own, "preempted") and of_scheduler(own, "recover")
    assert len(of_scheduler(own, "first token")) == 1
    assert len({s.attributes["generation"] for s in of_scheduler(own, "prefill")}) == 2
    # The scheduler has lived through it all, so its own account is whole as well.
    phases = of_scheduler(own, "queue", "prefill", "decode", "preempted", "recover")
    (request,) = [span for span in own if span.kind.value == "consumer"]
    assert total(phases) == pytest.approx(request.duration_ns, rel=TOLERANCE)
    for before, after in itertools.pairwise(phases):
        assert before.start_unix_ns + before.duration_ns == after.start_unix_ns


async def test_a_chunked_preempted_request_whose_scheduler_dies(
    traced_mesh: Mesh, http: httpx.AsyncClient
) -> None:
    answer_id, _ = await with_victim(traced_mesh, http, "scheduler_svc", 30_000)
    own = check_whole(await trace_of(traced_mesh, answer_id), lost=1)
    # What the dead scheduler did is known from those that keep spans for others.
    assert len(of_scheduler(own, "prefill chunk")) >= 3
    assert len({s.attributes["epoch"] for s in of_scheduler(own, "queue")}) == 2
    assert [s for s in own if s.service.startswith("admission/") and s.name == "recover"]


async def test_the_waterfall_in_a_terminal(traced_mesh: Mesh, http: httpx.AsyncClient) -> None:
    trace_id = "0af7651916cd43dd8448eb211c80319c"
    headers = {"traceparent": f"00-{trace_id}-b7ad6b7169203331-01", "tracestate": "a=1"}
    answer = await http.post(COMPLETIONS, json=body(50, 40, 5), headers=headers)
    where = {"STREETCAR_NATS_URL": observer_url(traced_mesh.nats_url)}
    done = run("trace", answer.json()["id"], cwd=traced_mesh.folder, **where)
    assert done.returncode == 0, done.stderr
    for part in (trace_id, "POST /v1/completions", "tokenise", "prefill chunk", "decode", "step"):
        assert part in done.stdout, done.stdout
    unknown = run("trace", "never-seen", "--json", cwd=traced_mesh.folder, **where)
    assert unknown.returncode == 1
    assert json.loads(unknown.stdout)["error"]["code"] == "E408"


async def test_what_a_caller_does_not_sample_leaves_no_span(
    traced_mesh: Mesh, http: httpx.AsyncClient
) -> None:
    trace_id = "1" * 32
    headers = {"traceparent": f"00-{trace_id}-b7ad6b7169203331-00"}
    answer = await http.post(COMPLETIONS, json=body(70, 4, 3), headers=headers)
    assert answer.status_code == 200
    assert not await trace_of(traced_mesh, answer.json()["id"])
    assert not await trace_of(traced_mesh, trace_id)


def test_top_shows_the_engine(traced_mesh: Mesh) -> None:
    where = {"STREETCAR_NATS_URL": observer_url(traced_mesh.nats_url)}
    record = json.loads(run("top", "--once", "--json", cwd=traced_mesh.folder, **where).stdout)
    assert record["engine"] == "engine-0" and record["load"]["num_blocks_total"] == 63


def test_top_ends_with_ctrl_c(traced_mesh: Mesh) -> None:
    where = environment(STREETCAR_NATS_URL=observer_url(traced_mesh.nats_url))
    process = subprocess.Popen(
        command("top", "--json"), cwd=traced_mesh.folder, env=where, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert json.loads(process.stdout.readline())["engine"] == "engine-0"
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=WAIT_S)
    assert process.returncode == 0


async def test_top_says_when_there_is_no_engine(tmp_path: Path) -> None:
    server = NatsServer(tmp_path / "bus")
    await server.start()
    try:
        where = {"STREETCAR_NATS_URL": server.url}
        done = await asyncio.to_thread(run, "top", "--once", "--json", cwd=tmp_path, **where)
    finally:
        await server.stop()
    assert done.returncode == 1
    assert "no service" in json.loads(done.stdout)["error"]["cause"]


# ---- S19


def _canaries() -> list[tuple[str, dict[str, Any]]]:
    tool = {"id": "c1", "function": {"name": "f", "arguments": f'{{"key": "{CANARY}"}}'}}
    chat = {"model": MODEL, "max_tokens": 2}
    said = {"role": "user", "content": f"my secret is {CANARY}"}
    called = {"role": "assistant", "content": None, "tool_calls": [{**tool, "type": "function"}]}
    return [
        (COMPLETIONS, {"model": MODEL, "prompt": CANARY, "max_tokens": 2, "stop": [CANARY]}),
        (COMPLETIONS, {"model": MODEL, "prompt": CANARY * 3000, "max_tokens": 2}),
        (COMPLETIONS, {"model": MODEL, "prompt": "hi", "max_tokens": 2, "cache_salt": CANARY}),
        (COMPLETIONS, {"model": MODEL, "prompt": "hi", "temperature": CANARY}),
        (COMPLETIONS, {"model": CANARY, "prompt": "hi"}),
        (COMPLETIONS, {"model": MODEL, "prompt": "hi", CANARY: 1}),
        (CHAT, {**chat, "messages": [said]}),
        (CHAT, {**chat, "messages": [said, called, {"role": "tool", "content": CANARY}]}),
        (CHAT, {**chat, "messages": [{"role": CANARY, "content": CANARY}]}),
        (CHAT, {**chat, "messages": [said], "user": CANARY, "metadata": {"a": CANARY}}),
    ]


async def _until_served(http: httpx.AsyncClient) -> None:
    """On a busy machine an engine may be suspect for a moment."""
    async with asyncio.timeout(WAIT_S):
        while (await http.post(COMPLETIONS, json=body(5, 3, 1))).status_code != 200:
            await asyncio.sleep(0.1)


async def _tell_secrets(mesh: Mesh) -> list[str]:
    """The canary in every place that a client can put it -> ids of the answers."""
    headers = {
        "authorization": f"Bearer {CANARY}",
        "x-api-key": CANARY,
        "cookie": f"session={CANARY}",
        "user-agent": CANARY,
        "traceparent": CANARY,
        "baggage": f"key={CANARY}",
    }
    ids = []
    async with httpx.AsyncClient(base_url=mesh.http_url, headers=headers, timeout=60) as http:
        await _until_served(http)
        for path, asked in _canaries():
            answer = await http.post(path, json=asked, params={"key": CANARY})
            ids += [answer.json()["id"]] if answer.status_code == 200 else []
        for wrong in (
            b'{"prompt": "' + CANARY.encode(),
            CANARY.encode(),
            b"\x93" + CANARY.encode(),
        ):
            assert (await http.post(COMPLETIONS, content=wrong)).status_code == 400
        assert (await http.get(f"/{CANARY}")).status_code == 404
    connection = await nats.connect(mesh.nats_url)
    try:
        inbox = connection.new_inbox()
        for payload in (b'{"prompt": "' + CANARY.encode(), CANARY.encode()):
            await connection.publish(f"{PREFIX}.generate.{MODEL}", payload, reply=inbox)
            await connection.publish(f"{PREFIX}.cancel.r", payload)
        await connection.flush()
    finally:
        await connection.close()
    return ids


@pytest.mark.parametrize(
    ("name", "num_answers"),
    # The stub has no chat template.
    [("small_steps_mesh", 5), ("traced_mesh", 2)],
    ids=["info", "debug"],
)
async def test_s19_no_secret_in_logs_traces_and_metrics(
    name: str, num_answers: int, request: pytest.FixtureRequest
) -> None:
    mesh: Mesh = request.getfixturevalue(name)
    ids = await _tell_secrets(mesh)
    assert len(ids) >= num_answers
    spans = [span for answer_id in (ids[0], ids[-1]) for span in await trace_of(mesh, answer_id)]
    assert {span.service.partition("/")[0] for span in spans} >= {"gateway", "admission"}
    assert CANARY not in msgspec.json.encode(spans).decode()
    async with httpx.AsyncClient(base_url=mesh.http_url) as http:
        assert CANARY not in (await http.get("/metrics")).text
    logs = mesh.logs() + mesh.stderr
    assert '"request_ended"' in logs, "ids, sizes and timings are there"
    assert CANARY not in logs, [line for line in logs.splitlines() if CANARY in line][:3]


# ---- metrics


async def _metrics(http: httpx.AsyncClient) -> dict[str, float]:
    return samples((await http.get("/metrics")).content)


def _sum(found: dict[str, float], name: str, label: str = "") -> float:
    return sum(v for key, v in found.items() if key.startswith(f"{name}{{") and label in key)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("streamed", [False, True])
async def test_case_50_times_are_of_one_clock(
    small_steps_mesh: Mesh, path: str, streamed: bool
) -> None:
    messages = [{"role": "user", "content": "hi"}]
    asked = {"prompt": "hi"} if path == COMPLETIONS else {"messages": messages}
    fields = {"model": MODEL, "max_tokens": 4, "ignore_eos": True, "stream": streamed, **asked}
    async with httpx.AsyncClient(base_url=small_steps_mesh.http_url, timeout=60) as http:
        before, started_s = await _metrics(http), time.monotonic()
        assert (await http.post(path, json=fields)).status_code == 200
        spent_s = time.monotonic() - started_s
        after = await _metrics(http)
    first_s, whole_s = (
        _sum(after, name) - _sum(before, name)
        for name in ("vllm:time_to_first_token_seconds_sum", "vllm:e2e_request_latency_seconds_sum")
    )
    assert 0 < first_s <= whole_s < spent_s


async def test_case_51_gauges_of_an_idle_engine_are_zero(stub_mesh: Mesh) -> None:
    number = 100
    async with httpx.AsyncClient(base_url=stub_mesh.http_url, timeout=60) as http:
        before = await _metrics(http)
        limits = httpx.Limits(max_connections=number)
        many = httpx.AsyncClient(base_url=stub_mesh.http_url, timeout=60, limits=limits)
        async with many, AsyncExitStack() as streams:
            asked = [body(3 * n, 8, 4000, stream=True, ignore_eos=True) for n in range(number)]
            opened = [many.stream("POST", COMPLETIONS, json=fields) for fields in asked]
            tasks = [asyncio.ensure_future(streams.enter_async_context(s)) for s in opened]
            async with heartbeats(stub_mesh.nats_url) as beats:
                await beats.until(lambda seen: seen.num_open == number)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        async with heartbeats(stub_mesh.nats_url) as beats:
            await beats.until(is_quiet)
        async with asyncio.timeout(WAIT_S):
            while True:
                after = await _metrics(http)
                names = ("vllm:num_requests_running", "vllm:num_requests_waiting")
                gauges = [_sum(after, name) for name in (*names, "vllm:kv_cache_usage_perc")]
                aborts = [
                    _sum(found, "vllm:request_success_total", 'reason="abort"')
                    for found in (before, after)
                ]
                if gauges == [0, 0, 0] and aborts[1] - aborts[0] == number:
                    return
                await asyncio.sleep(0.1)
