"""S17: who hears whom on a real server, as a matrix that is written down here a second time.

Every user subscribes to every subject of the list and publishes on each of them; what arrives must
be exactly what the matrix says.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import nats
import nats.errors
import pytest
from nats.aio.client import Client as Connection
from nats.aio.msg import Msg

from services.cli.bus import connect
from services.contracts.permissions import User, inbox_prefix
from services.contracts.subjects import Subjects
from services.runtime.bus_access import BusAccess
from services.runtime.nats_server import NatsServer
from services.runtime.problem import Problem

pytestmark = pytest.mark.nats

SERVICES = {"admission", "scheduler", "kv_store", "gpu_worker", "gateway"}
LISTENERS = SERVICES | {"observer"}
ASKERS = {"client", "gateway"}
NOBODY: set[str] = set()

MATRIX: dict[str, tuple[set[str], set[str]]] = {
    # subject: (who publishes, who hears it)
    "streetcar.v1.generate.m": (ASKERS, {"admission"}),
    "streetcar.v1.generate.m.x": (ASKERS, {"admission"}),
    "streetcar.v1.cancel.r": (ASKERS, {"admission"}),
    "streetcar.v1.resume.r": (ASKERS, {"admission"}),
    "streetcar.v1.engine.e.submit": ({"admission"}, {"scheduler"}),
    "streetcar.v1.engine.e.abort": ({"admission"}, {"scheduler"}),
    "streetcar.v1.engine.e.plan": ({"scheduler"}, {"gpu_worker"}),
    "streetcar.v1.engine.e.attach": ({"scheduler"}, {"gpu_worker"}),
    "streetcar.v1.engine.e.poll": ({"scheduler"}, {"gpu_worker"}),
    "streetcar.v1.engine.e.result": ({"gpu_worker"}, {"scheduler"}),
    "streetcar.v1.engine.e.steps": ({"scheduler"}, {"observer"}),
    "streetcar.v1.engine.e.other": (NOBODY, NOBODY),
    "streetcar.v1.admission.a.updates": ({"scheduler"}, {"admission"}),
    "streetcar.v1.admission.adopt": ({"scheduler"}, {"admission"}),
    "streetcar.v1.kv.e.lookup": ({"scheduler"}, {"kv_store"}),
    "streetcar.v1.kv.e.lease": ({"scheduler"}, {"kv_store"}),
    "streetcar.v1.kv.e.delta": ({"scheduler"}, {"kv_store"}),
    "streetcar.v1.kv.e.report": ({"observer"}, {"kv_store"}),
    "streetcar.v1.kv.e.check": ({"observer"}, {"kv_store"}),
    "streetcar.v1.kv.e.other": (NOBODY, {"kv_store"}),
    "streetcar.v1.trace.r": ({"observer"}, SERVICES),
    "streetcar.v1.spans": (SERVICES - {"kv_store"}, {"admission", "gateway"}),
    **{f"streetcar.v1.beat.{kind}.i": ({kind}, LISTENERS) for kind in SERVICES},
    "streetcar.v1.beat.client.i": (NOBODY, LISTENERS),
    "streetcar.v1": (NOBODY, NOBODY),
    "streetcar.v2.generate.m": (NOBODY, NOBODY),
    "$SRV.PING": ({"observer"}, SERVICES),
    "$SRV.INFO.streetcar-scheduler": ({"observer"}, SERVICES),
    "$SRV.STATS.streetcar-scheduler.id": ({"observer"}, SERVICES),
    "$SRV.OTHER": (NOBODY, NOBODY),
    "_INBOX.n.1": ({"admission"}, {"client"}),
    "_INBOX_gateway.n.1": ({"admission"}, {"gateway"}),
    "_INBOX_admission.n.1": ({"scheduler"}, {"admission"}),
    "_INBOX_scheduler.n.1": ({"admission", "kv_store", "gpu_worker"}, {"scheduler"}),
    "_INBOX_observer.n.1": (SERVICES, {"observer"}),
    "_INBOX_kv_store.n.1": (NOBODY, NOBODY),
    "_INBOX_gpu_worker.n.1": (NOBODY, NOBODY),
    "_INBOX_client.n.1": (NOBODY, NOBODY),
    "_R_.n.1": (NOBODY, NOBODY),
    "anything": (NOBODY, NOBODY),
}

WIDE = (
    *(">", "*", "streetcar.>", "streetcar.v1.>", "streetcar.v1.engine.>", "streetcar.v1.*.*"),
    *("streetcar.v1.engine.*.*", "streetcar.v1.admission.>", "$SRV.>", "$SYS.>"),
    *("*.n.1", "_INBOX.>", "_INBOX_gateway.>", "_INBOX_scheduler.>", "streetcar.v1.beat.>"),
)
"""Wildcards that somebody might try, beyond what his own subjects need."""

WIDE_ALLOWED = {("client", "_INBOX.>"), ("gateway", "_INBOX_gateway.>")} | {
    ("scheduler", "_INBOX_scheduler.>")
}


@dataclass
class Person:
    """One user's connection: what it heard, as (subject, publisher), and what was refused."""

    name: str
    connection: Connection
    heard: set[tuple[str, str]] = field(default_factory=set)
    refused: list[str] = field(default_factory=list)

    async def hear(self, message: Msg) -> None:
        self.heard.add((message.subject, message.data.decode()))


