"""`streetcar up` as a process: starts, stops, deaths of every service, refused settings."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from services.client import Client, StreetcarClientError
from services.runtime.nats_server import NatsServer
from services.runtime.supervisor import STOP_TIMEOUT_S
from tests.process.mesh import (
    MODEL,
    WAIT_S,
    Answer,
    Mesh,
    environment,
    greedy,
    heartbeats,
    is_alive,
    run,
    wait_until_gone,
)

pytestmark = pytest.mark.nats

MODULES = {
    "gateway": "services.gateway",
    "admission": "services.admission",
    "scheduler": "scheduler_svc",
    "worker": "gpu_worker",
    "kv_store": "kv_store",
    "nats": "nats-server",
}
HEAVY = ("torch", "numpy", "nats", "starlette", "tokenizers", "msgspec")


@pytest.mark.parametrize("command", ["", "up", "bench mesh"])
def test_help_imports_nothing_heavy(command: str, tmp_path: Path) -> None:
    trace = environment(PYTHONPROFILEIMPORTTIME="1")
    done = run(*command.split(), "--help", cwd=tmp_path, **trace)
    assert done.returncode == 0
    assert "Usage: streetcar" in done.stdout
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "services.cli.main" in imported or "cyclopts" in imported, "the trace is there"
    assert not imported & set(HEAVY)


# ---- stopping


async def test_a_stop_ends_open_requests_and_leaves_nothing(tmp_path: Path, cache: Path) -> None:
    mesh = Mesh.up("--worker", "stub", folder=tmp_path, STREETCAR_CACHE_DIR=str(cache))
    async with Client(mesh.nats_url) as client:
        running = client.generate(MODEL, prompt="Hi", max_tokens=8000, ignore_eos=True)
        await anext(running)
        mesh.process.send_signal(signal.SIGINT)
        with pytest.raises(StreetcarClientError) as caught:
            async for _frame in running:
                pass
        assert (caught.value.code, caught.value.status) == ("draining", 503)
    assert mesh.close() == 0
    assert not (cache / "running" / f"{mesh.process.pid}.json").exists()
    async with httpx.AsyncClient() as http:
        with pytest.raises(httpx.ConnectError):
            await http.get(f"{mesh.http_url}/livez")


def test_a_second_ctrl_c_does_not_wait(tmp_path: Path, cache: Path) -> None:
    mesh = Mesh.up("--worker", "stub", folder=tmp_path, STREETCAR_CACHE_DIR=str(cache))
    # The worker cannot stop in order now, and would be waited for.
    os.kill(mesh.child_pid(MODULES["worker"]), signal.SIGSTOP)
    mesh.process.send_signal(signal.SIGINT)
    _wait_for_text(mesh, "scheduler  stopped")
    started = time.monotonic()
    mesh.process.send_signal(signal.SIGINT)
    assert mesh.close() == 0
    assert time.monotonic() - started < STOP_TIMEOUT_S / 2


def _wait_for_text(mesh: Mesh, text: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while text not in mesh.stderr:
        assert time.monotonic() < deadline, mesh.stderr
        time.sleep(0.02)


def test_ctrl_c_while_it_starts(tmp_path: Path, cache: Path) -> None:
    mesh = Mesh.launch("--worker", "stub", folder=tmp_path, STREETCAR_CACHE_DIR=str(cache))
    _wait_for_text(mesh, "nats")
    mesh.pids = {name: mesh.child_pid(module) for name, module in MODULES.items()}
    mesh.pids = {name: pid for name, pid in mesh.pids.items() if pid}
    assert mesh.interrupt() == 0
    assert mesh.process.poll() == 0


def test_no_service_outlives_a_supervisor_that_is_killed(tmp_path: Path, cache: Path) -> None:
    mesh = Mesh.up("--worker", "stub", folder=tmp_path, STREETCAR_CACHE_DIR=str(cache))
    assert len(mesh.pids) == len(MODULES)
    assert all(is_alive(pid) for pid in mesh.pids.values())
    mesh.process.kill()
    mesh.close()


# ---- deaths


@pytest.fixture(scope="module")
def mortal_mesh(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Iterator[Mesh]:
    """A stub mesh whose services are killed one by one."""
    folder = tmp_path_factory.mktemp("mortal")
    mesh = Mesh.up("--worker", "stub", folder=folder, STREETCAR_CACHE_DIR=str(cache))
    yield mesh
    mesh.pids = {name: mesh.child_pid(module) for name, module in MODULES.items()}
    assert mesh.interrupt() == 0, mesh.stderr
    assert "Traceback" not in mesh.logs() + mesh.stderr


async def _until_served(mesh: Mesh) -> Answer:
    """The first answer that comes through again, over NATS; what is refused meanwhile says why."""
    async with asyncio.timeout(WAIT_S):
        while True:
            try:
                async with Client(mesh.nats_url, first_frame_timeout_s=1.0) as client:
                    return await greedy(client, [9, 8, 7], 5)
            except StreetcarClientError as error:
                assert error.code in {"no_worker", "no_server", "timeout", "draining"}, error
                await asyncio.sleep(0.02)


async def _until_served_over_http(mesh: Mesh) -> None:
    async with asyncio.timeout(WAIT_S), httpx.AsyncClient(base_url=mesh.http_url) as http:
        while True:
            try:
                body = {"model": MODEL, "prompt": [9, 8, 7], "max_tokens": 5}
                response = await http.post("/v1/completions", json=body)
                if response.status_code == 200:
                    return
                assert response.status_code in {502, 503, 504}, response.text
            except httpx.TransportError:
                pass
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("service", list(MODULES))
async def test_a_service_that_is_killed_comes_back(mortal_mesh: Mesh, service: str) -> None:
    """New requests are served again, and streams that were running go on to the same tokens."""
    mesh, module = mortal_mesh, MODULES[service]
    await _until_served(mesh)
    before = mesh.child_pid(module)
    async with Client(mesh.nats_url) as client:
        expected = (await greedy(client, [5, 6], 100)).token_ids
        running = [asyncio.create_task(greedy(client, [5, 6], 100)) for _ in range(4)]
        async with heartbeats(mesh.nats_url) as beats:
            await beats.until(lambda beats: beats.engine.num_running > 0)
        os.kill(before, signal.SIGKILL)
        async with asyncio.timeout(2 * WAIT_S):
            answers = await asyncio.gather(*running)
        assert [answer.token_ids for answer in answers] == [expected] * 4
        await _until_served(mesh)
        await _until_served_over_http(mesh)
    assert mesh.child_pid(module) not in {0, before}
    async with heartbeats(mesh.nats_url) as beats:
        await beats.until(lambda beats: beats.engine.ready)
    assert "keeps dying" not in mesh.stderr


async def test_an_engine_is_waited_for_a_while_and_no_longer(mortal_mesh: Mesh) -> None:
    """The worker dies and nobody starts another: a new request ends as `no_worker`, in bounded
    time; one that had begun waits, and goes on with the next worker.

    The supervisor is stopped, so that it brings none back.
    """
    mesh = mortal_mesh
    await _until_served(mesh)
    worker = mesh.child_pid(MODULES["worker"])
    async with Client(mesh.nats_url) as client, heartbeats(mesh.nats_url) as beats:
        running = asyncio.create_task(greedy(client, [5, 6], 600))
        await beats.until(lambda beats: beats.engine.num_running > 0)
        mesh.process.send_signal(signal.SIGSTOP)
        try:
            os.kill(worker, signal.SIGKILL)
            await beats.until(lambda beats: not beats.engine.ready)
            async with httpx.AsyncClient(base_url=mesh.http_url, timeout=WAIT_S) as http:
                body = {"model": MODEL, "prompt": "Hi"}
                response = await http.post("/v1/completions", json=body)
                ready = await http.get("/readyz")
            assert response.status_code == 503
            assert response.json()["error"]["code"] == "no_worker"
            assert response.headers["retry-after"] == "1"
            assert ready.status_code == 503 and "worker" in ready.json()["missing"][0]
        finally:
            mesh.process.send_signal(signal.SIGCONT)
        assert len((await running).token_ids) == 600


# ---- settings


async def test_it_joins_a_server_that_runs_already(tmp_path: Path, cache: Path) -> None:
    async with NatsServer(tmp_path / "bus") as server:
        mesh = await asyncio.to_thread(
            lambda: Mesh.up(
                *("--worker", "stub", "--nats", server.url),
                folder=tmp_path / "mesh",
                STREETCAR_CACHE_DIR=str(cache),
            )
        )
        assert mesh.nats_url == server.url
        assert sorted(mesh.pids) == sorted(set(MODULES) - {"nats"})
        async with Client(server.url) as client:
            assert len((await greedy(client, [1], 3)).token_ids) == 3
        mesh.process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(mesh.close) == 0
        assert is_alive(server.pid), "what it did not start, it does not stop"
    wait_until_gone({"nats": server.pid})


async def test_file_environment_and_flag(tmp_path: Path, cache: Path) -> None:
    """Each setting from another place, as the scheduler reports them."""
    tmp_path.joinpath("streetcar.toml").write_text(
        'worker = "stub"\nmax_model_len = 100\nnum_blocks = 64\nblock_size = 8\n'
    )
    mesh = await asyncio.to_thread(
        lambda: Mesh.up(
            *("--max-model-len", "300"),
            folder=tmp_path,
            STREETCAR_CACHE_DIR=str(cache),
            STREETCAR_MAX_MODEL_LEN="200",
            STREETCAR_NUM_BLOCKS="128",
        )
    )
    async with heartbeats(mesh.nats_url) as beats, Client(mesh.nats_url) as client:
        await beats.until(lambda beats: beats.engine.ready)
        assert beats.engine.max_model_len == 300, "the flag"
        assert beats.engine.num_blocks_total == 127, "the environment"
        await greedy(client, list(range(1, 18)), 1)
        cached = (await greedy(client, list(range(1, 18)), 1)).usage["cached_tokens"]
        assert cached == 16, "the file: two blocks of 8 tokens"
    assert await asyncio.to_thread(mesh.interrupt) == 0


@pytest.mark.parametrize(
    ("arguments", "variables", "named"),
    [
        (["--max-num-seqs", "0"], {}, "max_num_seqs = 0 (from --max-num-seqs)"),
        (["--block-size", "24"], {}, "power of two"),
        (["--dtype", "float16"], {}, "auto, float32, bfloat16"),
        (["--nats", "nats://127.0.0.1:1"], {}, "nats://127.0.0.1:1: "),
        (["--nats", "nats://u:secret@127.0.0.1:1"], {}, "nats://127.0.0.1:1: "),
        (["--nats", "http://127.0.0.1"], {}, "from --nats)"),
        (["--nats", "nats://127.0.0.1:1", "--nats-port", "4222"], {}, "nats_port"),
        ([], {"STREETCAR_MAX_NUM_SEQ": "3"}, "STREETCAR_MAX_NUM_SEQ"),
        ([], {"STREETCAR_NUM_BLOCKS": "many"}, "STREETCAR_NUM_BLOCKS"),
        (["--config", "absent.toml"], {}, "absent.toml"),
    ],
)
def test_a_setting_that_is_refused(
    tmp_path: Path, cache: Path, arguments: list[str], variables: dict[str, str], named: str
) -> None:
    settings = {"STREETCAR_CACHE_DIR": str(cache), **variables}
    done = run("up", "--worker", "stub", "--json", *arguments, cwd=tmp_path, **settings)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "secret" not in done.stderr + done.stdout
    assert named in json.loads(done.stdout)["error"]["cause"]


def test_an_unknown_flag_and_an_unknown_key(tmp_path: Path, cache: Path) -> None:
    done = run("up", "--max-num-seq", "3", cwd=tmp_path)
    assert done.returncode == 2
    assert "--max-num-seqs" in done.stdout + done.stderr
    tmp_path.joinpath("streetcar.toml").write_text("max_num_seq = 3\n")
    done = run("up", "--worker", "stub", cwd=tmp_path, STREETCAR_CACHE_DIR=str(cache))
    assert done.returncode == 1
    assert "did you mean max_num_seqs?" in done.stderr


@pytest.mark.parametrize("flag", ["--http-port", "--nats-port"])
def test_a_port_that_is_taken(tmp_path: Path, cache: Path, flag: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        arguments = ("up", "--worker", "stub", "--json", flag, port)
        done = run(*arguments, cwd=tmp_path, STREETCAR_CACHE_DIR=str(cache))
    assert done.returncode == 1
    error = json.loads(done.stdout)["error"]
    assert port in error["cause"]
    assert f"{flag} 0" in error["fix"]


async def test_other_commands_find_the_cluster(stub_mesh: Mesh, cache: Path) -> None:
    """`ps`, `generate` and `health` need no address of a cluster that runs here."""

    async def output(*arguments: str) -> list[str]:
        done = await asyncio.to_thread(
            lambda: run(
                *arguments,
                cwd=stub_mesh.folder,
                STREETCAR_NATS_URL=stub_mesh.nats_url,
                STREETCAR_CACHE_DIR=str(cache),
            )
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.splitlines()

    kinds = sorted(json.loads(line)["kind"] for line in await output("ps", "--json"))
    assert kinds == ["admission", "gateway", "gpu_worker", "kv_store", "scheduler"]
    frames = [
        json.loads(line) for line in await output("generate", "Hi", "--max-tokens", "3", "--json")
    ]
    assert sum(len(frame["token_ids"]) for frame in frames) == 3
    assert len(await output("generate", "Hi", "--max-tokens", "3")) == 1
    recorded = cache / "running" / f"{stub_mesh.process.pid}.json"
    assert json.loads(recorded.read_text())["nats_url"] == stub_mesh.nats_url
