"""The ledger on the bus: every lookup, lease and delta of every engine, in the order of arrival.

One subscription for all of them: deltas, then the lease request that counts on them, must not
change places. Each ledger hears everything, in a queue group of its own, and the core leaves alone
what names another.

Shell.
"""

from __future__ import annotations

import asyncio

from services.contracts import codec
from services.contracts.beats import Beat
from services.contracts.kv import (
    KvCheckRequest,
    KvDelta,
    KvReportRequest,
    KvSnapshot,
    LeaseReply,
    LeaseRequest,
    LookupReply,
    LookupRequest,
)
from services.runtime.actor import Actor
from services.runtime.bus import Bus, Delivery, Endpoint
from services.runtime.failpoints import failpoint
from services.runtime.incoming import Incoming
from services.runtime.log import report_ready
from services.runtime.service import (
    beat_forever,
    connect,
    run_id,
    run_until_left,
    say_leaving,
    subjects,
)
from services.runtime.settings import Settings

from .core import Asked, Event, KvCore, Question, Reply

_decoder: codec.Decoder[Question | KvDelta | KvSnapshot] = codec.Decoder(
    LookupRequest, LeaseRequest, KvReportRequest, KvCheckRequest, KvDelta, KvSnapshot
)
_beat_decoder = codec.Decoder(Beat)


class KvService:
    def __init__(self, core: KvCore, bus: Bus) -> None:
        self._bus = bus
        self.actor: Actor[Event, Reply] = Actor(core, self._perform)
        self._incoming = Incoming("kv_store")

    def on_message(self, delivery: Delivery) -> None:
        message = self._incoming.decoded(_decoder, delivery)
        if message is None:
            return
        if isinstance(message, KvDelta | KvSnapshot):
            if not failpoint("kv_store.before_delta"):
                self.actor.post(message)
        else:
            self.actor.post(Asked(message, delivery.reply))

    def on_beat(self, delivery: Delivery) -> None:
        beat = self._incoming.decoded(_beat_decoder, delivery)
        if beat is not None:
            self.actor.post(beat)

    async def _perform(self, effect: Reply) -> None:
        message = effect.message
        if isinstance(message, LeaseReply) and failpoint("kv_store.before_grant"):
            return
        if isinstance(message, LookupReply) and failpoint("kv_store.before_lookup_reply"):
            return
        if effect.reply:
            await self._bus.publish(effect.reply, codec.encode(message))


async def serve(settings: Settings, stopping: asyncio.Event) -> None:
    names, me = subjects(settings), run_id(settings.kv_store_id)
    bus = await connect(settings, me, stopping)
    core = KvCore(me, settings.tenant_cache_share)
    service = KvService(core, bus)
    endpoint = Endpoint("ledger", names.any_kv, service.on_message, queue=me)
    await bus.serve("streetcar-kv-store", "Streetcar: KV-block ledger", [endpoint])
    await bus.subscribe(names.any_beat("scheduler"), service.on_beat)
    await bus.flush()
    report_ready(id=me)
    beat = names.beat("kv_store", me)

    async def leave() -> None:
        await service.actor.finish()
        await say_leaving(bus, beat, core.beat())

    try:
        await run_until_left(
            stopping, leave, service.actor.run(), beat_forever(bus, beat, core.beat)
        )
    finally:
        await bus.close()