@pytest.fixture
def access() -> BusAccess:
    return BusAccess.draw(Subjects(), anonymous=True)


@pytest.fixture
async def server(tmp_path: Path, access: BusAccess) -> AsyncIterator[NatsServer]:
    async with NatsServer(tmp_path / "bus", access=access) as running:
        yield running


@pytest.fixture
async def people(server: NatsServer, access: BusAccess) -> AsyncIterator[list[Person]]:
    async with AsyncExitStack() as stack:
        yield [await _connect(user.value, access.url(server.url, user), stack) for user in User]


async def _connect(name: str, url: str, stack: AsyncExitStack) -> Person:
    refused: list[str] = []

    async def on_error(error: Exception) -> None:
        refused.append(str(error))

    connection = await nats.connect(
        url, error_cb=on_error, allow_reconnect=False, inbox_prefix=inbox_prefix(name)
    )
    stack.push_async_callback(connection.close)
    return Person(name, connection, refused=refused)


async def _settle(people: list[Person]) -> None:
    """Twice: nats-py may send a round trip's PING before what was published just before it."""
    for _ in range(2):
        for person in people:
            await person.connection.flush()


async def test_s17_everybody_hears_exactly_what_the_matrix_says(people: list[Person]) -> None:
    for person in people:
        for subject in MATRIX:
            await person.connection.subscribe(subject, cb=person.hear)
    await _settle(people)
    for person in people:
        for subject in MATRIX:
            await person.connection.publish(subject, person.name.encode())
    await _settle(people)
    for person in people:
        expected = {
            (subject, publisher)
            for subject, (publishers, hearers) in MATRIX.items()
            if person.name in hearers
            for publisher in publishers
        }
        assert person.heard == expected, person.name
        num_refused = sum(person.name not in side for row in MATRIX.values() for side in row)
        assert len(person.refused) == num_refused, person.refused


async def test_the_servers_own_tracing_carries_no_message_elsewhere(people: list[Person]) -> None:
    """`Nats-Trace-Dest` makes the server itself publish: where its sender may, and only there."""
    by_name = {person.name: person for person in people}
    for name, subject in (
        ("gpu_worker", "streetcar.v1.engine.e.plan"),
        ("scheduler", "_INBOX_scheduler.n.1"),
        ("observer", "_INBOX_observer.n.1"),
    ):
        await by_name[name].connection.subscribe(subject, cb=by_name[name].hear)
    await _settle(people)
    for subject in ("streetcar.v1.engine.e.plan", "_INBOX_scheduler.n.1", "_INBOX_observer.n.1"):
        await by_name["client"].connection.publish(
            "streetcar.v1.generate.m", b"", headers={"Nats-Trace-Dest": subject}
        )
    await _settle(people)
    assert len(by_name["client"].refused) == 3
    assert [person.name for person in people if person.heard] == []


