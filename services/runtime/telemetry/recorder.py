"""Where a service puts its closed spans: its ring, what it shares with others, what it exports.

Invariants: only sampled spans come in; each costs some microseconds and no I/O; every queue is
bounded, and what overflows is counted.

Shell: draws ids. To be called in one thread, the loop's.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Protocol

from services.contracts.limits import MAX_ATTRIBUTE_CHARS, MAX_SPAN_LINKS, MAX_SPANS_QUEUED
from services.contracts.spans import SpanLink, SpanRecord, TimedSpan
from services.contracts.trace_context import (
    TRACEPARENT,
    TRACESTATE,
    TraceContext,
    parse_traceparent,
    within_ratio,
)

from .clock import WallClock
from .ring import SpanRing


class Exporter(Protocol):
    """Takes spans out of the process; never blocks."""

    def export(self, spans: list[SpanRecord]) -> None: ...

    def close(self) -> None: ...


class Recorder:
    """service: `<kind>/<id>`. ratio: of the traces that begin here, how many are sampled, 0 to 1.

    num_dropped: spans that nobody took over before MAX_SPANS_QUEUED others came.
    """

    def __init__(self, service: str, ratio: float = 1.0) -> None:
        self.service = service
        self.ring = SpanRing()
        self.num_dropped = 0
        self._ratio = ratio
        self._clock = WallClock()
        self._fresh: list[SpanRecord] = []

    def context(self, headers: Mapping[str, str]) -> TraceContext:
        """The caller's context, whose decision is kept, or a new trace's: its `span_id` is then
        nobody's yet.
        """
        given = parse_traceparent(headers.get(TRACEPARENT, ""), headers.get(TRACESTATE, ""))
        if given is not None:
            return given
        trace_id = new_trace_id()
        return TraceContext(trace_id, "", within_ratio(trace_id, self._ratio))

    def record(self, span: TimedSpan) -> None:
        """Keep `span`, unless its trace is not sampled."""
        if not span.place.sampled:
            return
        record = SpanRecord(
            trace_id=span.place.trace_id,
            span_id=span.span_id or new_span_id(),
            parent_id=span.parent_id if span.span_id else span.place.span_id,
            name=span.name,
            kind=span.kind,
            service=self.service,
            start_unix_ns=self._clock.unix_ns(span.start_ns),
            duration_ns=max(0, span.end_ns - span.start_ns),
            request_id=span.request_id,
            tracestate=span.place.tracestate,
            attributes=span.attributes,
            links=[SpanLink(at.trace_id, at.span_id) for at in span.links[:MAX_SPAN_LINKS]],
            error=span.error[:MAX_ATTRIBUTE_CHARS],
        )
        self.ring.add(record)
        if len(self._fresh) >= MAX_SPANS_QUEUED:
            self.num_dropped += 1
            return
        self._fresh.append(record)

    def take_fresh(self) -> list[SpanRecord]:
        """What was recorded since the last call."""
        fresh, self._fresh = self._fresh, []
        return fresh


def new_trace_id() -> str:
    return secrets.token_hex(16)


def new_span_id() -> str:
    return secrets.token_hex(8)
