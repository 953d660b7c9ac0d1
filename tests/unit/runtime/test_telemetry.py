"""What a service records, keeps within bounds, answers, shares and exports."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from services.contracts import codec
from services.contracts.beats import ServiceKind
from services.contracts.limits import (
    MAX_ATTRIBUTE_CHARS,
    MAX_SPAN_LINKS,
    MAX_SPANS_QUEUED,
    MAX_SPANS_SENT,
)
from services.contracts.spans import SpanBatch, SpanKind, SpanRecord, TimedSpan, TraceReply
from services.contracts.subjects import Subjects
from services.contracts.trace_context import TraceContext
from services.runtime.bus import Delivery, PayloadTooLarge
from services.runtime.settings import Settings, SettingsError
from services.runtime.telemetry.otlp import OtlpExporter
from services.runtime.telemetry.recorder import Recorder
from services.runtime.telemetry.ring import SpanRing
from services.runtime.telemetry.sharing import Telemetry

TRACE = "ab" * 16
PLACE = TraceContext(TRACE, "cd" * 8, sampled=True)
NAMES = Subjects()


def span(number: int = 0, **more: Any) -> TimedSpan:
    fields: dict[str, Any] = {
        "name": "queue",
        "place": PLACE,
        "start_ns": number,
        "end_ns": number + 5,
        "request_id": f"r{number}",
    }
    return TimedSpan(**{**fields, **more})


class Wire:
    """A bus that remembers."""

    def __init__(self, limit: int = 1 << 20) -> None:
        self.max_payload = limit
        self.dropped: Counter[str] = Counter()
        self.sent: list[tuple[str, bytes]] = []
        self.subscribed: list[str] = []

    async def publish(self, subject: str, payload: bytes, **_more: Any) -> bool:
        if len(payload) > self.max_payload:
            raise PayloadTooLarge(len(payload), self.max_payload)
        self.sent.append((subject, payload))
        return True

    async def subscribe(self, subject: str, _handler: Any, **_more: Any) -> None:
        self.subscribed.append(subject)


async def joined(kind: ServiceKind, wire: Wire) -> Telemetry:
    traces = Telemetry(kind, Recorder(f"{kind.value}/x"), None)
    await traces.join(wire, NAMES)  # type: ignore[arg-type]
    return traces


def record_of(recorder: Recorder) -> SpanRecord:
    (record,) = recorder.take_fresh()
    return record


# ---- recording


def test_a_wall_time_and_a_monotonic_duration(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder("scheduler/e")
    now_ns, unix_ns = time.monotonic_ns(), time.time_ns()
    monkeypatch.setattr(time, "time_ns", lambda: unix_ns - 3600 * 10**9)
    recorder.record(span(start_ns=now_ns, end_ns=now_ns + 1234))
    record = record_of(recorder)
    assert record.duration_ns == 1234
    assert abs(record.start_unix_ns - unix_ns) < 10**9, "the wall clock was set back meanwhile"


def test_a_span_below_its_parent_or_as_itself() -> None:
    recorder = Recorder("scheduler/e")
    recorder.record(span())
    below = record_of(recorder)
    assert (below.parent_id, len(below.span_id)) == (PLACE.span_id, 16)
    recorder.record(span(span_id=PLACE.span_id, parent_id="ef" * 8))
    itself = record_of(recorder)
    assert (itself.span_id, itself.parent_id) == (PLACE.span_id, "ef" * 8)


def test_what_is_not_sampled_is_not_kept() -> None:
    recorder = Recorder("scheduler/e")
    recorder.record(span(place=TraceContext(TRACE, "cd" * 8, sampled=False)))
    assert not recorder.take_fresh() and not len(recorder.ring)


def test_parts_of_a_span_are_bounded() -> None:
    recorder = Recorder("scheduler/e")
    links = tuple(PLACE for _ in range(MAX_SPAN_LINKS + 5))
    recorder.record(span(links=links, error="x" * 1000))
    record = record_of(recorder)
    assert len(record.links) == MAX_SPAN_LINKS and len(record.error) == MAX_ATTRIBUTE_CHARS
    codec.Decoder(SpanBatch).decode(codec.encode(SpanBatch("s", [record])))


def test_what_nobody_takes_is_dropped_and_counted() -> None:
    recorder = Recorder("scheduler/e")
    for number in range(MAX_SPANS_QUEUED + 3):
        recorder.record(span(number))
    assert recorder.num_dropped == 3
    assert len(recorder.take_fresh()) == MAX_SPANS_QUEUED


@pytest.mark.parametrize(("ratio", "sampled"), [(0.0, False), (1.0, True)])
def test_a_new_trace_is_sampled_by_ratio(ratio: float, sampled: bool) -> None:
    context = Recorder("gateway/g", ratio).context({})
    assert context.sampled is sampled and context.span_id == ""


@pytest.mark.parametrize("flags", ["00", "01"])
def test_a_caller_s_decision_is_kept(flags: str) -> None:
    headers = {"traceparent": f"00-{TRACE}-{'cd' * 8}-{flags}", "tracestate": "a=1"}
    context = Recorder("gateway/g", 0.0).context(headers)
    assert context == TraceContext(TRACE, "cd" * 8, flags == "01", "a=1")


# ---- the ring


def test_the_ring_is_bounded_by_count_and_by_bytes() -> None:
    recorder = Recorder("scheduler/e")
    for number in range(100):
        recorder.record(span(number))
    records = recorder.take_fresh()
    by_count = SpanRing(max_spans=10)
    by_bytes = SpanRing(max_bytes=5 * records[0].size_bytes)
    for record in records:
        by_count.add(record)
        by_bytes.add(record)
        assert by_bytes.num_bytes <= 5 * records[0].size_bytes
    assert (len(by_count), by_count.num_evicted) == (10, 90)
    assert (len(by_bytes), by_bytes.num_evicted) == (5, 95)
    assert [s.request_id for s in by_count.find("r99")] == [f"r{n}" for n in range(90, 100)]
    assert not by_count.find("r3"), "it has given way"


def test_found_by_request_by_trace_and_by_link() -> None:
    recorder = Recorder("scheduler/e")
    other = TraceContext("12" * 16, "34" * 8, sampled=True)
    recorder.record(span(1))
    recorder.record(span(2, place=other))
    recorder.record(span(3, place=TraceContext("56" * 16, "", True), links=(PLACE,), request_id=""))
    ring = recorder.ring
    assert len(ring.find("r1")) == len(ring.find(TRACE)) == 2
    assert [s.request_id for s in ring.find("r2")] == ["r2"]
    assert not ring.find("r9") and not ring.find("ff" * 16)


# ---- the bus


async def test_a_query_is_answered_to_an_inbox_and_nowhere_else() -> None:
    wire = Wire()
    traces = await joined(ServiceKind.SCHEDULER, wire)
    assert wire.subscribed == [NAMES.any_trace]
    traces.recorder.record(span(1))
    for reply in ("", "streetcar.v1.engine.e.plan", "$SRV.PING"):
        traces.on_query(Delivery(NAMES.trace("r1"), b"", reply))
    traces.on_query(Delivery(NAMES.trace("unknown"), b"", "_INBOX.a.1"))
    traces.on_query(Delivery(NAMES.trace("r1"), b"", "_INBOX.2"))
    await asyncio.sleep(0)
    ((subject, payload),) = wire.sent
    reply = codec.Decoder(TraceReply).decode(payload)
    assert (subject, reply.service, len(reply.spans)) == ("_INBOX.2", "scheduler/x", 1)


async def test_an_answer_is_bounded_and_says_so() -> None:
    wire = Wire()
    traces = await joined(ServiceKind.SCHEDULER, wire)
    for number in range(MAX_SPANS_SENT + 1):
        traces.recorder.record(span(number))
    traces.on_query(Delivery(NAMES.trace(TRACE), b"", "_INBOX.2"))
    await asyncio.sleep(0)
    reply = codec.Decoder(TraceReply).decode(wire.sent[0][1])
    assert reply.cut and len(reply.spans) == MAX_SPANS_SENT


async def test_spans_outlive_their_service_with_those_that_keep_them() -> None:
    wire, other = Wire(), Wire()
    scheduler = await joined(ServiceKind.SCHEDULER, wire)
    gateway = await joined(ServiceKind.GATEWAY, other)
    assert other.subscribed == [NAMES.any_trace, NAMES.spans]
    scheduler.recorder.record(span(1))
    await scheduler.share()
    await scheduler.share()
    ((subject, payload),) = wire.sent
    assert subject == NAMES.spans
    gateway.on_spans(Delivery(subject, payload))
    gateway.on_spans(Delivery(subject, b"nonsense"))
    assert [s.service for s in gateway.recorder.ring.find("r1")] == ["scheduler/x"]
    assert not gateway.recorder.take_fresh(), "what others recorded is not shared again"


async def test_a_small_bus_costs_spans_and_no_service() -> None:
    wire = Wire(limit=10)
    traces = await joined(ServiceKind.SCHEDULER, wire)
    traces.recorder.record(span(1))
    await traces.share()
    assert traces.recorder.num_dropped == 1


# ---- OTLP


@contextmanager
def collector(status: int = 200) -> Iterator[tuple[str, list[tuple[str, bytes]]]]:
    got: list[tuple[str, bytes]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            got.append((self.path, body))
            self.send_response(status)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_args: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", got
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_collector_gets_spans_as_they_were() -> None:
    recorder = Recorder("scheduler/engine-0")
    link = TraceContext("12" * 16, "34" * 8, sampled=True)
    facts: dict[str, Any] = {"num_tokens": 5, "engine": "e", "share": 0.5}
    recorder.record(
        span(
            7,
            span_id="99" * 8,
            parent_id="cd" * 8,
            kind=SpanKind.SERVER,
            attributes=facts,
            links=(link,),
            error="numerics",
        )
    )
    records = recorder.take_fresh()
    with collector() as (url, got):
        exporter = OtlpExporter(url, "scheduler", "engine-0")
        exporter.export(records)
        exporter.close()
    ((path, body),) = got
    assert path == "/v1/traces"
    (resource,) = ExportTraceServiceRequest.FromString(body).resource_spans
    names = {item.key: item.value.string_value for item in resource.resource.attributes}
    assert (names["service.name"], names["service.instance.id"]) == ("scheduler", "engine-0")
    (sent,) = resource.scope_spans[0].spans
    assert (sent.trace_id.hex(), sent.span_id.hex()) == (TRACE, "99" * 8)
    assert sent.parent_span_id.hex() == "cd" * 8
    assert sent.start_time_unix_nano == records[0].start_unix_ns
    assert sent.end_time_unix_nano - sent.start_time_unix_nano == 5
    assert [found.span_id.hex() for found in sent.links] == ["34" * 8]
    assert sent.status.message == "numerics"
    keys = {item.key for item in sent.attributes}
    assert keys == {"num_tokens", "engine", "share", "streetcar.request_id"}


def test_a_collector_that_refuses_costs_spans_and_is_counted() -> None:
    recorder = Recorder("scheduler/engine-0")
    recorder.record(span())
    with collector(status=400) as (url, _got):
        exporter = OtlpExporter(url, "scheduler", "engine-0")
        exporter.export(recorder.take_fresh())
        exporter.close()
    assert exporter.num_dropped == 1


def test_the_field_s_own_variable_says_where(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    assert Settings().otlp_url == ""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://collector:4318")
    assert Settings().otlp_url == "http://collector:4318"
    assert Settings(otlp_endpoint="http://mine:1").otlp_url == "http://mine:1"
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "collector:4318")
    with pytest.raises(SettingsError, match="no http URL"):
        _ = Settings().otlp_url
