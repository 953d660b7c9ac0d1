"""Any process may hang, die or leave: real processes, real signals, and every stream as it must
be.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

import httpx
import numpy as np
import pytest

from gpu_worker.build_executor import STUB_VOCAB_SIZE
from gpu_worker.shadow import expected_token_ids
from services.client import Client, StreetcarClientError
from services.runtime import failpoints
from tests.process.mesh import (
    MODEL,
    WAIT_S,
    Answer,
    Mesh,
    greedy,
    heartbeats,
    is_quiet,
    run,
    wait_until_gone,
)

pytestmark = [pytest.mark.nats, pytest.mark.slow, pytest.mark.timeout(240)]

POISON = 32_000
MODULES = {"worker": "gpu_worker", "scheduler": "scheduler_svc", "kv_store": "kv_store"}
ALL_MODULES = {**MODULES, "admission": "services.admission", "gateway": "services.gateway"}
GREEDY = {"temperature": 0, "ignore_eos": True}
NUM_STREAMS = 6
NUM_TOKENS = 250


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Iterator[Mesh]:
    """A stub mesh that a marker token kills the worker of."""
    folder = tmp_path_factory.mktemp("recovery")
    mesh = Mesh.up(
        *("--worker", "stub", "--step-ms", "10", "--num-admissions", "2"),
        folder=folder,
        STREETCAR_CACHE_DIR=str(cache),
        STREETCAR_FAULT_INJECTION="on",
        STREETCAR_POISON_TOKEN=str(POISON),
    )
    yield mesh
    mesh.pids = {name: mesh.child_pid(module) for name, module in MODULES.items()}
    assert mesh.interrupt() == 0, mesh.stderr


def _expected(prompt: list[int], count: int) -> list[int]:
    return expected_token_ids(np.array(prompt, dtype=np.int32), count, STUB_VOCAB_SIZE)


@dataclass(slots=True)
class Stream:
    """A long answer that is told to be right when it ends."""

    client: Client
    prompt: list[int]
    begun: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> None:
        answer = Answer()
        async for frame in self.client.generate(
            MODEL,
            prompt_token_ids=self.prompt,
            max_tokens=NUM_TOKENS,
            temperature=0.0,
            ignore_eos=True,
        ):
            answer.add(frame)
            self.begun.set()
        assert answer.token_ids == _expected(self.prompt, NUM_TOKENS)


@dataclass(slots=True)
class Streams:
    """NUM_STREAMS of them at once. `until_begun`: each has shown a token and not its last."""

    streams: list[Stream]
    tasks: list[asyncio.Task[None]]

    @classmethod
    def start(cls, client: Client, first: int) -> Self:
        streams = [Stream(client, [first + n, 2, 3]) for n in range(NUM_STREAMS)]
        return cls(streams, [asyncio.create_task(stream.run()) for stream in streams])

    async def until_begun(self) -> None:
        async with asyncio.timeout(WAIT_S):
            await asyncio.gather(*(stream.begun.wait() for stream in self.streams))


async def _until_said(mesh: Mesh, text: str, times: int = 1) -> None:
    async with asyncio.timeout(WAIT_S):
        while mesh.stderr.count(text) < times:
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("service", list(MODULES))
async def test_a_process_that_hangs_is_killed_and_no_stream_suffers(
    mesh: Mesh, service: str
) -> None:
    async with Client(mesh.nats_url) as client, asyncio.timeout(120):
        running = Streams.start(client, first=100)
        await running.until_begun()
        said = mesh.stderr.count(f"{service:<10} died       it hung")
        os.kill(mesh.child_pid(MODULES[service]), signal.SIGSTOP)
        await _until_said(mesh, f"{service:<10} died       it hung", said + 1)
        await asyncio.gather(*running.tasks)


@pytest.mark.parametrize("service", list(MODULES))
async def test_a_process_that_is_killed_costs_no_stream(mesh: Mesh, service: str) -> None:
    """Those that had not begun wait for the successor as well."""
    async with Client(mesh.nats_url) as client, asyncio.timeout(120):
        running = Streams.start(client, first=200)
        await running.until_begun()
        os.kill(mesh.child_pid(MODULES[service]), signal.SIGKILL)
        fresh = Streams.start(client, first=300)
        await asyncio.gather(*running.tasks, *fresh.tasks)
        async with heartbeats(mesh.nats_url) as beats:
            await beats.until(is_quiet)


async def test_steps_without_memory_cost_no_stream(mesh: Mesh) -> None:
    """They come again, smaller; the worker and its generation stay."""
    worker = mesh.child_pid(MODULES["worker"])
    async with Client(mesh.nats_url) as client, asyncio.timeout(120):
        running = Streams.start(client, first=900)
        await running.until_begun()
        failpoints.arm(
            mesh.folder / "run", worker, "worker.no_memory:drop@2,worker.no_memory:drop@5"
        )
        await asyncio.gather(*running.tasks)
        async with heartbeats(mesh.nats_url) as beats:
            await beats.until(is_quiet)
    assert mesh.child_pid(MODULES["worker"]) == worker
    assert mesh.logs().count('"out_of_memory"') >= 2


@dataclass(slots=True)
class HttpLoad:
    """Requests over HTTP, one after the other on connections that are kept: each must be whole."""

    http: httpx.AsyncClient
    ending: bool = False
    num_served: int = 0

    async def run(self, number: int, *, stream: bool) -> None:
        while not self.ending:
            prompt = [900 + number, self.num_served]
            body = {"model": MODEL, "prompt": prompt, "max_tokens": NUM_TOKENS, "stream": stream}
            answer = await (self._streamed(body) if stream else self._whole(body))
            assert [int(word) for word in answer.split()] == _expected(prompt, NUM_TOKENS)
            self.num_served += 1

    async def _whole(self, body: dict[str, Any]) -> str:
        response = await self.http.post("/v1/completions", json={**body, **GREEDY})
        assert response.status_code == 200, response.text
        text: str = response.json()["choices"][0]["text"]
        return text

    async def _streamed(self, body: dict[str, Any]) -> str:
        text, lines = "", []
        async with self.http.stream("POST", "/v1/completions", json={**body, **GREEDY}) as response:
            assert response.status_code == 200
            async for line in response.aiter_lines():
                lines += [line.removeprefix("data: ")] if line else []
        assert lines.pop() == "[DONE]"
        for line in lines:
            assert "error" not in line, line
            text += json.loads(line)["choices"][0]["text"]
        return text


async def test_a_rolling_restart_fails_no_request(mesh: Mesh, cache: Path) -> None:
    """Every service in turn, two admissions and the gateway among them, under requests over NATS
    and HTTP that begin at any time of it: all end with all their tokens.
    """
    before = {name: mesh.child_pids(module) for name, module in ALL_MODULES.items()}
    deaths, drained = mesh.stderr.count(" died "), mesh.stderr.count("gateway    drained")
    served = 0
    limits = httpx.Limits(max_keepalive_connections=8, keepalive_expiry=60)
    async with (
        Client(mesh.nats_url) as client,
        httpx.AsyncClient(base_url=mesh.http_url, timeout=60, limits=limits) as http,
        asyncio.timeout(180),
    ):
        load = HttpLoad(http)
        over_http = [asyncio.create_task(load.run(n, stream=n % 2 == 0)) for n in range(4)]
        restarting = asyncio.create_task(
            asyncio.to_thread(
                lambda: run("restart", "--json", cwd=mesh.folder, STREETCAR_CACHE_DIR=str(cache))
            )
        )
        while not restarting.done():
            await asyncio.gather(*(Stream(client, [400 + n, served]).run() for n in range(4)))
            served += 1
        done = await restarting
        load.ending = True
        await asyncio.gather(*over_http)
        await _until_said(mesh, "gateway    drained", drained + 1)
    assert done.returncode == 0, done.stdout + done.stderr
    assert served and load.num_served
    assert mesh.stderr.count(" died ") == deaths, "a restart is no death"
    assert "poisoned" not in mesh.logs()
    wait_until_gone({f"{name} {pid}": pid for name, pids in before.items() for pid in pids})
    for name, module in ALL_MODULES.items():
        after = mesh.child_pids(module)
        assert len(after) == len(before[name]) and not after & before[name], name


async def test_a_poison_ends_alone(mesh: Mesh) -> None:
    """It kills the worker three times, and fails; the others' streams are right."""
    said = mesh.stderr.count("worker     died")
    async with Client(mesh.nats_url) as client, asyncio.timeout(120):
        running = Streams.start(client, first=500)
        await running.until_begun()
        with pytest.raises(StreetcarClientError) as caught:
            await greedy(client, [7, POISON, 8], 5)
        assert (caught.value.code, caught.value.status) == ("poisoned", 500)
        await asyncio.gather(*running.tasks)
    assert mesh.stderr.count("worker     died") == said + 3


