"""The ledger's pool when the load is over: whether every block is accounted for.

Shell: asks over the bus.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass
from typing import Any, Final

import nats
import nats.errors

from services.contracts.beats import Beat, EngineLoad
from services.contracts.codec import Decoder, encode
from services.contracts.errors import WireError
from services.contracts.kv import KvCheck, KvCheckRequest
from services.contracts.permissions import inbox_prefix
from services.contracts.subjects import Subjects
from services.runtime.bus_url import user_of
from services.simulator.drill.checker import Books

QUIET_TIMEOUT_S: Final = 20.0
"""Sequences whose client or admission has vanished are ended within seconds."""

ASK_TIMEOUT_S: Final = 1.0
_PERIOD_S: Final = 0.1


@dataclass(slots=True)
class _Heard:
    load: EngineLoad | None = None
    at_s: float = 0.0


async def read_books(url: str, names: Subjects, engine: str) -> Books:
    """The books once they agree, or as they are after QUIET_TIMEOUT_S. `url`: of an observer."""
    heard, decoder = _Heard(), Decoder(Beat)

    async def hear(message: Any) -> None:
        with contextlib.suppress(WireError):
            heard.load = decoder.decode(message.data).engine
            heard.at_s = time.monotonic()

    connection = await nats.connect(url, inbox_prefix=inbox_prefix(user_of(url)))
    books = Books(0, 0, 0, 0, 0, 0, "the ledger or the scheduler was never heard")
    try:
        await connection.subscribe(names.beat("scheduler", engine), cb=hear)
        deadline = time.monotonic() + QUIET_TIMEOUT_S
        while time.monotonic() < deadline:
            asked_s = time.monotonic()
            question = KvCheckRequest(engine, heard.load.ledger if heard.load else "")
            check = await _ask(connection, names.kv_check(engine), question)
            while heard.at_s <= asked_s and time.monotonic() < deadline:
                await asyncio.sleep(_PERIOD_S / 10)
            if check is not None and heard.load is not None:
                books = _books(check, heard.load)
                if not books.leaked and not heard.load.num_running + heard.load.num_waiting:
                    return books
            await asyncio.sleep(_PERIOD_S)
    finally:
        await connection.close()
    return books


async def _ask(connection: Any, subject: str, question: KvCheckRequest) -> KvCheck | None:
    try:
        answer = await connection.request(subject, encode(question), timeout=ASK_TIMEOUT_S)
        check = Decoder(KvCheck).decode(answer.data)
    except (nats.errors.Error, TimeoutError, WireError):
        return None
    return check if check.known else None


def _books(check: KvCheck, load: EngineLoad) -> Books:
    return Books(
        total=check.num_blocks,
        free=check.num_free,
        leased=check.num_leased,
        cached=check.num_cached,
        held=load.num_blocks_held,
        spare=load.num_blocks_spare,
        fault=check.fault,
    )
