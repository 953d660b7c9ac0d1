"""`streetcar kv` and `kv check` against a real bus and a real ledger."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import nats
import pytest

from kv_store.service import serve
from services.cli import kv
from services.contracts.beats import Beat, KvPoolLoad, ServiceKind
from services.contracts.codec import Decoder, encode
from services.contracts.kv import KvReport, KvSnapshot, TenantReport
from services.contracts.subjects import Subjects
from services.contracts.vectors import pack
from services.runtime.nats_server import NatsServer
from services.runtime.problem import Problem
from services.runtime.settings import load

PREFIX = "streetcar.v1"


@asynccontextmanager
async def _ledger(directory: Path) -> AsyncIterator[str]:
    """A bus with a ledger that knows engine-0: nine blocks, two of them held, four host slots."""
    async with NatsServer(directory) as server:
        settings = load(environ={}, flags={"nats_url": server.url})
        stopping = asyncio.Event()
        client = await nats.connect(server.url)
        beats = await client.subscribe(Subjects(PREFIX).any_beat("kv_store"))
        serving = asyncio.create_task(serve(settings, stopping))
        beat = Decoder(Beat).decode((await beats.next_msg(timeout=5)).data)
        snapshot = KvSnapshot(
            engine="engine-0",
            generation=1,
            epoch=1,
            number=0,
            num_blocks=9,
            block_size=4,
            block_ids=pack([3, 5]),
            holds=pack([1, 2]),
            host_blocks=4,
            ledger=beat.service_id,
        )
        await client.publish(Subjects(PREFIX).delta("engine-0"), encode(snapshot))
        await client.close()
        yield server.url
        stopping.set()
        await serving


@pytest.mark.nats
async def test_the_numbers_are_the_ledgers_own(tmp_path: Path) -> None:
    async with _ledger(tmp_path) as url:
        (report,) = await kv._reports(url, PREFIX, None)
        assert (report.engine, report.num_blocks, report.num_host_blocks) == ("engine-0", 8, 4)
        assert (report.num_free, report.num_leased, report.num_cached) == (6, 2, 0)
        (check,) = await kv._checks(url, PREFIX, "engine-0")
        assert (check.fault, check.num_holds) == ("", 3)
        with pytest.raises(Problem, match="a pool of 'engine-9'"):
            await kv._reports(url, PREFIX, "engine-9")


@pytest.mark.nats
async def test_a_bus_without_a_ledger_is_told(tmp_path: Path) -> None:
    async with NatsServer(tmp_path) as server:
        with pytest.raises(Problem, match="No ledger has a pool"):
            await kv._checks(server.url, PREFIX, "engine-0")


def test_of_two_ledgers_with_the_same_pool_the_later_one_is_asked() -> None:
    def beat(name: str, epoch: int, binding: int) -> Beat:
        pool = KvPoolLoad("engine-0", 1, epoch, 9, 8, 0, 0, need_snapshot=False, binding=binding)
        return Beat(ServiceKind.KV_STORE, name, pools=[pool])

    assert kv.ledgers_of([beat("a", 1, 1), beat("b", 1, 0)]) == {"engine-0": "a"}
    assert kv.ledgers_of([beat("a", 1, 1), beat("b", 2, 0)]) == {"engine-0": "b"}
    assert kv.ledgers_of([Beat(ServiceKind.KV_STORE, "fresh")]) == {}


def test_the_picture_for_a_person() -> None:
    report = KvReport(
        engine="e",
        known=True,
        num_blocks=8,
        num_query_blocks=8,
        num_hit_blocks=2,
        num_host_blocks=4,
        tenants=[TenantReport("shared", 3, 1)],
    )
    text = "\n".join(kv.lines(report))
    assert "25.0% of 8 blocks hit" in text and "host" in text and "shared" in text
    assert kv.hit_rate(KvReport(engine="e")) == 0.0
