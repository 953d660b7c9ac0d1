"""Listens to the heartbeats of a cluster's processes, and to the bus itself, and names who hangs.

Invariants: nobody is named while the bus, or the watcher's own loop, may be what is stuck, nor who
was only kept waiting for a processor; who is named is named once, until it is expected again.

Shell: one connection, the clock.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Final

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg

from services.contracts.beats import Beat, ServiceKind
from services.contracts.codec import Decoder
from services.contracts.errors import WireError
from services.contracts.permissions import inbox_prefix
from services.contracts.subjects import Subjects
from services.runtime.bus import disconnect
from services.runtime.bus_url import user_of
from services.runtime.heartbeats import SILENT_S, Heartbeats

WATCH_PERIOD_S: Final = 0.25
# This process was itself stopped, or starved, so long: what it did not hear proves nothing.
ASLEEP_S: Final = 1.0
PING_TIMEOUT_S: Final = 1.0
PING_KEPT_S: Final = 3600
RETRY_S: Final = 0.2
# Part of a silence that a process must have waited for a processor, to be forgiven it.
STARVED: Final = 0.25

Hung = Callable[[str, float], None]
_decoder = Decoder(Beat)


class Watcher:
    """names: of the services, by kind and id; an id may be followed by `-` and the run's own mark.

    hung: called with a service's name and how long it was silent; bus_hung: the same for the bus.
    waited_s: how long a service, ready to run, has waited for a processor in all its life.
    """

    def __init__(
        self,
        names: Mapping[tuple[ServiceKind, str], str],
        hung: Hung,
        bus_hung: Callable[[float], None],
        waited_s: Callable[[str], float],
    ) -> None:
        self.heartbeats = Heartbeats()
        self._names = names
        self._hung = hung
        self._bus_hung = bus_hung
        self._waited_s = waited_s
        self._waited_at_beat: dict[str, float] = {}
        self._client = Client()
        self._ping: asyncio.Task[None] | None = None
        self._pings: set[asyncio.Task[None]] = set()

    async def run(self, url: str, subjects: Subjects) -> None:
        """Until cancelled."""
        await self._connect(url)
        try:
            await self._client.subscribe(subjects.any_beat(), cb=self._on_beat)
            await self._watch()
        finally:
            await disconnect(self._client)
            for ping in self._pings:
                ping.cancel()

    async def _connect(self, url: str) -> None:
        while True:
            try:
                await self._client.connect(
                    servers=url.split(","),
                    name="supervisor",
                    inbox_prefix=inbox_prefix(user_of(url)),
                    max_reconnect_attempts=-1,
                    reconnect_time_wait=RETRY_S,  # type: ignore[arg-type]
                    error_cb=_ignore,
                    reconnected_cb=self._on_reconnected,
                )
                return
            except (nats.errors.Error, OSError):
                await asyncio.sleep(RETRY_S)

    async def _watch(self) -> None:
        checked_s = answered_s = time.monotonic()
        while True:
            await asyncio.sleep(WATCH_PERIOD_S)
            answers = await self._bus_answers()
            now_s = time.monotonic()
            asleep = now_s - checked_s > ASLEEP_S + PING_TIMEOUT_S
            checked_s = now_s
            if answers and not asleep:
                answered_s = now_s
                for name, silent_s in self.heartbeats.silent(now_s).items():
                    self._judge(name, silent_s)
                continue
            self.heartbeats.forgive(now_s)
            if asleep:
                answered_s = now_s
            elif now_s - answered_s > SILENT_S - PING_TIMEOUT_S:
                self._bus_hung(now_s - answered_s)
                answered_s = now_s

    def _judge(self, name: str, silent_s: float) -> None:
        waited_s = self._waited_s(name) - self._waited_at_beat.get(name, 0.0)
        if waited_s > silent_s * STARVED:
            # A machine with too much to do is not helped by starting things anew.
            self.heartbeats.expect(name)
            self._hear(name)
        else:
            self._hung(name, silent_s)

    def _hear(self, name: str) -> None:
        self.heartbeats.heard(name, time.monotonic())
        self._waited_at_beat[name] = self._waited_s(name)

    async def _bus_answers(self) -> bool:
        """One ping at a time, and never one that is given up: nats-py ends its reading, without a
        word, at the answer to a ping that was cancelled.
        """
        if self._ping is None or self._ping.done():
            self._ping = asyncio.create_task(self._client.flush(timeout=PING_KEPT_S))
            self._pings.add(self._ping)
            self._ping.add_done_callback(self._pings.discard)
        try:
            async with asyncio.timeout(PING_TIMEOUT_S):
                await asyncio.shield(self._ping)
        except (TimeoutError, nats.errors.Error, OSError):
            return False
        return self._client.is_connected

    async def _on_reconnected(self) -> None:
        """What was asked of the server before this one will not be answered, and is left alone."""
        self._ping = None

    async def _on_beat(self, message: Msg) -> None:
        try:
            beat = _decoder.decode(message.data)
        except WireError:
            # Of another version of Streetcar on the same bus.
            return
        whole = (beat.kind, beat.service_id)
        name = self._names.get(whole) or self._names.get(
            (beat.kind, beat.service_id.rpartition("-")[0])
        )
        if name is not None:
            self._hear(name)


async def _ignore(_error: Exception) -> None:
    """The pings tell what is wrong."""
