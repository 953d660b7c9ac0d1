"""The scheduler's shell: what becomes of an answer that does not come."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

from scheduler_svc.core import SchedulerCore
from scheduler_svc.service import ATTACH_TIMEOUT_S, SchedulerService, config_of
from services.contracts import codec
from services.contracts.limits import MAX_PAYLOAD_BYTES
from services.contracts.step import Attach, Attached
from services.contracts.subjects import Subjects
from services.runtime.bus import RequestTimeout
from services.runtime.settings import load
from services.runtime.telemetry.recorder import Recorder

_attach = codec.Decoder(Attach)


class LossyBus:
    """Takes everything; loses the first `num_lost` answers to an attach."""

    def __init__(self, num_lost: int) -> None:
        self.num_lost = num_lost
        self.max_payload = MAX_PAYLOAD_BYTES
        self.dropped: Counter[str] = Counter()
        self.asked: list[tuple[Attach, float]] = []

    async def publish(self, subject: str, payload: bytes, **_more: Any) -> bool:
        return True

    async def request(self, subject: str, payload: bytes, *, timeout_s: float) -> bytes:
        if not subject.endswith(".attach"):
            raise RequestTimeout(subject)
        attach = _attach.decode(payload)
        self.asked.append((attach, timeout_s))
        if len(self.asked) <= self.num_lost:
            raise RequestTimeout(f"no answer on {subject} within {timeout_s:g} s")
        return codec.encode(
            Attached(
                attempt=attach.attempt,
                generation=3,
                epoch=8,
                num_blocks=64,
                block_size=16,
                max_num_seqs=4,
                max_model_len=256,
                vocab_size=512,
            )
        )


async def test_an_attach_whose_answer_is_lost_is_asked_again_as_the_same_attempt() -> None:
    core = SchedulerCore(config_of(load(environ={}, flags={"worker": "stub"}), MAX_PAYLOAD_BYTES))
    bus: Any = LossyBus(num_lost=2)
    service = SchedulerService(core, bus, Subjects(), Recorder("scheduler/engine-0"))
    running = asyncio.create_task(service.actor.run())
    try:
        async with asyncio.timeout(20):
            while not core.link.is_ready:
                await asyncio.sleep(0.01)
    finally:
        running.cancel()
        await asyncio.wait({running})
    attempts, timeouts = zip(*bus.asked, strict=True)
    assert attempts == (attempts[0],) * 3 and core.link.epoch == 8
    # A time-out of the step that it may wait for would be tens of seconds.
    assert set(timeouts) == {ATTACH_TIMEOUT_S} and ATTACH_TIMEOUT_S <= 2.0
