"""S02, S05, S06, S12, S18: what listens, what is sent to break it, and what it says then.

Everything goes to one mesh. Each hostile input gets a definite refusal, at once, in words that tell
nothing of the inside; after each the next request is served by the same processes.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import httpx
import msgpack
import nats
import pytest
from nats.aio.client import Client as Connection

from tests.process.mesh import GENERATE, MODEL, Mesh, by_hand, check_words, is_alive

pytestmark = pytest.mark.nats

AT_ONCE_S: Final = 10.0
"""For an answer that takes milliseconds, on a machine that is busy."""

VOCABULARY: Final = 32_768
CONTEXT: Final = 8192
MAX_GROWTH_BYTES: Final = 160 << 20
"""Of one process, over everything that is thrown at it here; one request may hold 8 MiB."""


@pytest.fixture
async def connection(stub_mesh: Mesh) -> AsyncIterator[Connection]:
    connected = await nats.connect(stub_mesh.nats_url)
    yield connected
    await connected.close()


@pytest.fixture
async def http(stub_mesh: Mesh) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=stub_mesh.http_url, timeout=60) as client:
        yield client


@pytest.fixture(autouse=True)
def same_processes(stub_mesh: Mesh) -> Iterator[None]:
    """Nothing here costs a service its life."""
    yield
    assert [name for name, pid in stub_mesh.pids.items() if not is_alive(pid)] == []


@pytest.fixture(scope="module", autouse=True)
def little_memory(stub_mesh: Mesh) -> Iterator[None]:
    """Nor does everything together cost it much memory."""
    before = {name: _resident_bytes(pid) for name, pid in stub_mesh.pids.items()}
    yield
    for name, pid in stub_mesh.pids.items():
        grown = _resident_bytes(pid) - before[name]
        assert grown < MAX_GROWTH_BYTES, f"{name} grew by {grown >> 20} MiB"


def _resident_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"VmRSS:\s+(\d+)", status)[1]) * 1024  # type: ignore[index]


async def serves(connection: Connection, http: httpx.AsyncClient) -> None:
    """The next request, by both ways."""
    answer = await by_hand(connection, b'{"prompt": "good", "max_tokens": 2}')
    assert answer.last["finish_reason"] == "length"
    body = {"model": MODEL, "prompt": "good", "max_tokens": 2}
    assert (await http.post("/v1/completions", json=body)).status_code == 200


# ---- S02: what listens


def test_s02_two_sockets_on_loopback_and_no_other(stub_mesh: Mesh) -> None:
    owned = set()
    for pid in [*_descendants(stub_mesh.process.pid)]:
        owned |= _socket_inodes(pid)
    listening = {
        (kind, address)
        for kind in ("tcp", "tcp6", "udp", "udp6")
        for inode, address, state in _sockets(kind)
        if inode in owned and (kind.startswith("udp") or state == "0A")
    }
    ports = {urlsplit(url).port for url in (stub_mesh.nats_url, stub_mesh.http_url)}
    assert listening == {("tcp", f"127.0.0.1:{port}") for port in ports}
    unix = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    accepting = {parts[6] for parts in unix if int(parts[3], 16) & 0x10000}
    assert not accepting & owned


def _descendants(pid: int) -> set[int]:
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(path.read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
        children.setdefault(parent, []).append(int(path.parent.name))
    found, todo = {pid}, [pid]
    while todo:
        more = children.get(todo.pop(), [])
        found.update(more)
        todo.extend(more)
    return found


def _socket_inodes(pid: int) -> set[str]:
    inodes = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = str(link.readlink())
        except FileNotFoundError:
            continue
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    return inodes


def _sockets(kind: str) -> Iterator[tuple[str, str, str]]:
    """(inode, local address, state) of all sockets of one kind."""
    for line in Path(f"/proc/net/{kind}").read_text().splitlines()[1:]:
        parts = line.split()
        address, _, port = parts[1].partition(":")
        number = bytes.fromhex(address)[::-1]
        shown = ".".join(map(str, number)) if len(number) == 4 else address
        yield parts[9], f"{shown}:{int(port, 16)}", parts[3]


# ---- S06: one request of each kind that has ended an engine somewhere

_SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}}
_DEEP: Any = "x"
for _ in range(200):
    _DEEP = {"anyOf": [_DEEP]}

REPLAY: Final[list[tuple[str, dict[str, Any]]]] = [
    ("CVE-2024-8768 empty prompt", {"prompt": ""}),
    ("CVE-2024-8768 empty list", {"prompt": []}),
    ("CVE-2025-48942 schema of no type", {"response_format": _SCHEMA}),
    ("CVE-2025-48942 guided schema", {"guided_json": {"type": "nonsense"}}),
    ("CVE-2025-48943 regex", {"guided_regex": "(a"}),
    ("CVE-2025-48943 pattern", {"structured_outputs": {"regex": "(a" * 1000}}),
    ("CVE-2025-48944 tool schema", {"tools": [{"type": "function", "function": {"name": 1}}]}),
    ("CVE-2025-62372 embeds of a wrong shape", {"prompt_embeds": "AAAA"}),
    ("CVE-2026-44223 penalties", {"repetition_penalty": 1e308, "presence_penalty": 2}),
    ("CVE-2026-44222 placeholder", {"prompt": "<|image|>" * 3, "mm_processor_kwargs": {}}),
    ("CVE-2026-54234 token id of the vocabulary", {"prompt": [1, VOCABULARY]}),
    ("CVE-2026-54234 negative token id", {"prompt": [1, -1]}),
    ("CVE-2026-54235 temperature NaN", {"temperature": math.nan}),
    ("CVE-2026-54235 temperature infinite", {"temperature": math.inf}),
    ("CVE-2026-54235 temperature -infinite", {"temperature": -math.inf}),
    ("CVE-2026-55514 bias", {"logit_bias": {str(2**31): 100}}),
    ("CVE-2026-56340 allowed ids", {"allowed_token_ids": [VOCABULARY + 1]}),
    ("CVE-2026-100651 prompt too long", {"prompt": [1] * (CONTEXT + 1)}),
    ("CVE-2026-100651 room too small", {"prompt": [1] * CONTEXT, "max_tokens": 1}),
    ("CVE-2026-100654 stop id of the vocabulary", {"stop_token_ids": [VOCABULARY]}),
    ("CVE-2026-100654 stop id -1", {"stop_token_ids": [-1]}),
    ("CVE-2026-94622 no prompt at all", {"prompt": None}),
    ("CVE-2026-94622 missing keys", {"prompt": [{}]}),
    ("CVE-2026-10300 deep schema", {"response_format": _DEEP}),
    ("CVE-2026-47475 seed", {"seed": 2**64 - 1}),
    ("CVE-2024-8939 best_of", {"best_of": 10**6}),
    ("CVE-2026-34756 n", {"n": 10**6}),
    ("CVE-2026-73559 prompts", {"prompt": ["x"] * 100_000}),
    ("CVE-2026-100647 salt", {"cache_salt": "x" * 10**5}),
    ("CVE-2024-11040 logprobs", {"logprobs": 10**6}),
]
"""Fields of a request to /v1/completions; over NATS the same, where `prompt` may be ids as well."""


def _over_nats(fields: dict[str, Any]) -> dict[str, Any]:
    body = {"prompt": "x", "max_tokens": 2, **fields}
    if isinstance(body["prompt"], list):
        body["prompt_token_ids"] = body.pop("prompt")
    return body


@pytest.mark.parametrize(("name", "fields"), REPLAY, ids=[name for name, _ in REPLAY])
async def test_s06_no_request_ends_an_engine(
    connection: Connection, http: httpx.AsyncClient, name: str, fields: dict[str, Any]
) -> None:
    body = {"model": MODEL, "prompt": "x", "max_tokens": 2, **fields}
    response = await http.post("/v1/completions", content=json.dumps(body))
    assert response.status_code == 400, response.text
    assert response.json()["error"]["code"] in {"invalid_request", "context_length_exceeded"}
    check_words(response.text)
    for payload in (json.dumps(_over_nats(fields)).encode(), msgpack.packb(_over_nats(fields))):
        answer = await by_hand(connection, payload, within_s=AT_ONCE_S)
        assert len(answer.frames) == 1
        assert answer.headers["Nats-Service-Error-Code"] == "400", answer.last
        check_words(answer.last["error"]["message"])
    await serves(connection, http)


# ---- S05: the shapes of HTTP and of the bus


async def _raw(url: str, *parts: bytes) -> tuple[int, bytes]:
    """Send bytes as they are -> status (0 where the connection was cut) and the whole answer."""
    where = urlsplit(url)
    reader, writer = await asyncio.open_connection(where.hostname, where.port)
    answer = b""
    try:
        async with asyncio.timeout(AT_ONCE_S * 3):
            try:
                for part in parts:
                    writer.write(part)
                    await writer.drain()
                while not _is_whole(answer) and (chunk := await reader.read(1 << 16)):
                    answer += chunk
            except ConnectionError:
                # It has stopped listening; what it said before may be here.
                answer += await _rest(reader)
    finally:
        writer.close()
    words = answer.split(b" ", 2)
    return (int(words[1]) if len(words) > 1 and words[1].isdigit() else 0), answer


async def _rest(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.read(1 << 16)
    except ConnectionError:
        return b""


def _is_whole(answer: bytes) -> bool:
    head, end, body = answer.partition(b"\r\n\r\n")
    length = re.search(rb"content-length: (\d+)", head.lower())
    return bool(end) and length is not None and len(body) >= int(length[1])


def _post(length: str, *headers: str) -> bytes:
    lines = ["POST /v1/completions HTTP/1.1", "host: localhost", length, *headers, "", ""]
    return "\r\n".join(lines).encode()


GOOD: Final = json.dumps({"model": MODEL, "prompt": "x", "max_tokens": 2}).encode()
_MIB: Final = b"x" * (1 << 20)
TOO_MUCH: Final = {431}


SHAPES: Final[dict[str, tuple[list[bytes], set[int]]]] = {
    "a header of 1 MiB": (
        [_post(f"content-length: {len(GOOD)}", "x: " + "y" * (1 << 20))],
        TOO_MUCH,
    ),
    "10,000 headers": (
        [_post("content-length: 9", *[f"x{i}: y" for i in range(10_000)])],
        TOO_MUCH,
    ),
    "200 headers": ([_post("content-length: 9", *[f"x{i}: y" for i in range(200)])], TOO_MUCH),
    "a path of 1 MiB": ([b"GET /" + _MIB + b" HTTP/1.1\r\nhost: localhost\r\n\r\n"], TOO_MUCH),
    "100 MB declared": ([_post("content-length: 100000000"), _MIB], {413}),
    "100 MB sent": (
        [_post("transfer-encoding: chunked"), *[b"100000\r\n" + _MIB + b"\r\n"] * 100],
        {413},
    ),
    "a length of 2^63": ([_post(f"content-length: {2**63}"), b"x"], {400, 413}),
    "a negative length": ([_post("content-length: -1"), b"x"], {400}),
    "two lengths": ([_post("content-length: 1", "content-length: 2"), b"{}"], {400}),
    "a chunk of no number": ([_post("transfer-encoding: chunked"), b"zz\r\nx"], {400}),
    "no HTTP": ([b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n"], {400}),
    "NATS": ([b'CONNECT {"verbose": false}\r\nPING\r\n\r\n'], {400}),
    "a list of 10^6": (
        [
            _post(f"content-length: {2 * 10**6 + 60}"),
            b'{"model":"smollm2-135m","stop_token_ids":['.ljust(59) + b"1," * (10**6 - 1) + b"1]}",
        ],
        {400},
    ),
}


@pytest.mark.parametrize("name", SHAPES)
async def test_s05_hostile_http(
    stub_mesh: Mesh, connection: Connection, http: httpx.AsyncClient, name: str
) -> None:
    parts, allowed = SHAPES[name]
    status, answer = await _raw(stub_mesh.http_url, *parts)
    assert status in allowed, answer[:300]
    check_words(answer.decode("latin-1"))
    await serves(connection, http)


async def test_s05_a_body_of_single_bytes(stub_mesh: Mesh) -> None:
    """Good in itself, in as many chunks as it has bytes."""
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in GOOD) + b"0\r\n\r\n"
    status, answer = await _raw(stub_mesh.http_url, _post("transfer-encoding: chunked"), chunks)
    assert status == 200, answer
    flood = b"1\r\nx\r\n" * 40_000 + b"0\r\n\r\n"
    status, answer = await _raw(stub_mesh.http_url, _post("transfer-encoding: chunked"), flood)
    assert status == 400, answer


@pytest.mark.parametrize(
    "hostile",
    [
        b"PUB " + b"x" * (1 << 20) + b" 0\r\n\r\n",
        f"PUB {GENERATE} 100000000\r\n".encode() + _MIB,
        f"HPUB {GENERATE} 99999999 99999999\r\n".encode(),
        f"PUB {GENERATE} -1\r\n\r\n".encode(),
        b"\x00" * 10_000,
    ],
    ids=["long subject", "100 MB", "100 MB of headers", "negative", "zeros"],
)
async def test_s05_hostile_bytes_on_the_bus(
    stub_mesh: Mesh, connection: Connection, http: httpx.AsyncClient, hostile: bytes
) -> None:
    """nats-server itself cuts what is longer than it may be: after it, nothing is heard."""
    where = urlsplit(stub_mesh.nats_url)
    reader, writer = await asyncio.open_connection(where.hostname, where.port)
    answer = b""
    try:
        async with asyncio.timeout(AT_ONCE_S):
            try:
                writer.write(b'CONNECT {"verbose":false}\r\n' + hostile + b"PING\r\n")
                while chunk := await reader.read(1 << 16):
                    answer += chunk
            except ConnectionError:
                pass
    finally:
        writer.close()
    assert b"PONG" not in answer
    await serves(connection, http)


# ---- S18: names that become parts of subjects and headers

NAMES: Final = [
    *(".", "*", ">", " ", "", "a.b", "a b", "a*", "a>", "$SRV", "x" * 65, "x" * 10_000),
    *("\r\n", "a\r\nPUB x 0\r\n\r\n", "-" * 64 + "\n", "\x00", "a\x00b", "é", "名前", "\u202e"),
]


@pytest.mark.parametrize("name", NAMES, ids=[ascii(name[:20]) for name in NAMES])
async def test_s18_no_name_becomes_a_subject(
    connection: Connection, http: httpx.AsyncClient, name: str
) -> None:
    for payload in (
        json.dumps({"prompt": "x", "request_id": name}).encode(),
        msgpack.packb({"prompt": "x", "request_id": name}),
    ):
        answer = await by_hand(connection, payload, within_s=AT_ONCE_S)
        assert answer.last["error"]["code"] == "invalid_request"
        assert answer.last["request_id"] == ""
        check_words(answer.last["error"]["message"])
    response = await http.post("/v1/completions", json={"model": name, "prompt": "x"})
    assert response.status_code == 404
    check_words(response.text)
    if name.strip() and name.isprintable():
        # In a header it is no trace, and no harm.
        body = {"model": MODEL, "prompt": "x", "max_tokens": 1}
        header = {"traceparent": name.encode()}
        done = await http.post("/v1/completions", json=body, headers=header)
        assert done.status_code == 200, done.text


async def test_s18_a_wildcard_cancels_nobody(connection: Connection) -> None:
    """nats-py lets a literal `*` through in a publish."""
    inbox = connection.new_inbox()
    subscription = await connection.subscribe(inbox)
    body = {"prompt": "x", "max_tokens": 200, "ignore_eos": True, "request_id": "stays"}
    await connection.publish(GENERATE, json.dumps(body).encode(), reply=inbox)
    await subscription.next_msg(AT_ONCE_S)
    for wild in ("*", "sta*"):
        await connection.publish(f"streetcar.v1.cancel.{wild}", b"")
    frames = [json.loads(message.data) async for message in _until_last(subscription)]
    assert frames[-1]["finish_reason"] == "length"
    await subscription.unsubscribe()


async def _until_last(subscription: Any) -> AsyncIterator[Any]:
    async with asyncio.timeout(AT_ONCE_S * 3):
        async for message in subscription.messages:
            yield message
            if b'"finish_reason":null' not in message.data:
                return


async def test_a_flood_of_refusals_is_quick(connection: Connection) -> None:
    """A thousand bad requests at once cost the good one behind them little."""
    inbox = connection.new_inbox()
    for _ in range(1000):
        await connection.publish(GENERATE, b'{"prompt": "x", "max_tokens": 0}', reply=inbox)
    started = time.monotonic()
    answer = await by_hand(connection, b'{"prompt": "good", "max_tokens": 2}')
    assert answer.last["finish_reason"] == "length"
    assert time.monotonic() - started < AT_ONCE_S
