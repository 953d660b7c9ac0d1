"""Spans: what happened in one service, from when to when, and to which request.

A `TimedSpan` has the times of its process's monotonic clock; a `SpanRecord` is what others see of
it: a wall time for its beginning, and a duration that is still the monotonic clock's. Attributes
are names, sizes and timings; never text, tokens or keys.

Pure.
"""

from __future__ import annotations

from enum import StrEnum
from hashlib import blake2b
from typing import Annotated

import msgspec
from msgspec import Meta

from . import limits
from .codec import Message
from .trace_context import TraceContext

Attribute = int | float | str
_Name = Annotated[str, Meta(max_length=limits.MAX_SPAN_NAME_CHARS)]
_Value = int | float | Annotated[str, Meta(max_length=limits.MAX_ATTRIBUTE_CHARS)]
# By length alone: a pattern for each id would be most of what it costs to keep a span.
_TraceId = Annotated[str, Meta(min_length=32, max_length=32)]
_SpanId = Annotated[str, Meta(min_length=16, max_length=16)]
_Parent = Annotated[str, Meta(max_length=16)]


class SpanKind(StrEnum):
    """As OpenTelemetry names them."""

    INTERNAL = "internal"
    SERVER = "server"
    CLIENT = "client"
    PRODUCER = "producer"
    CONSUMER = "consumer"


class TimedSpan(msgspec.Struct, frozen=True, kw_only=True):
    """One closed span in the process that saw it; start_ns, end_ns: monotonic.

    place: the context of its parent, or, where `span_id` is given, its own trace with `span_id` as
    its id and `parent_id` ("" for a root) above it. links: spans of other traces that took part.
    """

    name: str
    place: TraceContext
    start_ns: int
    end_ns: int
    kind: SpanKind = SpanKind.INTERNAL
    span_id: str = ""
    parent_id: str = ""
    request_id: str = ""
    attributes: dict[str, Attribute] = {}
    links: tuple[TraceContext, ...] = ()
    error: str = ""


def first_span_id(trace_id: str, *path: str | int) -> int:
    """Where the span ids of a maker that draws none begin: BLAKE2b-64 of its trace and of what
    names it once in its book-keeping. Its spans count on from here.
    """
    text = "/".join([trace_id, *map(str, path)])
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")


class SpanLink(Message, frozen=True):
    trace_id: _TraceId
    span_id: _SpanId


class SpanRecord(Message, frozen=True, kw_only=True):
    """start_unix_ns: wall time by an offset taken once at the start of the service; duration_ns:
    monotonic. service: `<kind>/<id>`. request_id: where the span is the request's own, else "".
    """

    trace_id: _TraceId
    span_id: _SpanId
    parent_id: _Parent
    name: _Name
    kind: SpanKind
    service: _Name
    start_unix_ns: int
    duration_ns: Annotated[int, Meta(ge=0)]
    request_id: Annotated[str, Meta(max_length=limits.MAX_SPAN_NAME_CHARS)] = ""
    tracestate: Annotated[str, Meta(max_length=limits.MAX_TRACESTATE_CHARS)] = ""
    attributes: Annotated[dict[_Name, _Value], Meta(max_length=limits.MAX_ATTRIBUTES)] = {}
    links: Annotated[list[SpanLink], Meta(max_length=limits.MAX_SPAN_LINKS)] = []
    error: Annotated[str, Meta(max_length=limits.MAX_ATTRIBUTE_CHARS)] = ""

    @property
    def size_bytes(self) -> int:
        """About what it takes in memory: a struct and its ids, and more for each part."""
        return 700 + 150 * len(self.attributes) + 250 * len(self.links) + len(self.tracestate)


_Records = Annotated[list[SpanRecord], Meta(max_length=limits.MAX_SPANS_SENT)]


class SpanBatch(Message, frozen=True, tag="spans"):
    """any service -> those that keep spans for others; dropped freely.

    What a process has recorded is gone with it: this is how its part of a trace outlives it.
    """

    service: _Name
    spans: _Records


class TraceReply(Message, frozen=True, tag="trace_reply"):
    """any service -> who asked on `trace.<request or trace id>`: what its ring has of it.

    cut: there was more than one message takes. num_evicted: spans that this ring has let go so far.
    """

    service: _Name
    spans: _Records
    cut: bool = False
    num_evicted: int = 0
