"""`streetcar` as a person runs it: a process, its line of JSON, its signals, its heartbeats.

Invariants: a mesh that a test has started is gone when the test is over; nothing is asked of the
services but what clients and heartbeats say.

Shell: processes, the bus.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self

import msgpack
from nats.aio.client import Client as Connection
from nats.aio.msg import Msg

from services.cli.bus import connect
from services.client import Client
from services.contracts.beats import Beat, EngineLoad, KvPoolLoad
from services.contracts.codec import Decoder
from services.contracts.permissions import SERVICES
from services.runtime.settings import ENV_PREFIX

ROOT: Final = Path(__file__).parents[2]
MODEL: Final = "smollm2-135m"
GENERATE: Final = f"streetcar.v1.generate.{MODEL}"
START_TIMEOUT_S: Final = 120.0
STOP_TIMEOUT_S: Final = 30.0
WAIT_S: Final = 30.0
"""For a condition that a healthy mesh reaches in a second, on a machine that is busy."""

Frame = dict[str, Any]
_observer_urls: Final[dict[str, str]] = {}
"""By the address that a mesh prints: the bus with its observer's password."""


INSIDE: Final = re.compile(
    r"""0x[0-9a-f]{6,} | /home/ | /tmp/ | /usr/ | /root/ | site-packages | File\ " | Traceback
    | streetcar\.v1\. | _INBOX | nats:// | \.py\b | msgspec | \bObject\ contains\b | sk-streetcar-
    | password | <class | Error\b""",
    re.VERBOSE,
)
"""What no answer to a client may hold: S12."""


def check_words(text: str) -> None:
    found = INSIDE.search(text)
    assert found is None, f"{found[0]!r} in {text[:400]}"


def command(*arguments: str) -> list[str]:
    """argv of one `streetcar` command."""
    return [sys.executable, "-m", "services.cli.main", *arguments]


def environment(**variables: str) -> dict[str, str]:
    """Ours without any setting of Streetcar, and with `variables`."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(ENV_PREFIX)}
    # Two processes of eight that spin while they wait would starve the others.
    return {**inherited, "GOMP_SPINCOUNT": "1000", "PYTHONPATH": str(ROOT), **variables}


def run(
    *arguments: str, cwd: Path, timeout_s: float = START_TIMEOUT_S, **variables: str
) -> subprocess.CompletedProcess[str]:
    """One command to its end; for those that are expected to end by themselves."""
    return subprocess.run(
        command(*arguments),
        cwd=cwd,
        env=environment(**variables),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        stdin=subprocess.DEVNULL,
        check=False,
    )


def is_alive(pid: int) -> bool:
    """Whether the process runs; one that is dead and not yet collected does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in {"Z", "X"}


def wait_until_gone(pids: Mapping[str, int]) -> None:
    """Fails where one of the processes is still there after a while."""
    deadline = time.monotonic() + WAIT_S
    while living := {name: pid for name, pid in pids.items() if is_alive(pid)}:
        assert time.monotonic() < deadline, f"still running: {living}"
        time.sleep(0.02)


@dataclass(slots=True)
class Mesh:
    """A running `streetcar up`."""

    process: subprocess.Popen[str]
    folder: Path
    nats_url: str = ""
    http_url: str = ""
    pids: dict[str, int] = field(default_factory=dict)

    @classmethod
    def launch(cls, *arguments: str, folder: Path, **variables: str) -> Self:
        """Start it, and do not wait. `folder` gets the logs and what it prints."""
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "stderr.txt").open("w") as stderr:
            process = subprocess.Popen(
                command("up", "--json", "--run-dir", str(folder / "run"), *arguments),
                cwd=folder,
                env=environment(**variables),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                start_new_session=True,
            )
        return cls(process, folder)

    @classmethod
    def up(cls, *arguments: str, folder: Path, **variables: str) -> Self:
        """Start it and wait for its line of JSON."""
        mesh = cls.launch(*arguments, folder=folder, **variables)
        try:
            mesh.read_line()
        except BaseException:
            mesh.process.kill()
            mesh.close()
            raise
        return mesh

    def read_line(self) -> None:
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], START_TIMEOUT_S)
        assert ready, f"no line within {START_TIMEOUT_S:g} s\n{self.stderr}"
        line = json.loads(self.process.stdout.readline())
        assert set(line) == {"nats_url", "http_url", "pids"}, f"{line}\n{self.stderr}"
        self.nats_url, self.http_url, self.pids = line["nats_url"], line["http_url"], line["pids"]
        secret = self.folder / "run" / "bus" / "observer.url"
        if secret.exists():
            _observer_urls[self.nats_url] = secret.read_text().strip()

    @property
    def stderr(self) -> str:
        return (self.folder / "stderr.txt").read_text()

    def logs(self) -> str:
        """What all services wrote."""
        return "".join(path.read_text() for path in (self.folder / "run").glob("*.log"))

    def violations(self) -> list[str]:
        """What the bus has refused to a service; clients and tests may try what they like."""
        log = (self.folder / "run" / "bus" / "nats-server.log").read_text()
        users = tuple(f'user:{user}"' for user in SERVICES)
        return [
            line
            for line in log.splitlines()
            if "Violation" in line and any(user in line for user in users)
        ]

    def child_pid(self, module: str) -> int:
        """The process of a service as it is now; `pids` names the first ones."""
        return min(self.child_pids(module), default=0)

    def child_pids(self, module: str) -> set[int]:
        """All of them, where there are several."""
        found = set()
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                words = path.read_bytes().decode().split("\0")
                parent = int((path.parent / "stat").read_text().rpartition(")")[2].split()[1])
            except (FileNotFoundError, ProcessLookupError):
                continue
            # Between fork and exec it is still the launcher.
            launching = "launch.py" in " ".join(words)
            if parent == self.process.pid and not launching and module in " ".join(words):
                found.add(int(path.parent.name))
        return found

    def interrupt(self) -> int:
        """Ctrl-C -> the exit status, once nothing of it is left."""
        self.process.send_signal(signal.SIGINT)
        return self.close()

    def close(self) -> int:
        """Wait for the end -> the exit status."""
        try:
            status = self.process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        finally:
            if self.process.stdout is not None:
                self.process.stdout.close()
        wait_until_gone(self.pids)
        return status


