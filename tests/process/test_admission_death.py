"""Real admissions die, sleep and leave in mid-stream: every stream goes on exactly. Clients that
vanish free their lanes.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import secrets
import signal
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

import httpx
import nats
import pytest

from services.cli.bus import connect
from services.cli.trace import ask, gather
from services.client import Client, Span
from services.contracts.spans import SpanKind, SpanRecord
from services.contracts.subjects import Subjects
from tests.process.mesh import (
    GENERATE,
    MODEL,
    WAIT_S,
    Answer,
    Mesh,
    greedy,
    heartbeats,
    is_quiet,
    observer_url,
)

pytestmark = pytest.mark.nats

NUM_STREAMS = 6
MODULE = "services.admission"
PREFIX = "streetcar.v1"
PROMPT = [5, 6]
NUM_TOKENS = 300
LONG = 1000
"""Tokens of 5 ms each: longer than a drain and a sleep."""


@pytest.fixture(scope="module")
def twin_mesh(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Iterator[Mesh]:
    """A stub mesh with two admissions."""
    folder = tmp_path_factory.mktemp("twins")
    arguments = ("--worker", "stub", "--num-admissions", "2")
    mesh = Mesh.up(*arguments, folder=folder, STREETCAR_CACHE_DIR=str(cache))
    yield mesh
    mesh.pids = {}
    assert mesh.interrupt() == 0, mesh.stderr
    assert "Traceback" not in mesh.logs() + mesh.stderr


async def _stream(client: Client, num_tokens: int, begun: asyncio.Event) -> list[int]:
    answer = Answer()
    async for frame in client.generate(
        MODEL, prompt_token_ids=PROMPT, max_tokens=num_tokens, temperature=0.0, ignore_eos=True
    ):
        answer.add(frame)
        begun.set()
    return answer.token_ids


@contextlib.asynccontextmanager
async def streams(
    mesh: Mesh, num_tokens: int = NUM_TOKENS
) -> AsyncIterator[list[asyncio.Task[list[int]]]]:
    """Streams in mid-flight; at the end each is complete and equal to one without faults."""
    async with Client(mesh.nats_url) as client, heartbeats(mesh.nats_url) as beats:
        expected = (await greedy(client, PROMPT, num_tokens)).token_ids

        begun = [asyncio.Event() for _ in range(NUM_STREAMS)]
        running = [asyncio.create_task(_stream(client, num_tokens, event)) for event in begun]
        async with asyncio.timeout(WAIT_S):
            await asyncio.gather(*(event.wait() for event in begun))
        yield running
        async with asyncio.timeout(2 * WAIT_S):
            assert await asyncio.gather(*running) == [expected] * NUM_STREAMS
        await beats.until(is_quiet)


async def over_http(mesh: Mesh) -> str:
    """The text of one stream through the gateway."""
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": NUM_TOKENS, "stream": True}
    text = ""
    async with (
        httpx.AsyncClient(base_url=mesh.http_url, timeout=WAIT_S) as http,
        http.stream(
            "POST", "/v1/completions", json=body | {"temperature": 0, "ignore_eos": True}
        ) as response,
    ):
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                text += json.loads(line[6:])["choices"][0]["text"]
    return text


async def test_an_admission_is_killed_and_another_goes_on(twin_mesh: Mesh) -> None:
    mesh = twin_mesh
    expected = await over_http(mesh)
    async with streams(mesh):
        http = [asyncio.create_task(over_http(mesh)) for _ in range(2)]
        os.kill(mesh.child_pid(MODULE), signal.SIGKILL)
        assert await asyncio.gather(*http) == [expected] * 2


async def test_the_trace_of_a_request_that_another_admission_adopts(twin_mesh: Mesh) -> None:
    """One trace id from the client on; what the dead admission had closed and shared is in it."""
    adopted: list[str] = []
    # All of a round may have been at the other one.
    while not adopted:
        clients: list[Span] = []
        owners = await _adopted_round(twin_mesh, clients)
        url = observer_url(twin_mesh.nats_url)
        found = await asyncio.gather(*(gather(url, PREFIX, own["request_id"]) for own in clients))
        spans = {own["request_id"]: of for own, (of, _) in zip(clients, found, strict=True)}
        adopted = [request_id for request_id, of in spans.items() if len(_admissions(of)) == 2]
    assert len({owners[request_id] for request_id in adopted}) == 1
    for client in clients:
        if client["request_id"] in adopted:
            check_adopted(client, spans[client["request_id"]], dead=owners[client["request_id"]])


async def _adopted_round(mesh: Mesh, spans: list[Span]) -> dict[str, str]:
    """Streams that lose one admission -> by request, which admission had it at first."""
    request_ids = [secrets.token_hex(8) for _ in range(NUM_STREAMS)]
    async with Client(mesh.nats_url, on_span=spans.append) as client:
        asked = [greedy(client, PROMPT, 2 * NUM_TOKENS, request_id=name) for name in request_ids]
        running = asyncio.gather(*asked)
        owners = await _owners(mesh, request_ids)
        os.kill(mesh.child_pid(MODULE), signal.SIGKILL)
        async with asyncio.timeout(2 * WAIT_S):
            answers = await running
    assert {len(answer.token_ids) for answer in answers} == {2 * NUM_TOKENS}
    return owners


async def _owners(mesh: Mesh, request_ids: Sequence[str]) -> dict[str, str]:
    """Which admission has each of the requests, once its first spans were shared."""
    subjects, owners = Subjects(PREFIX), dict[str, str]()
    async with asyncio.timeout(WAIT_S), connect(observer_url(mesh.nats_url)) as connection:
        while owners.keys() != set(request_ids):
            asked = (ask(connection, subjects.trace(name)) for name in request_ids)
            for reply in itertools.chain(*await asyncio.gather(*asked)):
                # Its keeper, not its maker: then it outlives the admission.
                owners |= {
                    span.request_id: span.service
                    for span in reply.spans
                    if span.name == "await first token" and reply.service.startswith("gateway/")
                }
    return owners


def _admissions(spans: Sequence[SpanRecord]) -> set[str]:
    return {span.service for span in spans if span.service.startswith("admission/")}


def check_adopted(client: Span, spans: Sequence[SpanRecord], *, dead: str) -> None:
    own = [span for span in spans if not span.links]
    assert {span.trace_id for span in own} == {client["trace_id"]}
    assert client["attributes"]["gen_ai.response.finish_reasons"] == "length"
    assert {s.name for s in own if s.service == dead} >= {"tokenise", "await first token"}
    # The dead one's request is the only span that nobody could close: the others' are below it.
    (request,) = [span for span in own if span.kind is SpanKind.CONSUMER]
    known = {span.span_id for span in own} | {client["span_id"]}
    assert {span.parent_id for span in own} - known == {request.parent_id}
    phases = [s for s in own if s.service == request.service and s is not request]
    assert {span.name for span in phases} == {"recover", "stream"}
    assert sum(span.duration_ns for span in phases) == request.duration_ns
    # The scheduler has computed it all, undisturbed.
    names = [span.name for span in own if span.service.startswith("scheduler/")]
    assert sorted(set(names) - {"kv lookup", "hold"}) == sorted(
        ["decode", "first token", "prefill", "prefill chunk", "queue"]
    )
    end_ns = client["start_unix_ns"] + client["duration_ns"]
    slack_ns = 0.02 * client["duration_ns"]
    for span in own:
        assert client["start_unix_ns"] - slack_ns <= span.start_unix_ns, span
        assert span.start_unix_ns + span.duration_ns <= end_ns + slack_ns, span


async def test_an_admission_that_slept_says_nothing_that_is_not_its_own(twin_mesh: Mesh) -> None:
    pid = twin_mesh.child_pid(MODULE)
    async with streams(twin_mesh, LONG) as running, heartbeats(twin_mesh.nats_url) as beats:
        os.kill(pid, signal.SIGSTOP)
        # The other one has adopted what was its own.
        await beats.until(lambda beats: beats.num_open == NUM_STREAMS)
        os.kill(pid, signal.SIGCONT)
        assert not any(task.done() for task in running)


async def test_an_admission_that_leaves_fails_nobody(twin_mesh: Mesh) -> None:
    async with streams(twin_mesh, LONG):
        os.kill(twin_mesh.child_pid(MODULE), signal.SIGTERM)


async def test_a_client_that_vanishes_frees_its_lanes(twin_mesh: Mesh) -> None:
    connection = await nats.connect(twin_mesh.nats_url)
    inbox = connection.new_inbox()
    request = {"prompt": "Hi", "max_tokens": 8000, "ignore_eos": True}
    async with heartbeats(twin_mesh.nats_url) as beats:
        subscription = await connection.subscribe(inbox)
        for _ in range(3):
            await connection.publish(GENERATE, json.dumps(request).encode(), reply=inbox)
        await beats.until(lambda beats: beats.engine.num_running == 3)
        await subscription.next_msg(WAIT_S)
        await connection.close()
        await beats.until(is_quiet)
