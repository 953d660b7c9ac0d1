"""Real admissions die, sleep and leave in mid-stream: every stream goes on exactly. Clients that
vanish free their lanes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import nats
import pytest

from services.client import Client
from tests.process.mesh import GENERATE, MODEL, WAIT_S, Answer, Mesh, greedy, heartbeats, is_quiet

pytestmark = pytest.mark.nats

NUM_STREAMS = 6
MODULE = "services.admission"
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
    for _ in range(2):
        async with streams(mesh):
            http = [asyncio.create_task(over_http(mesh)) for _ in range(2)]
            os.kill(mesh.child_pid(MODULE), signal.SIGKILL)
            assert await asyncio.gather(*http) == [expected] * 2


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
