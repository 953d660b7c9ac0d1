"""The container files say what the settings and the bus understand."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from services.contracts.permissions import User
from services.contracts.subjects import Subjects
from services.runtime.bus_access import authorization, limits, password_variable
from services.runtime.cluster import MODULES, USERS
from services.runtime.nats_server import find_binary
from services.runtime.settings import load

ROOT = Path(__file__).parents[2]


TRACING = ("otel-collector", "jaeger")


def _compose() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text())
    return loaded


def _expand(value: str) -> str:
    """As compose does it, with every password `pw`."""
    return re.sub(r"\$\{[A-Z_]+(?:(?::-([^}]*))|(?::\?[^}]*)|)\}", lambda m: m[1] or "pw", value)


def test_compose_runs_the_same_services_as_up() -> None:
    services = _compose()["services"]
    assert set(services) == {*MODULES, "nats", *TRACING}
    for name, module in MODULES.items():
        assert services[name]["command"] == ["python", "-m", module]


@pytest.mark.parametrize("name", list(MODULES))
def test_environment_of_each_container_is_valid(name: str) -> None:
    environment = _compose()["services"][name]["environment"]
    settings = load(environ={key: _expand(value) for key, value in environment.items()})
    assert settings.nats_url == f"nats://{USERS[name]}:pw@nats:4222"
    assert password_variable(USERS[name]) in environment["STREETCAR_NATS_URL"]


@pytest.mark.parametrize("name", [*MODULES, "nats", *TRACING])
def test_containers_are_confined(name: str) -> None:
    service = _compose()["services"][name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    # The images of these two have nothing to check with, and nobody waits for them.
    assert name in TRACING or service["healthcheck"]["test"][0] == "CMD"
    assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))
    tag = service["image"].rpartition(":")[2]
    assert re.match(r"\d+\.\d+\.\d+", tag), "a pinned version, never latest"


def test_spans_go_to_the_collector_and_on_to_jaeger() -> None:
    services = _compose()["services"]
    config = yaml.safe_load((ROOT / "deploy/otel/collector.yaml").read_text())
    for name in MODULES:
        endpoint = services[name]["environment"]["STREETCAR_OTLP_ENDPOINT"]
        assert endpoint == "http://otel-collector:4318"
    (mount,) = services["otel-collector"]["volumes"]
    source, target, _ = mount.split(":")
    assert (ROOT / source).is_file()
    assert services["otel-collector"]["command"] == [f"--config={target}"]
    assert config["receivers"]["otlp"]["protocols"]["http"]["endpoint"].endswith(":4318")
    pipeline = config["service"]["pipelines"]["traces"]
    assert pipeline["receivers"] == ["otlp"]
    assert pipeline["exporters"] == ["otlp/jaeger"]
    assert set(pipeline["processors"]) == set(config["processors"])
    host, port = config["exporters"]["otlp/jaeger"]["endpoint"].split(":")
    assert host in services and port == "4317"


def test_image_does_not_run_as_root_and_pins_its_base() -> None:
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    users = [line for line in lines if line.startswith("USER ")]
    assert users == ["USER 10001:10001"]
    assert lines.index(users[0]) > max(i for i, line in enumerate(lines) if line[:5] == "FROM ")
    for line in lines:
        if line.startswith("FROM "):
            assert re.match(r"FROM \S+:\d+\.\d+\.\d+", line)


def test_bus_permissions_are_the_table() -> None:
    """`streetcar config bus > deploy/nats/permissions.conf` after a change of the table."""
    lines = (ROOT / "deploy/nats/permissions.conf").read_text().splitlines()
    assert lines[1:] == [*limits(), *authorization(Subjects())]


def test_bus_gets_a_password_for_every_user() -> None:
    variables = {password_variable(user) for user in User}
    given = _compose()["services"]["nats"]["environment"]
    assert set(given) == variables
    # Without one, compose says what to do instead of starting an open bus.
    assert all(given[name] == f"${{{name}:?sh deploy/passwords > .env}}" for name in variables)
    drawn = dict(line.split("=") for line in _passwords())
    assert set(drawn) == variables
    assert len(set(drawn.values())) == len(variables)
    assert all(re.fullmatch("s[0-9a-f]{48}", password) for password in drawn.values())


def _passwords() -> list[str]:
    script = str(ROOT / "deploy/passwords")
    return subprocess.run(
        ["sh", script], capture_output=True, text=True, check=True
    ).stdout.splitlines()


@pytest.mark.nats
def test_server_accepts_the_bus_configuration() -> None:
    path = ROOT / "deploy/nats/nats-server.conf"
    command = [str(find_binary()), "-t", "-c", str(path)]
    variables = dict(line.split("=") for line in _passwords())
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=variables)
    assert done.returncode == 0, done.stderr
    without = subprocess.run(command, capture_output=True, text=True, check=False, env={})
    assert without.returncode != 0, "a bus without passwords"
