"""A gateway whose bus is not there yet."""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path

import httpx
import pytest

from services.gateway.app import build_app
from services.gateway.mesh_link import MeshLink
from services.runtime.nats_server import NatsServer
from services.runtime.settings import Settings

pytestmark = pytest.mark.nats


async def test_a_bus_that_is_away_is_waited_for(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    link = MeshLink(Settings(nats_url=f"nats://127.0.0.1:{port}"))
    running = asyncio.create_task(link.run())
    transport = httpx.ASGITransport(build_app(link.gateway))
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            ready = await http.get("/readyz")
            assert ready.status_code == 503
            assert ready.json()["missing"][0] == "bus: no nats-server answers"
            refused = await http.post("/v1/completions", json={"model": "toy", "prompt": "hi"})
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
            assert refused.json()["error"]["code"] == "no_server"
            async with NatsServer(tmp_path, port=port), asyncio.timeout(20):
                await link.joined.wait()
                missing = json.loads((await http.get("/readyz")).content)["missing"]
                assert [text.partition(":")[0] for text in missing] == ["route", "worker", "blocks"]
    finally:
        running.cancel()
        await asyncio.wait({running})