def _is_in(subject: str, refusals: list[str]) -> bool:
    # nats-py writes what the server says in small letters.
    return any(f'"{subject.lower()}"' in refusal for refusal in refusals)


async def test_s17_no_wildcard_widens_a_right(people: list[Person]) -> None:
    for person in people:
        for subject in WIDE:
            await person.connection.subscribe(subject, cb=person.hear)
    await _settle(people)
    for person in people:
        refused = {subject for subject in WIDE if _is_in(subject, person.refused)}
        allowed = {subject for name, subject in WIDE_ALLOWED if name == person.name}
        assert set(WIDE) - refused == allowed, person.name


async def test_without_a_password_one_is_a_client_and_no_more(
    server: NatsServer, people: list[Person]
) -> None:
    async with AsyncExitStack() as stack:
        anybody = await _connect("client", server.url, stack)
        for subject in MATRIX:
            await anybody.connection.subscribe(subject, cb=anybody.hear)
        await _settle([anybody])
        for subject in MATRIX:
            await anybody.connection.publish(subject, b"client")
        await _settle([anybody])
        num_refused = sum("client" not in side for row in MATRIX.values() for side in row)
        assert len(anybody.refused) == num_refused


async def _enter(url: str) -> str:
    """What the server says to somebody at the door; "" where it lets him in."""

    async def ignore(_error: Exception) -> None:
        """It comes as the exception, too."""

    connection = Connection()
    try:
        async with asyncio.timeout(5):
            await connection.connect(servers=[url], allow_reconnect=False, error_cb=ignore)
        return ""
    except (nats.errors.Error, OSError) as error:
        return str(error)
    finally:
        await connection.close()


@pytest.mark.parametrize("who", ["scheduler:", "scheduler:x", "nobody:x", "client:", "token"])
async def test_a_wrong_password_is_no_way_in(server: NatsServer, who: str) -> None:
    address = server.url.removeprefix("nats://")
    assert "Authorization" in await _enter(f"nats://{who}@{address}")


async def test_other_hosts_need_a_password(tmp_path: Path) -> None:
    access = BusAccess.draw(Subjects(), anonymous=False)
    async with NatsServer(tmp_path / "bus", access=access) as server:
        assert "Authorization" in await _enter(server.url)
        assert await _enter(access.url(server.url, User.CLIENT)) == ""


async def test_files_and_arguments_tell_no_password(
    server: NatsServer, access: BusAccess, tmp_path: Path
) -> None:
    files = list((tmp_path / "bus").iterdir())
    readable = [path for path in files if path.stat().st_mode & 0o077 and path.suffix == ".conf"]
    assert readable == []
    arguments = Path(f"/proc/{server.pid}/cmdline").read_text()
    for password in access.passwords.values():
        assert password not in arguments
        for path in files:
            assert password not in path.read_text(errors="replace"), path


async def test_a_command_says_that_it_was_refused(server: NatsServer, access: BusAccess) -> None:
    with pytest.raises(Problem, match="E205") as caught:
        async with connect(server.url) as anybody:
            await anybody.subscribe("streetcar.v1.beat.*.*")
            await _settle([Person("client", anybody)])
    assert "streetcar.v1.beat" in caught.value.cause
    url = access.url(server.url, User.SCHEDULER)
    with pytest.raises(Problem, match="E205") as caught:
        async with connect(url) as scheduler:
            await scheduler.subscribe("_INBOX.>")
            await _settle([Person("scheduler", scheduler)])
    assert access.passwords[User.SCHEDULER] not in "".join(caught.value.lines())
    async with connect(url) as scheduler:
        await scheduler.subscribe("streetcar.v1.beat.scheduler.*")
        await _settle([Person("scheduler", scheduler)])