class _Gate:
    """Another address of the bus, which lets nobody through before `opened` is set."""

    def __init__(self, url: str) -> None:
        self._parts = urlsplit(url)
        self.url = ""
        self.knocked, self.opened = asyncio.Event(), asyncio.Event()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._forward, "127.0.0.1", 0)
        port = self._server.sockets[0].getsockname()[1]
        address = f"{self._parts.netloc.rpartition(':')[0]}:{port}"
        self.url = self._parts._replace(netloc=address).geturl()
        return self

    async def __aexit__(self, *_exc: object) -> None:
        self.opened.set()
        self._server.close()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.knocked.set()
        await self.opened.wait()
        there = await asyncio.open_connection(self._parts.hostname, self._parts.port)
        await asyncio.gather(_pipe(reader, there[1]), _pipe(there[0], writer))


async def _pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while chunk := await reader.read(65_536):
            writer.write(chunk)
            await writer.drain()
    writer.close()


async def test_a_scheduler_that_slept_while_another_took_over_changes_nothing(mesh: Mesh) -> None:
    """Fencing: it wakes with plans and updates of its old epoch, and goes."""
    sleeper = mesh.child_pid(MODULES["scheduler"])
    raw = Path(f"/proc/{sleeper}/environ").read_bytes().decode().split("\0")
    environment = dict(item.split("=", 1) for item in raw if "=" in item)
    async with (
        Client(mesh.nats_url) as client,
        _Gate(environment["STREETCAR_NATS_URL"]) as gate,
        heartbeats(mesh.nats_url) as beats,
        asyncio.timeout(120),
    ):
        second = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "scheduler_svc"),
            env={**environment, "STREETCAR_NATS_URL": gate.url},
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        try:
            await gate.knocked.wait()
            running = Streams.start(client, first=600)
            await running.until_begun()
            epoch = beats.epoch
            os.kill(sleeper, signal.SIGSTOP)
            gate.opened.set()
            await beats.until(lambda beats: beats.engine.ready and beats.epoch > epoch)
            os.kill(sleeper, signal.SIGCONT)
            await asyncio.gather(*running.tasks)
            # Its own successor is above the second one, which goes as well: no fight.
            await second.wait()
        finally:
            if second.returncode is None:
                second.kill()
                await second.wait()
        await beats.until(lambda beats: is_quiet(beats) and beats.engine.ready)
        await asyncio.gather(*Streams.start(client, first=700).tasks)


