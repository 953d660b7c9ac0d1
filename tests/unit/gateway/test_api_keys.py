"""S10 and S11: who gets past the door, and what is kept of a key."""

from __future__ import annotations

import ast
import hmac
import json
import os
from pathlib import Path

import httpx
import pytest
from starlette.applications import Starlette

from services.cli import keys as command
from services.gateway import api_keys
from services.gateway.api_keys import ApiKeys, draw_key, read_keys, write_keys
from services.gateway.app import build_app
from services.gateway.guard import OPEN_PATHS, Guard
from services.gateway.mesh_view import MeshView
from services.gateway.serving import Gateway
from services.runtime.nats_server import NatsServer
from services.runtime.problem import Problem
from tests.unit.gateway.test_fan_out import FakeClient
from tests.unit.gateway.test_gateway import gateway_process


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.txt"


@pytest.fixture
def key(path: Path) -> str:
    drawn, digest = draw_key()
    write_keys(path, {"alice": digest})
    return drawn


def test_s11_a_key_is_kept_as_its_hash_alone(path: Path, key: str) -> None:
    assert len(key) > 40
    assert key not in path.read_text()
    assert path.stat().st_mode & 0o077 == 0
    assert draw_key()[0] != draw_key()[0]


def test_s11_only_the_key_opens(path: Path, key: str) -> None:
    keys = ApiKeys(path)
    assert keys.allow(f"Bearer {key}")
    assert keys.allow(f"bearer {key}")
    digest = read_keys(path)["alice"].hex()
    wrong = ["", "Bearer", "Bearer ", key, f"Basic {key}", f"Bearer {key}x", f"Bearer {key[:-1]}"]
    wrong += [f"Bearer {digest}", f"Bearer sha256:{digest}", f"Bearer {key} {key}", "Bearer é"]
    wrong += [f"Bearer {key}" + " x" * 10**5, "Bearer " + "k" * 10**6, f"Bearer {key.upper()}"]
    assert [header for header in wrong if keys.allow(header)] == []


