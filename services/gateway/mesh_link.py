"""The gateway's way to the mesh: one connection for requests, one for beats and traces.

Invariants: a bus that is away is waited for, and said once; `Gateway.client` is None until then, so
that requests are refused; a gateway that leaves says so in its last beat.

Shell: the bus, the clock.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Final

from services.client import Client, StreetcarClientError
from services.contracts.beats import Beat, ServiceKind
from services.contracts.codec import Decoder, encode
from services.contracts.errors import WireError
from services.contracts.limits import BEAT_PERIOD_MS
from services.contracts.permissions import inbox_prefix
from services.gateway.mesh_view import MeshView
from services.gateway.serving import Gateway
from services.runtime.bus import Delivery, NatsBus
from services.runtime.bus_url import user_of
from services.runtime.log import get_logger
from services.runtime.service import (
    CONNECT_RETRY_S,
    DEFAULT_NATS_URL,
    Stopping,
    connect,
    run_together,
    say_leaving,
    subjects,
)
from services.runtime.settings import Settings
from services.runtime.telemetry.sharing import telemetry

FIRST_FRAME_TIMEOUT_S: Final = 120.0
NEXT_FRAME_TIMEOUT_S: Final = 300.0
FIRST_BEATS_S: Final = 1.0
"""Everybody who lives beats several times in it."""


class MeshLink:
    """joined: set once requests can be sent, and the mesh has been heard, or has kept silent."""

    def __init__(self, settings: Settings) -> None:
        self.joined = asyncio.Event()
        self._settings = settings
        self._names = subjects(settings)
        self._view = MeshView()
        self._traces = telemetry(settings, ServiceKind.GATEWAY, settings.gateway_id)
        self._bus: NatsBus | None = None
        self._decoder = Decoder(Beat)
        self._log = get_logger("gateway")
        self._heard = asyncio.Event()
        self.gateway = Gateway(None, self._view, bus_up=self._is_up, recorder=self._traces.recorder)

    async def run(self) -> None:
        """Until cancelled."""
        settings = self._settings
        self._bus = bus = await connect(settings, settings.gateway_id, Stopping())
        try:
            for kind in (ServiceKind.SCHEDULER, ServiceKind.ADMISSION):
                await bus.subscribe(self._names.any_beat(kind.value), self._hear)
            await bus.serve("streetcar-gateway", "Streetcar: the OpenAI-compatible HTTP edge", [])
            await self._traces.join(bus, self._names)
            client = await self._client()
            try:
                self.gateway.body_limit = client.max_payload
                self.gateway.client = client
                await run_together(
                    asyncio.Event(), self._join(), self._beat(bus), self._traces.share_forever()
                )
            finally:
                await client.__aexit__()
        finally:
            await self._traces.close()
            await bus.close()

    async def _client(self) -> Client:
        """Connected; it waits for the bus as long as it takes."""
        url = self._settings.nats_url or DEFAULT_NATS_URL
        while True:
            client = Client(
                url,
                prefix=self._settings.subject_prefix,
                inbox_prefix=inbox_prefix(user_of(url)),
                first_frame_timeout_s=FIRST_FRAME_TIMEOUT_S,
                next_frame_timeout_s=NEXT_FRAME_TIMEOUT_S,
            )
            try:
                return await client.__aenter__()
            except StreetcarClientError:
                # It has just gone again; `connect` has said that it was away, or says it is lost.
                await asyncio.sleep(CONNECT_RETRY_S)

    async def _join(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FIRST_BEATS_S):
                while self._view.missing(time.monotonic_ns()):
                    self._heard.clear()
                    await self._heard.wait()
        self.joined.set()
        await asyncio.Event().wait()

    def _hear(self, delivery: Delivery) -> None:
        try:
            self._view.hear(self._decoder.decode(delivery.payload), time.monotonic_ns())
        except WireError as error:
            self._log.warning("bad_beat", subject=delivery.subject, reason=str(error))
        self._heard.set()

    def _is_up(self) -> bool:
        return self._bus is not None and self._bus.client.is_connected

    async def _beat(self, bus: NatsBus) -> None:
        """Until it leaves: from then on another one beats under the same name."""
        kind, name = ServiceKind.GATEWAY, self._settings.gateway_id
        subject, beat = self._names.beat(kind.value, name), Beat(kind, name)
        while not self.gateway.draining:
            await bus.publish(subject, encode(beat))
            await asyncio.sleep(BEAT_PERIOD_MS / 1000)
        await say_leaving(bus, subject, beat)
        await asyncio.Event().wait()
