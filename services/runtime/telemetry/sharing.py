"""Traces on the bus: a service answers what its ring has, and shares what it has just recorded.

Invariants: an answer goes to an inbox, never to a subject of the mesh; a batch is shared every
SHARE_PERIOD_S and dropped freely. Those that keep spans for others hold them in their own ring, so
that the part that a dead process played in a request is still there to be seen.

Shell: the bus.
"""

from __future__ import annotations

import asyncio
from typing import Final

from services.contracts import codec
from services.contracts.beats import ServiceKind
from services.contracts.errors import WireError
from services.contracts.limits import MAX_SPANS_SENT
from services.contracts.permissions import SPAN_KEEPERS, takes_spans
from services.contracts.spans import SpanBatch, SpanRecord, TraceReply
from services.contracts.subjects import Subjects
from services.runtime.bus import Bus, Delivery, PayloadTooLarge
from services.runtime.settings import Settings

from .recorder import Exporter, Recorder

SHARE_PERIOD_S: Final = 0.25
_batch = codec.Decoder(SpanBatch)


class Telemetry:
    """One service's traces. `recorder`: where its spans go."""

    def __init__(self, kind: ServiceKind, recorder: Recorder, exporter: Exporter | None) -> None:
        self.recorder = recorder
        self._keeps = kind.value in SPAN_KEEPERS
        self._exporter = exporter
        self._bus: Bus | None = None
        self._names = Subjects()
        self._tasks: set[asyncio.Task[object]] = set()

    async def join(self, bus: Bus, names: Subjects) -> None:
        """Answer on the bus from now on."""
        self._bus, self._names = bus, names
        await bus.subscribe(names.any_trace, self.on_query)
        if self._keeps:
            await bus.subscribe(names.spans, self.on_spans)

    def on_query(self, delivery: Delivery) -> None:
        if self._bus is None or not takes_spans(delivery.reply):
            return
        found = self.recorder.ring.find(self._names.tail(delivery.subject, 1))
        if not found:
            return
        answer = TraceReply(
            self.recorder.service,
            # The beginning of a trace tells more than its end.
            found[:MAX_SPANS_SENT],
            len(found) > MAX_SPANS_SENT,
            self.recorder.ring.num_evicted,
        )
        task = asyncio.ensure_future(self._publish(delivery.reply, answer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def on_spans(self, delivery: Delivery) -> None:
        try:
            batch = _batch.decode(delivery.payload)
        except WireError:
            # Of another version on the same bus; nothing depends on it.
            return
        if batch.service != self.recorder.service:
            for span in batch.spans:
                self.recorder.ring.add(span)

    async def share_forever(self) -> None:
        while True:
            await asyncio.sleep(SHARE_PERIOD_S)
            await self.share()

    async def share(self) -> None:
        """Hand over what is new: to the bus, and to the exporter."""
        fresh = self.recorder.take_fresh()
        if not fresh:
            return
        if self._exporter is not None:
            self._exporter.export(fresh)
        if self._bus is not None:
            for start in range(0, len(fresh), MAX_SPANS_SENT):
                part: list[SpanRecord] = fresh[start : start + MAX_SPANS_SENT]
                batch = SpanBatch(self.recorder.service, part)
                await self._publish(self._names.spans, batch)

    async def _publish(self, subject: str, message: codec.Message) -> None:
        assert self._bus is not None
        try:
            await self._bus.publish(subject, codec.encode(message))
        except PayloadTooLarge:
            # A bus of other limits than ours: a trace is not worth a service.
            self.recorder.num_dropped += 1

    async def close(self) -> None:
        """Before the bus is closed: the last spans go out."""
        await self.share()
        if self._exporter is not None:
            await asyncio.to_thread(self._exporter.close)


def telemetry(settings: Settings, kind: ServiceKind, service_id: str) -> Telemetry:
    """A service's own; it exports where the settings or OTEL_EXPORTER_OTLP_ENDPOINT say where."""
    service = f"{kind.value}/{service_id}"
    exporter: Exporter | None = None
    if settings.otlp_url:
        # The SDK takes a quarter of a second to import.
        from .otlp import OtlpExporter

        exporter = OtlpExporter(settings.otlp_url, kind.value, service_id)
    return Telemetry(kind, Recorder(service, settings.trace_ratio), exporter)
