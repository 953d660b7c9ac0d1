"""Spans to an OpenTelemetry collector, over HTTP with protobuf, in a thread of its own.

Invariants: `export` never blocks; at most MAX_SPANS_QUEUED spans wait, and what overflows, or what
a collector does not take, is counted and said once a minute at most. SDK spans are made here, off
the path of every request. Headers, compression and certificates are the SDK's own variables.

Shell: the network.
"""

from __future__ import annotations

import queue
import threading
import time
from typing import Final

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, TraceFlags, TraceState
from opentelemetry.trace.status import Status, StatusCode

from services.contracts.limits import MAX_SPANS_QUEUED
from services.contracts.spans import SpanRecord
from services.runtime.log import get_logger

TIMEOUT_S: Final = 5
CLOSE_TIMEOUT_S: Final = 2.0
COMPLAIN_EVERY_S: Final = 60.0

_SCOPE: Final = InstrumentationScope("streetcar")
_SAMPLED: Final = TraceFlags(TraceFlags.SAMPLED)


class OtlpExporter:
    """endpoint: the base URL of a collector, to which `/v1/traces` is added."""

    def __init__(self, endpoint: str, kind: str, service_id: str) -> None:
        self._resource = Resource.create(
            {
                "service.namespace": "streetcar",
                "service.name": kind,
                "service.instance.id": service_id,
            }
        )
        self._sender = OTLPSpanExporter(f"{endpoint.rstrip('/')}/v1/traces", timeout=TIMEOUT_S)
        self._batches: queue.SimpleQueue[list[SpanRecord] | None] = queue.SimpleQueue()
        self._num_in = self._num_out = 0
        self._complained_s = 0.0
        self.num_dropped = 0
        self._log = get_logger("telemetry")
        self._thread = threading.Thread(target=self._run, name="otlp", daemon=True)
        self._thread.start()

    def export(self, spans: list[SpanRecord]) -> None:
        if self._num_in - self._num_out + len(spans) > MAX_SPANS_QUEUED:
            self._lose(len(spans), "queue_full")
            return
        self._num_in += len(spans)
        self._batches.put(spans)

    def close(self) -> None:
        """What waits is sent, if the collector is quick enough."""
        self._batches.put(None)
        self._thread.join(CLOSE_TIMEOUT_S)
        self._sender.shutdown()  # type: ignore[no-untyped-call]

    def _run(self) -> None:
        while (spans := self._batches.get()) is not None:
            result = self._sender.export([self._readable(span) for span in spans])
            self._num_out += len(spans)
            if result is not SpanExportResult.SUCCESS:
                self._lose(len(spans), "collector")

    def _lose(self, number: int, reason: str) -> None:
        self.num_dropped += number
        now_s = time.monotonic()
        if not self._complained_s or now_s - self._complained_s >= COMPLAIN_EVERY_S:
            self._complained_s = now_s
            self._log.warning("spans_not_exported", dropped=self.num_dropped, reason=reason)

    def _readable(self, span: SpanRecord) -> ReadableSpan:
        status = Status(StatusCode.ERROR, span.error) if span.error else Status(StatusCode.UNSET)
        state = TraceState.from_header([span.tracestate]) if span.tracestate else None
        parent = _context(span.trace_id, span.parent_id, state) if span.parent_id else None
        attributes = {**span.attributes}
        if span.request_id:
            attributes["streetcar.request_id"] = span.request_id
        return ReadableSpan(
            name=span.name,
            context=_context(span.trace_id, span.span_id, state),
            parent=parent,
            resource=self._resource,
            attributes=attributes,
            links=[Link(_context(link.trace_id, link.span_id)) for link in span.links],
            kind=SpanKind[span.kind.name],
            instrumentation_scope=_SCOPE,
            status=status,
            start_time=span.start_unix_ns,
            end_time=span.start_unix_ns + span.duration_ns,
        )


def _context(trace_id: str, span_id: str, state: TraceState | None = None) -> SpanContext:
    return SpanContext(int(trace_id, 16), int(span_id, 16), True, _SAMPLED, state)
