"""`generate`, `chat` and `ps` against a real bus with a stand-in admission."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgpack
import nats
import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg

from services.cli.running_file import RunningCluster, find_cluster, forget, remember
from services.contracts.beats import AdmissionLoad, Beat, ServiceKind
from services.contracts.codec import encode
from services.contracts.subjects import Subjects
from services.runtime.nats_server import NatsServer
from services.runtime.problem import Problem
from services.runtime.settings import load

pytestmark = pytest.mark.nats
ROOT = Path(__file__).parents[3]
SUBJECTS = Subjects("streetcar.v1")


class _Admission:
    """Answers every request with its question in two frames; remembers what was asked."""

    def __init__(self, url: str, client: Client) -> None:
        self.url = url
        self.requests: list[dict[str, Any]] = []
        self.traceparents: list[str] = []
        self._client = client

    async def answer(self, message: Msg) -> None:
        request = msgpack.unpackb(message.data)
        self.requests.append(request)
        self.traceparents += [v for k, v in (message.headers or {}).items() if k == "traceparent"]
        base = {"request_id": request["request_id"], "logprobs": None, "finish_reason": None}
        usage = {"prompt_tokens": 1, "completion_tokens": 2, "cached_tokens": 0}
        first = {**base, "offset": 0, "text": "Hello", "token_ids": [1]}
        last = {**base, "offset": 1, "text": " there", "token_ids": [2], "usage": usage}
        last["finish_reason"] = "stop"
        for frame in (first, last):
            await self._client.publish(message.reply, msgpack.packb(frame))


@pytest.fixture
async def admission(tmp_path: Path) -> AsyncIterator[_Admission]:
    async with NatsServer(tmp_path / "bus") as server:
        client = await nats.connect(server.url)
        made = _Admission(server.url, client)
        await client.subscribe(SUBJECTS.any_generate, cb=made.answer)
        await client.flush()
        try:
            yield made
        finally:
            await client.close()


async def _streetcar(*arguments: str, stdin: str = "") -> tuple[int | None, str, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "services.cli.main",
        *arguments,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    async with asyncio.timeout(30):
        out, err = await process.communicate(stdin.encode())
    return process.returncode, out.decode(), err.decode()


async def test_generate_prints_the_text(admission: _Admission) -> None:
    status, out, err = await _streetcar(
        "generate", "Hi", "--nats", admission.url, "--max-tokens", "5", "--temperature", "0"
    )
    assert (status, out) == (0, "Hello there\n"), err
    [request] = admission.requests
    assert request["prompt"] == "Hi"
    assert (request["max_tokens"], request["temperature"]) == (5, 0.0)
    assert 0 <= request["seed"] < 2**63, "drawn by the client, so that a retry is the same request"


async def test_generate_as_json_prints_the_frames(admission: _Admission) -> None:
    status, out, err = await _streetcar("generate", "Hi", "--nats", admission.url, "--json")
    frames = [json.loads(line) for line in out.splitlines()]
    assert status == 0, err
    assert [frame["text"] for frame in frames] == ["Hello", " there"]
    assert frames[-1]["usage"]["completion_tokens"] == 2


async def test_a_trace_begins_at_the_client(admission: _Admission) -> None:
    """Nobody else has a span here: the bus has no service but the one that answers."""
    arguments = ("generate", "Hi", "--nats", admission.url, "--trace")
    status, out, err = await _streetcar(*arguments, "--json")
    assert status == 0, err
    *_, span = [json.loads(line) for line in out.splitlines()]
    assert (span["kind"], span["service"], span["parent_id"]) == ("client", "client", "")
    assert admission.traceparents == [f"00-{span['trace_id']}-{span['span_id']}-01"]
    status, out, err = await _streetcar(*arguments)
    assert (status, out) == (0, "Hello there\n"), err
    assert "text_completion" in err and "output_tokens 2" in err


async def test_chat_keeps_the_conversation(admission: _Admission) -> None:
    status, out, err = await _streetcar(
        "chat", "--nats", admission.url, "--system", "Be kind.", stdin="One\n\nTwo\n"
    )
    assert (status, out) == (0, "Hello there\nHello there\n"), err
    roles = [[m["role"] for m in request["messages"]] for request in admission.requests]
    assert roles == [["system", "user"], ["system", "user", "assistant", "user"]]
    assert admission.requests[1]["messages"][2]["content"] == "Hello there"


async def test_ps_shows_a_heartbeat(admission: _Admission) -> None:
    load_now = AdmissionLoad(models=["m"], num_open=3)
    beat = Beat(kind=ServiceKind.ADMISSION, service_id="a-0", epoch=7, admission=load_now)
    client = await nats.connect(admission.url)

    async def beating() -> None:
        while True:
            await client.publish(SUBJECTS.beat("admission", "a-0"), encode(beat))
            await asyncio.sleep(0.05)

    task = asyncio.create_task(beating())
    try:
        status, out, err = await _streetcar("ps", "--nats", admission.url, "--json")
    finally:
        task.cancel()
        await asyncio.wait({task})
        await client.close()
    assert status == 0, err
    [shown] = [json.loads(line) for line in out.splitlines()]
    assert (shown["kind"], shown["service_id"], shown["epoch"]) == ("admission", "a-0", 7)
    assert shown["admission"] == {"models": ["m"], "num_open": 3}


async def test_nobody_there_is_told(admission: _Admission) -> None:
    status, out, err = await _streetcar("ps", "--nats", admission.url)
    assert (status, out) == (1, "")
    assert "E203" in err
    status, _, err = await _streetcar("chat", "hi", "--nats", "nats://127.0.0.1:1")
    assert status == 1
    assert "Traceback" not in err


def test_running_cluster_is_found_until_it_ends(tmp_path: Path) -> None:
    settings = load(environ={}, flags={"cache_dir": str(tmp_path)})
    cluster = RunningCluster("nats://127.0.0.1:9", "http://127.0.0.1:8", "m", os.getpid())
    remember(settings, cluster)
    assert find_cluster(settings) == cluster
    (file,) = (tmp_path / "running").iterdir()
    assert file.stat().st_mode & 0o077 == 0, "it may hold the observer's password"
    forget(settings, os.getpid() + 1)
    assert find_cluster(settings) == cluster
    # Another that has died since, and would be the younger one.
    remember(settings, RunningCluster("nats://127.0.0.1:7", "http://127.0.0.1:6", "m", 2**22 + 1))
    assert find_cluster(settings) == cluster
    forget(settings, os.getpid())
    with pytest.raises(Problem, match="no `streetcar up`"):
        find_cluster(settings)


@pytest.mark.parametrize("content", ["", "{}", "[1]", '{"pid": 1}', "\x00"])
def test_damaged_file_is_no_cluster(tmp_path: Path, content: str) -> None:
    settings = load(environ={}, flags={"cache_dir": str(tmp_path)})
    (tmp_path / "running").mkdir()
    (tmp_path / "running" / f"{os.getpid()}.json").write_text(content)
    with pytest.raises(Problem, match="E107"):
        find_cluster(settings)
