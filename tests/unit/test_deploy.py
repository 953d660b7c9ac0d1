"""The container files say what the settings and the bus understand."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from services.contracts.limits import MAX_PAYLOAD_BYTES
from services.runtime.cluster import MODULES
from services.runtime.nats_server import find_binary
from services.runtime.settings import load

ROOT = Path(__file__).parents[2]


def _compose() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text())
    return loaded


def _expand(value: str) -> str:
    return re.sub(r"\$\{[A-Z_]+:-([^}]*)\}", r"\1", value)


def test_compose_runs_the_same_services_as_up() -> None:
    services = _compose()["services"]
    assert set(services) == {*MODULES, "nats"}
    for name, module in MODULES.items():
        assert services[name]["command"] == ["python", "-m", module]


@pytest.mark.parametrize("name", list(MODULES))
def test_environment_of_each_container_is_valid(name: str) -> None:
    environment = _compose()["services"][name]["environment"]
    settings = load(environ={key: _expand(value) for key, value in environment.items()})
    assert settings.nats_url == "nats://nats:4222"


@pytest.mark.parametrize("name", [*MODULES, "nats"])
def test_containers_are_confined(name: str) -> None:
    service = _compose()["services"][name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["healthcheck"]["test"][0] == "CMD"
    assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))
    tag = service["image"].rpartition(":")[2]
    assert re.match(r"\d+\.\d+\.\d+", tag), "a pinned version, never latest"


def test_image_does_not_run_as_root_and_pins_its_base() -> None:
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    users = [line for line in lines if line.startswith("USER ")]
    assert users == ["USER 10001:10001"]
    assert lines.index(users[0]) > max(i for i, line in enumerate(lines) if line[:5] == "FROM ")
    for line in lines:
        if line.startswith("FROM "):
            assert re.match(r"FROM \S+:\d+\.\d+\.\d+", line)


@pytest.mark.nats
def test_server_accepts_the_bus_configuration() -> None:
    path = ROOT / "deploy/nats/nats-server.conf"
    done = subprocess.run(
        [str(find_binary()), "-t", "-c", str(path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert f"max_payload: {MAX_PAYLOAD_BYTES // 1024**2}MB" in path.read_text()
