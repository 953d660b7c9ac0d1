"""A whole cluster of small stand-in services, around a real nats-server."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from services.runtime import cluster as module
from services.runtime.cluster import Cluster
from services.runtime.settings import Settings
from services.runtime.supervisor import SupervisorEvent

pytestmark = pytest.mark.nats
ROOT = Path(__file__).parents[3]

PLAIN = """
import signal
from services.runtime.log import report_ready
from services.runtime.settings import for_service
import sys
url = for_service().nats_url
assert "@127.0.0.1:" in url, "no bus, or nobody on it"
assert url not in "".join(sys.orig_argv), "a password that anybody can see"
report_ready(user=url.split(":")[1])
signal.pause()
"""
GATEWAY = """
import http.server, socket
from services.runtime.log import report_ready
class Handler(http.server.BaseHTTPRequestHandler):
    asked = 0
    def do_GET(self):
        Handler.asked += 1
        self.send_response(200 if self.path == "/readyz" and Handler.asked > 2 else 503)
        self.end_headers()
    def log_message(self, *_): pass
from services.runtime.settings import for_service
server = http.server.HTTPServer(("127.0.0.1", 0), Handler, bind_and_activate=False)
server.socket = socket.socket(fileno=for_service().http_fd)
report_ready()
server.serve_forever()
"""
FATAL = """
from services.runtime.log import report_fatal
report_fatal("E301", "x.gguf is truncated")
raise SystemExit(1)
"""


def _stand_ins(folder: Path, **scripts: str) -> dict[str, str]:
    """Modules `fake_<service>` in `folder`; the names by service, in the usual order."""
    folder.mkdir()
    for name in module.MODULES:
        default = GATEWAY if name == "gateway" else PLAIN
        (folder / f"fake_{name}.py").write_text(scripts.get(name, default))
    return {name: f"fake_{name}" for name in module.MODULES}


class _Events(list[SupervisorEvent]):
    def __call__(self, event: SupervisorEvent) -> None:
        self.append(event)


@asynccontextmanager
async def _cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_admissions: int = 1, **scripts: str
) -> AsyncIterator[tuple[Cluster, _Events]]:
    monkeypatch.setattr(module, "MODULES", _stand_ins(tmp_path / "fakes", **scripts))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "fakes"))
    events = _Events()
    settings = Settings(run_dir=str(tmp_path / "run"), num_admissions=num_admissions)
    made = Cluster(settings, events)
    try:
        yield made, events
    finally:
        await made.stop()


async def test_cluster_starts_when_the_gateway_is_ready_and_stops_the_bus_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with _cluster(tmp_path, monkeypatch) as (cluster, events):
        await cluster.start()
        pids = cluster.pids
        assert set(pids) == {"nats", *module.MODULES}
        assert cluster.http_url.startswith("http://127.0.0.1:")
        users = {e.fields["user"] for e in events if e.kind == "ready" and "user" in e.fields}
        assert users == {"//admission", "//scheduler", "//gpu_worker", "//kv_store"}
        assert "@" not in cluster.nats_url
        await cluster.stop()
    stopped = [event.service for event in events if event.kind == "stopped"]
    assert stopped == [*module.MODULES, "nats"]
    for pid in pids.values():
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


NAMED_PLAIN = PLAIN.replace("report_ready(", "report_ready(id=for_service().admission_id, ")


async def test_admissions_are_processes_with_ids_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with _cluster(tmp_path, monkeypatch, 3, admission=NAMED_PLAIN) as (cluster, events):
        await cluster.start()
        assert {"admission", "admission-1", "admission-2"} <= set(cluster.pids)
    ids = [event.fields["id"] for event in events if event.fields.get("id")]
    assert len(set(ids)) == len(ids) == 3


async def test_killed_bus_comes_back_at_the_same_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with _cluster(tmp_path, monkeypatch) as (cluster, events):
        await cluster.start()
        url, pid = cluster.nats_url, cluster.pids["nats"]
        os.kill(pid, signal.SIGKILL)
        async with asyncio.timeout(10):
            while sum(e.service == "nats" and e.kind == "ready" for e in events) < 2:
                await asyncio.sleep(0.01)
        assert cluster.nats_url == url
        assert cluster.pids["nats"] != pid


async def test_killed_gateway_comes_back_on_its_port(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with _cluster(tmp_path, monkeypatch) as (cluster, events):
        await cluster.start()
        url = cluster.http_url
        os.kill(cluster.pids["gateway"], signal.SIGKILL)
        async with asyncio.timeout(10):
            while sum(e.service == "gateway" and e.kind == "ready" for e in events) < 2:
                await asyncio.sleep(0.01)
        assert cluster.http_url == url


async def test_fatal_report_stops_everything_and_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with _cluster(tmp_path, monkeypatch, worker=FATAL) as (cluster, _):
        with pytest.raises(module.Problem, match=r"x\.gguf is truncated"):
            await cluster.start()
        assert cluster.pids == {}


async def _up(tmp_path: Path, *arguments: str) -> asyncio.subprocess.Process:
    """`streetcar up --json --worker stub` in a process of its own, around the stand-ins."""
    modules = {name: f"fake_{name}" for name in module.MODULES}
    script = (
        "import services.runtime.cluster as cluster\n"
        f"cluster.MODULES = {modules!r}\n"
        "from services.cli.main import main\n"
        "main()\n"
    )
    path = os.pathsep.join([str(ROOT), str(tmp_path / "fakes")])
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        script,
        "up",
        "--json",
        "--worker",
        "stub",
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={
            **os.environ,
            "PYTHONPATH": path,
            "TMPDIR": str(tmp_path),
            "STREETCAR_CACHE_DIR": str(tmp_path),
        },
    )


async def test_up_prints_one_line_and_ends_cleanly_on_ctrl_c(tmp_path: Path) -> None:
    _stand_ins(tmp_path / "fakes")
    process = await _up(tmp_path)
    assert process.stdout is not None
    async with asyncio.timeout(30):
        ready = json.loads(await process.stdout.readline())
        assert set(ready) == {"nats_url", "http_url", "pids"}
        process.send_signal(signal.SIGINT)
        out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    assert out == b""
    assert b"Traceback" not in err
    for pid in ready["pids"].values():
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert list(tmp_path.glob("streetcar-*")) == []


async def test_up_ends_with_the_fatal_message(tmp_path: Path) -> None:
    _stand_ins(tmp_path / "fakes", worker=FATAL)
    process = await _up(tmp_path)
    async with asyncio.timeout(30):
        out, err = await process.communicate()
    assert process.returncode == 1
    assert json.loads(out)["error"]["cause"] == "x.gguf is truncated"
    assert b"Traceback" not in err