def observer_url(nats_url: str) -> str:
    """Where a test may listen: as the mesh's observer, or on a bus of the test's own."""
    return _observer_urls.get(nats_url, nats_url)


class Beats:
    """The latest heartbeat of every kind of service."""

    def __init__(self) -> None:
        self._latest: dict[str, Beat] = {}
        self._heard = asyncio.Condition()

    async def hear(self, beat: Beat) -> None:
        async with self._heard:
            self._latest[beat.kind.value] = beat
            self._heard.notify_all()

    @property
    def engine(self) -> EngineLoad:
        load = self._latest["scheduler"].engine
        assert load is not None
        return load

    @property
    def epoch(self) -> int:
        """Of the scheduler that was heard last."""
        return self._latest["scheduler"].epoch

    @property
    def pool(self) -> KvPoolLoad:
        return self._latest["kv_store"].pools[0]

    @property
    def num_open(self) -> int:
        load = self._latest["admission"].admission
        assert load is not None
        return load.num_open

    async def until(self, condition: Callable[[Beats], bool], within_s: float = WAIT_S) -> float:
        """Wait for beats, from now on, that fulfil `condition` -> seconds that it took."""
        started = time.monotonic()
        self._latest.clear()
        needed = {"scheduler", "kv_store", "admission"}
        async with asyncio.timeout(within_s), self._heard:
            while not (needed <= self._latest.keys() and condition(self)):
                await self._heard.wait()
        return time.monotonic() - started


def is_quiet(beats: Beats) -> bool:
    """Nothing is open, nothing runs, and nothing is held."""
    load = beats.engine
    return beats.num_open + load.num_running + load.num_waiting + load.num_blocks_held == 0


@asynccontextmanager
async def heartbeats(url: str) -> AsyncIterator[Beats]:
    beats, decoder = Beats(), Decoder(Beat)

    async def hear(message: Msg) -> None:
        await beats.hear(decoder.decode(message.data))

    async with connect(observer_url(url)) as connection:
        await connection.subscribe("streetcar.v1.beat.*.*", cb=hear)
        yield beats


@dataclass(slots=True)
class Answer:
    """All frames of one request, put together; `raw` as they came."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    frames: list[Frame] = field(default_factory=list)
    headers: dict[str, str] = field(default_factory=dict)
    raw: list[bytes] = field(default_factory=list)

    def add(self, frame: Frame) -> None:
        assert frame["offset"] == len(self.token_ids), "a frame is missing or came twice"
        self.frames.append(frame)
        self.token_ids += frame["token_ids"]
        self.text += frame["text"]

    @property
    def last(self) -> Frame:
        return self.frames[-1]

    @property
    def usage(self) -> dict[str, int]:
        usage: dict[str, int] = self.last["usage"]
        return usage

    @property
    def logprobs(self) -> list[Any]:
        return [entry for frame in self.frames for entry in frame["logprobs"] or ()]


async def ask(client: Client, **fields: Any) -> Answer:
    """One answer through the public client."""
    answer = Answer()
    async for frame in client.generate(MODEL, **fields):
        answer.add(frame)
    return answer


async def greedy(client: Client, token_ids: list[int], max_tokens: int, **fields: Any) -> Answer:
    return await ask(
        client,
        prompt_token_ids=token_ids,
        max_tokens=max_tokens,
        temperature=0.0,
        ignore_eos=True,
        **fields,
    )


async def by_hand(
    connection: Connection, payload: bytes, subject: str = GENERATE, within_s: float = WAIT_S
) -> Answer:
    """Publish bytes with a reply inbox, as any NATS client would, and collect the frames."""
    inbox = connection.new_inbox()
    subscription = await connection.subscribe(inbox)
    try:
        await connection.publish(subject, payload, reply=inbox)
        return await collect(subscription, within_s)
    finally:
        await subscription.unsubscribe()


async def collect(subscription: Any, within_s: float = WAIT_S) -> Answer:
    """Frames of a subscription until the last."""
    answer = Answer()
    async with asyncio.timeout(within_s):
        async for message in subscription.messages:
            answer.raw.append(message.data)
            frame = decode(message.data)
            answer.add(frame)
            if frame["finish_reason"] is not None:
                answer.headers = dict(message.headers or {})
                break
    return answer


def decode(payload: bytes) -> Frame:
    frame: Frame = json.loads(payload) if payload[:1] == b"{" else msgpack.unpackb(payload)
    return frame