async def test_a_kv_store_that_slept_while_another_took_over_goes(mesh: Mesh, cache: Path) -> None:
    """Fencing: it wakes with the books of before, which nobody believes. The other one leaves, and
    the supervisor's next one takes over in its turn.
    """
    sleeper = mesh.child_pid(MODULES["kv_store"])
    raw = Path(f"/proc/{sleeper}/environ").read_bytes().decode().split("\0")
    died = mesh.stderr.count("kv_store   died")
    async with Client(mesh.nats_url) as client, heartbeats(mesh.nats_url) as beats:
        second = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "kv_store"),
            env=dict(item.split("=", 1) for item in raw if "=" in item),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
        try:
            assert second.stdout is not None
            name = json.loads(await second.stdout.readline())["fields"]["id"]
            running = Streams.start(client, first=800)
            await running.until_begun()
            os.kill(sleeper, signal.SIGSTOP)
            await beats.until(lambda beats: beats.engine.ledger == name)
            os.kill(sleeper, signal.SIGCONT)
            await _until_said(mesh, "kv_store   died", died + 1)
            await asyncio.gather(*running.tasks)
            await beats.until(is_quiet)
            checked = await asyncio.to_thread(
                lambda: run(
                    *("kv", "check", "--json"), cwd=mesh.folder, STREETCAR_CACHE_DIR=str(cache)
                )
            )
            assert checked.returncode == 0 and json.loads(checked.stdout)["fault"] == ""
            second.terminate()
            await second.wait()
        finally:
            if second.returncode is None:
                second.kill()
                await second.wait()
        await beats.until(lambda beats: beats.engine.ready and beats.engine.ledger != name)
    assert "another ledger has the books of engine-0" in mesh.logs()