def test_s11_every_key_is_compared_in_constant_time(
    path: Path, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first of three is the right one, and all three are looked at."""
    write_keys(path, {**read_keys(path), "bob": draw_key()[1], "carol": draw_key()[1]})
    compared: list[bool] = []

    class Counted:
        @staticmethod
        def compare_digest(known: bytes, presented: bytes) -> bool:
            compared.append(hmac.compare_digest(known, presented))
            return compared[-1]

    monkeypatch.setattr(api_keys, "hmac", Counted)
    assert ApiKeys(path).allow(f"Bearer {key}")
    assert compared == [True, False, False]
    tree = ast.parse(Path(api_keys.__file__).read_text())
    allow = next(n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == "allow")
    secrets = {"digest", "presented", "key"}
    for node in ast.walk(allow):
        if isinstance(node, ast.Compare):
            assert not {n.id for n in ast.walk(node) if isinstance(n, ast.Name)} & secrets


def test_s11_keys_change_without_a_restart(path: Path, key: str) -> None:
    keys = ApiKeys(path)
    second, digest = draw_key()
    write_keys(path, {**read_keys(path), "bob": digest})
    assert keys.allow(f"Bearer {second}")
    assert keys.allow(f"Bearer {key}")
    write_keys(path, {"bob": digest})
    assert not keys.allow(f"Bearer {key}")
    assert keys.allow(f"Bearer {second}")


@pytest.mark.parametrize("damage", ["", "gone", "\x00\xff", "alice", "alice md5:0", "a sha256:ff"])
def test_a_damaged_file_lets_nobody_in(path: Path, key: str, damage: str) -> None:
    keys = ApiKeys(path)
    if damage == "gone":
        path.unlink()
    else:
        path.write_text(damage, encoding="latin-1")
    assert not keys.allow(f"Bearer {key}")
    if damage:
        with pytest.raises(Problem, match="E108"):
            ApiKeys(path)


def test_names_come_once_and_files_are_bounded(path: Path) -> None:
    line = f"a sha256:{'0' * 64}\n"
    path.write_text(line * 2)
    with pytest.raises(Problem, match="second time"):
        read_keys(path)
    path.write_text("# nothing\n" * 2000)
    with pytest.raises(Problem, match="more than"):
        read_keys(path)
    path.write_text(f"# of the team\n\n{line}")
    assert list(read_keys(path)) == ["a"]


def test_the_command_adds_lists_and_removes(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.new("alice", file=str(path)) == 0
    key = capsys.readouterr().out.strip()
    assert ApiKeys(path).allow(f"Bearer {key}")
    assert command.new("bob", file=str(path), json=True) == 0
    assert json.loads(capsys.readouterr().out)["name"] == "bob"
    with pytest.raises(Problem, match="has a key of 'bob'"):
        command.new("bob", file=str(path))
    assert command.list_keys(file=str(path)) == 0
    assert capsys.readouterr().out.split() == ["alice", "bob"]
    assert command.remove("alice", file=str(path)) == 0
    assert not ApiKeys(path).allow(f"Bearer {key}")
    with pytest.raises(Problem, match="no key of 'alice'"):
        command.remove("alice", file=str(path))
    with pytest.raises(Problem, match="neither"):
        command.list_keys()
    os.unlink(path)


# ---- S10: the route table


def _app() -> Starlette:
    return build_app(Gateway(FakeClient(), MeshView(), body_limit=1 << 20))


ROUTES = [route.path for route in _app().routes]  # type: ignore[attr-defined]
DISGUISES = [
    *("/v1/models/", "//v1/models", "/v1//models", "/v1/%6dodels", "/livez/../v1/models"),
    *("/readyz/v1/models", "/LIVEZ", "/livez/", "/%2e%2e/metrics", "/docs", "/", "/v1"),
]


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("method", ["GET", "POST", "HEAD", "OPTIONS", "PUT"])
async def test_s10_every_route_needs_a_key(path: Path, key: str, route: str, method: str) -> None:
    async with _client(path) as http:
        for header in ({}, {"authorization": "Bearer wrong"}):
            answer = await http.request(method, route.replace("{name}", "m"), headers=header)
            is_open = route in OPEN_PATHS
            assert (answer.status_code == 401) is not is_open, (route, method)
        good = {"authorization": f"Bearer {key}"}
        answer = await http.request(method, route.replace("{name}", "m"), headers=good)
        assert answer.status_code != 401


@pytest.mark.parametrize("target", DISGUISES)
async def test_s10_no_disguise_of_a_path_opens(path: Path, key: str, target: str) -> None:
    async with _client(path) as http:
        for host in ("h", "x/livez?#", "h/livez", "livez", "127.0.0.1"):
            answer = await http.request("GET", f"http://h{target}", headers={"host": host})
            assert answer.status_code == 401, (target, host)
            assert answer.json()["error"]["code"] == "invalid_api_key"
            assert answer.headers["www-authenticate"] == "Bearer"


async def test_two_authorizations_are_none(path: Path, key: str) -> None:
    async with _client(path) as http:
        both = [("authorization", f"Bearer {key}"), ("authorization", "Bearer wrong")]
        assert (await http.get("/v1/models", headers=both)).status_code == 401


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"host": "127.0.0.1:8000"}, 200),
        ({"host": "localhost"}, 200),
        ({"host": "[::1]:8000"}, 200),
        ({"host": "localhost", "origin": "http://localhost:3000"}, 200),
        ({"host": "evil.example"}, 403),
        ({"host": "127.0.0.1.evil.example:80"}, 403),
        ({"host": "evil.example@127.0.0.1"}, 200),
        ({"host": "localhost", "origin": "https://evil.example"}, 403),
        ({"host": "localhost", "origin": "null"}, 403),
        ({"host": "localhost", "origin": "https://localhost.evil.example"}, 403),
        ({"host": "[", "origin": "http://["}, 403),
    ],
)
async def test_no_page_of_others_comes_in_by_a_browser(
    path: Path, headers: dict[str, str], status: int
) -> None:
    """By its own origin, or by a name of its own that leads to loopback (DNS rebinding)."""
    transport = httpx.ASGITransport(app=Guard(_app(), None, local=True))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
        assert (await http.get("/v1/models", headers=headers)).status_code == status
        assert (await http.get("/livez", headers=headers)).status_code == 200
    # With keys, or on the network, names are whatever people call the server.
    elsewhere = httpx.ASGITransport(app=Guard(_app(), None, local=False))
    async with httpx.AsyncClient(transport=elsewhere, base_url="http://127.0.0.1") as http:
        assert (await http.get("/v1/models", headers=headers)).status_code == 200


def _client(path: Path) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app=Guard(_app(), ApiKeys(path), local=True))
    return httpx.AsyncClient(transport=transport, base_url="http://h")


@pytest.mark.nats
async def test_a_gateway_asks_for_keys_and_follows_the_file(
    path: Path, key: str, tmp_path: Path
) -> None:
    async with (
        NatsServer(tmp_path / "bus") as server,
        gateway_process(server.url, STREETCAR_API_KEY_FILE=str(path)) as gateway,
        httpx.AsyncClient(base_url=gateway.url) as http,
    ):
        good = {"authorization": f"Bearer {key}"}
        assert (await http.get("/livez")).status_code == 200
        assert (await http.get("/v1/models")).status_code == 401
        assert (await http.get("/v1/models", headers=good)).status_code == 200
        assert (await http.post("/v1/completions", content=b"{")).status_code == 401
        assert (await http.post("/v1/completions", content=b"{", headers=good)).status_code == 400
        write_keys(path, {"bob": draw_key()[1]})
        assert (await http.get("/v1/models", headers=good)).status_code == 401
    path.write_text("nonsense")
    with pytest.raises(AssertionError, match="E108"):
        async with gateway_process("nats://127.0.0.1:1", STREETCAR_API_KEY_FILE=str(path)):
            pass
