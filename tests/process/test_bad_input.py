"""What bad input gets: a clear error, at once, by every way into the mesh, and nothing else is
disturbed.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgpack
import nats
import nats.errors
import pytest
from nats.aio.client import Client as Connection

from services.client import Client, StreetcarClientError
from tests.models.tiny import Tiny, write_gguf
from tests.process.mesh import (
    GENERATE,
    MODEL,
    Answer,
    Mesh,
    ask,
    by_hand,
    check_words,
    greedy,
    heartbeats,
    run,
)

pytestmark = pytest.mark.nats

AT_ONCE_S = 5.0
"""A refusal takes a millisecond; this is for a machine that is busy with other things."""

HEADER_BYTES = 8192
"""Holds the architecture and its sizes; the vocabulary comes after."""


@dataclass(frozen=True)
class Bad:
    """A request that is refused, and what the refusal must name. http: fields there, if others."""

    name: str
    fields: dict[str, Any]
    named: str
    code: str = "invalid_request"
    status: int = 400
    http: dict[str, Any] | None = None
    only: tuple[str, ...] = ("json", "msgpack", "http")
    good: dict[str, Any] = field(default_factory=lambda: {"prompt": "Hi", "max_tokens": 2})

    @property
    def body(self) -> dict[str, Any]:
        return {**self.good, **self.fields}


def _only(name: str, fields: dict[str, Any], named: str, **more: Any) -> Bad:
    """One whose other fields would get in the way."""
    return Bad(name, fields, named, good={"max_tokens": 2}, **more)


BAD = [
    Bad("unknown field", {"promt": "x"}, "did you mean `prompt`?"),
    Bad("mistyped count", {"max_tokens": "4"}, "`max_tokens` must be an integer"),
    Bad("mistyped flag", {"ignore_eos": 1}, "`ignore_eos` must be true or false"),
    Bad("zero tokens", {"max_tokens": 0}, "`max_tokens` must be at least 1"),
    Bad("empty prompt", {"prompt": ""}, "`prompt` may not be empty"),
    _only("no prompt", {}, "prompt"),
    Bad("two prompts", {"prompt_token_ids": [1]}, "prompt and prompt_token_ids", only=("json",)),
    _only(
        "no token ids",
        {"prompt_token_ids": []},
        "may not be empty",
        http={"prompt": [], "max_tokens": 2},
    ),
    _only(
        "token id too high",
        {"prompt_token_ids": [5, 4_000_000]},
        "token id 4000000, outside the vocabulary 0 .. 32767",
        http={"prompt": [5, 4_000_000], "max_tokens": 2},
    ),
    _only(
        "token id negative",
        {"prompt_token_ids": [5, -1]},
        "must be at least 0",
        http={"prompt": [5, -1], "max_tokens": 2},
    ),
    Bad(
        "over the context",
        {"max_tokens": 8192},
        "context of 8192",
        code="context_length_exceeded",
    ),
    Bad(
        "text over the context",
        {"prompt": "x" * 100_000},
        "100000 characters",
        code="context_length_exceeded",
    ),
    Bad("temperature negative", {"temperature": -0.1}, "`temperature` must be at least 0"),
    Bad("temperature NaN", {"temperature": math.nan}, "temperature", only=("msgpack",)),
    Bad("temperature infinite", {"temperature": math.inf}, "temperature", only=("msgpack",)),
    Bad("NaN is no JSON", {"temperature": math.nan}, "JSON", only=("json", "http")),
    Bad("top_p zero", {"top_p": 0.0}, "`top_p` must be greater than 0"),
    Bad("top_p high", {"top_p": 1.01}, "`top_p` must be at most 1"),
    Bad("top_p NaN", {"top_p": math.nan}, "top_p", only=("msgpack",)),
    Bad("top_k negative", {"top_k": -2}, "`top_k` must be at least -1"),
    Bad("seed too high", {"seed": 2**63}, "`seed` must be at most"),
    Bad("17 stops", {"stop": ["a"] * 17}, "`stop` must have at most 16 entries"),
    Bad("long stop", {"stop": "x" * 257}, "`stop` must have at most 256 characters"),
    Bad("empty stop", {"stop": [""]}, "a stop string may not be empty"),
    Bad("65 stop ids", {"stop_token_ids": list(range(65))}, "at most 64 entries"),
    Bad("stop id too high", {"stop_token_ids": [10**8]}, "token id 100000000, outside"),
    Bad("21 logprobs", {"logprobs": 21}, "`logprobs` must be at most 20"),
    Bad("long salt", {"cache_salt": "x" * 65}, "`cache_salt` must have at most 64"),
    Bad("no deadline", {"deadline_ms": 0}, "`deadline_ms` must be at least 1"),
    Bad("long request id", {"request_id": "a" * 65}, "`request_id`"),
    Bad("dot in request id", {"request_id": "a.b"}, "`request_id`"),
    Bad("wildcard request id", {"request_id": "*"}, "`request_id`"),
    Bad("newline in request id", {"request_id": "a\n"}, "`request_id`"),
]


@pytest.fixture(scope="module")
def url(stub_mesh: Mesh) -> str:
    return stub_mesh.nats_url


@pytest.fixture
async def connection(url: str) -> AsyncIterator[Connection]:
    connected = await nats.connect(url)
    yield connected
    await connected.close()


@pytest.fixture
async def http(stub_mesh: Mesh) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=stub_mesh.http_url, timeout=AT_ONCE_S) as client:
        yield client


def check_error(answer: Answer, code: str, status: int, named: str) -> None:
    """Exactly one frame, which is the last, with the error and its headers."""
    assert len(answer.frames) == 1
    frame = answer.last
    assert frame["finish_reason"] == "error"
    assert frame["usage"] is None
    assert frame["token_ids"] == []
    assert frame["error"]["code"] == code, frame
    assert named in frame["error"]["message"], frame
    assert answer.headers["Nats-Service-Error-Code"] == str(status)
    assert answer.headers["Nats-Service-Error"].startswith(code)
    check_words(answer.raw[0].decode(errors="replace"))


async def check_good(connection: Connection) -> None:
    """Nothing else was disturbed."""
    answer = await by_hand(connection, b'{"prompt": "good", "max_tokens": 2}')
    assert answer.last["finish_reason"] == "length"


def check_http_error(response: httpx.Response, code: str, status: int, named: str) -> None:
    assert response.status_code == status, response.text
    assert set(response.json()) == {"error"}
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == code
    assert named in error["message"]
    check_words(response.text)


@pytest.mark.parametrize("bad", [b for b in BAD if "json" in b.only], ids=lambda b: b.name)
async def test_json(connection: Connection, bad: Bad) -> None:
    answer = await by_hand(connection, json.dumps(bad.body).encode(), within_s=AT_ONCE_S)
    assert answer.raw[0][:1] == b"{"
    check_error(answer, bad.code, bad.status, bad.named)
    await check_good(connection)


@pytest.mark.parametrize("bad", [b for b in BAD if "msgpack" in b.only], ids=lambda b: b.name)
async def test_msgpack(connection: Connection, bad: Bad) -> None:
    answer = await by_hand(connection, msgpack.packb(bad.body), within_s=AT_ONCE_S)
    assert answer.raw[0][:1] != b"{"
    check_error(answer, bad.code, bad.status, bad.named)
    await check_good(connection)


@pytest.mark.parametrize("bad", [b for b in BAD if "http" in b.only], ids=lambda b: b.name)
async def test_http(connection: Connection, http: httpx.AsyncClient, bad: Bad) -> None:
    body = {"model": MODEL, **(bad.http or bad.body)}
    response = await http.post("/v1/completions", content=json.dumps(body))
    check_http_error(response, bad.code, bad.status, bad.named)
    await check_good(connection)


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1\xff",
        b'{"prompt": ',
        b"[1]",
        b'"text"',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "\xff\xfe"}',
        b'{"a": ' + b"[" * 100_000,
        b"\x81\xa6prompt" + b"\x91" * 100_000,
        b"\xdf\xff\xff\xff\xff",
    ],
    ids=[
        *("empty", "no encoding", "cut", "list", "text", "lone surrogate", "no UTF-8"),
        *("deep JSON", "deep MessagePack", "boasting map"),
    ],
)
async def test_undecodable(connection: Connection, http: httpx.AsyncClient, payload: bytes) -> None:
    answer = await by_hand(connection, payload, within_s=AT_ONCE_S)
    check_error(answer, "invalid_request", 400, "")
    response = await http.post("/v1/completions", content=payload)
    check_http_error(response, "invalid_request", 400, "")
    await check_good(connection)


@pytest.mark.parametrize("model", ["nope", "smollm2", f"{MODEL}.x", "x" * 100])
async def test_unknown_model(connection: Connection, http: httpx.AsyncClient, model: str) -> None:
    subject = f"streetcar.v1.generate.{model}"
    answer = await by_hand(connection, b'{"prompt": "Hi"}', subject, AT_ONCE_S)
    check_error(answer, "model_not_found", 404, MODEL)
    response = await http.post("/v1/completions", json={"model": model, "prompt": "Hi"})
    check_http_error(response, "model_not_found", 404, MODEL)
    assert (await http.get(f"/v1/models/{model}")).status_code == 404
    await check_good(connection)


async def test_wrong_characters_in_subject_tokens(url: str, http: httpx.AsyncClient) -> None:
    async with Client(url) as client:
        for model in ("a.b", "*", ">", "a b", "", "a\r\nPUB x 0"):
            with pytest.raises(StreetcarClientError, match="no model") as caught:
                await anext(client.generate(model, prompt="Hi"))
            assert caught.value.status == 404
            response = await http.post("/v1/completions", json={"model": model, "prompt": "Hi"})
            check_http_error(response, "model_not_found", 404, MODEL)
        with pytest.raises(StreetcarClientError, match="request_id"):
            await anext(client.generate(MODEL, prompt="Hi", request_id="a.b"))
        assert (await ask(client, prompt="Hi", max_tokens=1)).usage["completion_tokens"] == 1


async def test_over_the_bus_limit(
    connection: Connection, http: httpx.AsyncClient, stub_client: Client
) -> None:
    text, limit = "x" * (9 << 20), stub_client.max_payload
    with pytest.raises(StreetcarClientError) as caught:
        await ask(stub_client, prompt=text)
    assert (caught.value.code, caught.value.status) == ("payload_too_large", 413)
    assert str(limit) in caught.value.message
    assert "94372" in caught.value.message
    response = await http.post("/v1/completions", json={"model": MODEL, "prompt": text})
    check_http_error(response, "payload_too_large", 413, str(limit))
    assert str(len(response.request.content)) in response.json()["error"]["message"]
    # The server itself protects the services from clients that do not ask it.
    with pytest.raises(nats.errors.MaxPayloadError):
        await connection.publish(GENERATE, text.encode(), reply=connection.new_inbox())
    await check_good(connection)


async def test_a_value_that_no_wire_can_carry(stub_client: Client) -> None:
    for fields in ({"seed": 2**64}, {"stop": {"a"}}):
        with pytest.raises(StreetcarClientError) as caught:
            await ask(stub_client, prompt="Hi", **fields)
        assert (caught.value.code, caught.value.status) == ("invalid_request", 400)
    assert (await ask(stub_client, prompt="Hi", max_tokens=1)).usage["completion_tokens"] == 1


async def test_a_request_id_in_use(stub_client: Client) -> None:
    running = stub_client.generate(MODEL, prompt="Hi", max_tokens=2000, request_id="same-id")
    async with aclosing(running):
        await anext(running)
        with pytest.raises(StreetcarClientError) as caught:
            await ask(stub_client, prompt="Hi", request_id="same-id")
        assert (caught.value.code, caught.value.status) == ("duplicate_request", 409)
        assert (await anext(running))["token_ids"]


async def test_a_request_that_can_never_fit_the_pool(narrow_mesh: Mesh) -> None:
    """15 blocks of 16 tokens hold 240; the last token of an answer needs no place."""
    async with Client(narrow_mesh.nats_url) as client:
        with pytest.raises(StreetcarClientError, match="15 blocks of 16 tokens") as caught:
            await greedy(client, [1] * 100, 142)
        assert (caught.value.code, caught.value.status) == ("never_fits", 400)
        body = {"model": MODEL, "prompt": [1] * 100, "max_tokens": 142}
        async with httpx.AsyncClient(base_url=narrow_mesh.http_url) as http:
            response = await http.post("/v1/completions", json=body)
        check_http_error(response, "never_fits", 400, "15 blocks of 16 tokens")
        assert len((await greedy(client, [1] * 5, 3)).token_ids) == 3


async def test_queue_full(narrow_mesh: Mesh) -> None:
    """One runs, one waits, and the third is refused with the reason."""
    url = narrow_mesh.nats_url
    async with Client(url) as client, heartbeats(url) as beats:
        first = client.generate(MODEL, prompt_token_ids=[1], max_tokens=200, ignore_eos=True)
        async with aclosing(first):
            await anext(first)
            second = asyncio.create_task(greedy(client, [2], 2))
            await beats.until(lambda beats: beats.engine.num_waiting == 1)
            with pytest.raises(StreetcarClientError, match="1 sequences wait already") as caught:
                await greedy(client, [3], 1)
            assert (caught.value.code, caught.value.status) == ("queue_full", 429)
            body = {"model": MODEL, "prompt": [4], "max_tokens": 1}
            async with httpx.AsyncClient(base_url=narrow_mesh.http_url) as http:
                response = await http.post("/v1/completions", json=body)
            check_http_error(response, "queue_full", 429, "max_waiting_seqs")
            assert response.headers["retry-after"] == "1"
            assert response.json()["error"]["type"] == "rate_limit_error"
        assert (await second).last["finish_reason"] == "length"


def _refused_start(cache: Path, folder: Path, model: Path | str) -> str:
    """`up` with this model: the cause that it ends with."""
    done = run("up", "--json", "--model", str(model), cwd=folder, STREETCAR_CACHE_DIR=str(cache))
    assert done.returncode == 1
    assert "Traceback" not in done.stdout + done.stderr
    error = json.loads(done.stdout)["error"]
    assert error["code"].startswith("E3"), error
    return str(error["cause"])


def test_a_model_that_is_missing(cache: Path, tmp_path: Path) -> None:
    cause = _refused_start(cache, tmp_path, tmp_path / "absent.gguf")
    assert str(tmp_path / "absent.gguf") in cause
    cause = _refused_start(cache, tmp_path, "smollm9")
    assert "smollm9" in cause


def test_a_model_that_is_truncated(cache: Path, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "cut.gguf", Tiny())
    path.write_bytes(path.read_bytes()[:-100])
    cause = _refused_start(cache, tmp_path, path)
    assert str(path) in cause
    assert "truncated" in cause


def test_a_model_of_an_unsupported_architecture(
    cache: Path, tmp_path: Path, model_path: Path
) -> None:
    """The embedded model under another name: its tokenizer is good, so that nothing else fails."""
    path = tmp_path / "other.gguf"
    data = model_path.read_bytes()
    path.write_bytes(data[:HEADER_BYTES].replace(b"llama", b"mamba") + data[HEADER_BYTES:])
    cause = _refused_start(cache, tmp_path, path)
    assert str(path) in cause
    assert "mamba" in cause
    assert "supported: llama" in cause
