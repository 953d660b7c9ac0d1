"""A real nats-server: started, found, restarted on its port, stopped, never left behind."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from pathlib import Path

import pytest

from services.contracts.limits import MAX_PAYLOAD_BYTES
from services.runtime.nats_server import NatsServer, NatsServerError, find_binary, server_version

pytestmark = pytest.mark.nats


async def _info(url: str) -> dict[str, object]:
    host, _, port = url.removeprefix("nats://").rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    line = await reader.readline()
    writer.close()
    await writer.wait_closed()
    info: dict[str, object] = json.loads(line.removeprefix(b"INFO "))
    return info


async def test_two_servers_pick_ports_of_their_own(tmp_path: Path) -> None:
    async with NatsServer(tmp_path / "a") as one, NatsServer(tmp_path / "b") as two:
        assert one.url != two.url
        info = await _info(one.url)
        assert info["max_payload"] == MAX_PAYLOAD_BYTES
        assert info["host"] == "127.0.0.1"
        assert "jetstream" not in info


async def test_killed_server_comes_back_on_its_port(tmp_path: Path) -> None:
    async with NatsServer(tmp_path) as server:
        url, pid = server.url, server.pid
        server.kill()
        assert await server.wait() == -signal.SIGKILL
        await server.start()
        assert server.url == url
        assert server.pid != pid
        await _info(url)


async def test_taken_port_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        server = NatsServer(tmp_path, port=port)
        with pytest.raises(NatsServerError) as caught:
            await server.start()
        assert str(port) in caught.value.cause
        assert "address already in use" in caught.value.cause
        assert "--nats-port 0" in caught.value.fix


async def test_binary_that_is_missing_is_named(tmp_path: Path) -> None:
    server = NatsServer(tmp_path, binary=tmp_path / "none")
    with pytest.raises(NatsServerError, match="exited with 127"):
        await server.start()


async def test_stop_is_idempotent(tmp_path: Path) -> None:
    server = NatsServer(tmp_path)
    await server.stop()
    await server.start()
    await server.stop()
    await server.stop()
    with pytest.raises(ProcessLookupError):
        os.kill(server.pid, 0)


async def test_server_dies_with_the_process_that_started_it(tmp_path: Path) -> None:
    script = (
        "import asyncio, pathlib, sys\n"
        "from services.runtime.nats_server import NatsServer\n"
        "async def main():\n"
        "    server = NatsServer(pathlib.Path(sys.argv[1]))\n"
        "    await server.start()\n"
        "    print(server.url, flush=True)\n"
        "    await server.wait()\n"
        "asyncio.run(main())\n"
    )
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", script, str(tmp_path), stdout=asyncio.subprocess.PIPE
    )
    assert parent.stdout is not None
    url = (await parent.stdout.readline()).decode().strip()
    await _info(url)
    parent.kill()
    await parent.wait()
    host, _, port = url.removeprefix("nats://").rpartition(":")
    async with asyncio.timeout(5):
        while True:
            try:
                _, writer = await asyncio.open_connection(host, int(port))
            except ConnectionError:
                return
            writer.close()
            await asyncio.sleep(0)


def test_version_is_at_least_the_one_with_the_fixes() -> None:
    version = server_version(find_binary()).lstrip("v")
    assert tuple(map(int, version.split("."))) >= (2, 14, 1)
