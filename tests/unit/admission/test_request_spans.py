"""A request's span and the phases that fill it."""

from __future__ import annotations

import dataclasses

import pytest

from services.admission.events import SendFrame, Submit
from services.admission.request_spans import SPAN_NAME, Arrival, RequestEnd, RequestSpans
from services.contracts.errors import ErrorCode
from services.contracts.public import Encoding, ErrorBody, FinishReason, Frame, Usage
from services.contracts.sampling import SamplingParams
from services.contracts.sequences import SubmitSequence
from services.contracts.spans import TimedSpan
from services.contracts.trace_context import TraceContext
from services.contracts.vectors import pack
from tests.unit.admission.streams import ticket

PLACE = TraceContext("ab" * 16, "cd" * 8, sampled=True)
ARRIVAL = Arrival(PLACE, "ef" * 8, 100)
TICKET = dataclasses.replace(ticket(), request_id="r1", reply="inbox.1")


def submit(request_id: str = "r1", traceparent: str = PLACE.traceparent) -> Submit:
    message = SubmitSequence(
        seq_id=request_id,
        admission_id="a",
        tag=1,
        prompt=pack([1, 2, 3]),
        max_tokens=5,
        sampling=SamplingParams(),
        traceparent=traceparent,
    )
    return Submit("engine-0", message)


def frame(offset: int, tokens: int, *, end: bool = False, reply: str = "inbox.1") -> SendFrame:
    reason = FinishReason.LENGTH if end else None
    usage = Usage(3, offset + tokens, 1) if end else None
    shown = Frame(
        request_id="r1",
        offset=offset,
        token_ids=[7] * tokens,
        finish_reason=reason,
        usage=usage,
    )
    return SendFrame(reply, Encoding.MSGPACK, shown)


def partition(spans: list[TimedSpan]) -> list[tuple[str, int, int]]:
    return [(s.name, s.start_ns, s.end_ns) for s in spans if s.name != SPAN_NAME]


def test_phases_fill_the_request() -> None:
    spans = RequestSpans()
    spans.opened(TICKET, ARRIVAL, 110)
    spans.submitted(submit(), 111)
    assert spans.shown(frame(0, 1), 150) is None
    assert spans.shown(frame(1, 2), 160) is None
    end = spans.shown(frame(3, 2, end=True), 200)
    assert end == RequestEnd("r1", "length", None, 3, 1, 5, 3, 1, 0.0, 0.0)
    found = spans.take()
    assert partition(found) == [
        ("tokenise", 100, 110),
        ("await first token", 110, 150),
        ("stream", 150, 200),
    ]
    (whole,) = [s for s in found if s.name == SPAN_NAME]
    assert (whole.span_id, whole.parent_id) == (PLACE.span_id, ARRIVAL.parent_id)
    assert (whole.start_ns, whole.end_ns) == (100, 200)
    assert whole.attributes["gen_ai.usage.output_tokens"] == 5
    assert not spans.take()


def test_a_lost_engine_is_a_recovery_from_the_last_frame_on() -> None:
    spans = RequestSpans()
    spans.opened(TICKET, ARRIVAL, 110)
    spans.submitted(submit(), 111)
    spans.shown(frame(0, 1), 150)
    spans.shown(frame(1, 1), 160)
    spans.submitted(submit(), 400)
    spans.submitted(submit(), 500)
    spans.shown(frame(2, 1), 900)
    end = spans.shown(frame(3, 1, end=True), 950)
    assert end is not None and end.num_submissions == 3
    assert partition(spans.take())[2:] == [
        ("stream", 150, 160),
        ("recover", 160, 900),
        ("stream", 900, 950),
    ]


def test_a_duplicate_s_refusal_ends_nothing() -> None:
    spans = RequestSpans()
    spans.opened(TICKET, ARRIVAL, 110)
    duplicate = dataclasses.replace(TICKET, reply="inbox.2")
    spans.opened(duplicate, Arrival(PLACE.child("12" * 8), "", 120), 121)
    refusal = Frame(
        request_id="r1",
        offset=0,
        finish_reason=FinishReason.ERROR,
        error=ErrorBody(ErrorCode.DUPLICATE_REQUEST, "in use"),
    )
    assert spans.shown(SendFrame("inbox.2", Encoding.MSGPACK, refusal), 125) is None
    assert spans.shown(frame(0, 1, end=True), 200) is not None


def test_an_error_is_said() -> None:
    spans = RequestSpans()
    spans.opened(TICKET, ARRIVAL, 110)
    body = ErrorBody(ErrorCode.NO_WORKER, "nobody")
    error = Frame(request_id="r1", offset=0, finish_reason=FinishReason.ERROR, error=body)
    end = spans.shown(SendFrame("inbox.1", Encoding.MSGPACK, error), 120)
    assert end is not None and end.code is ErrorCode.NO_WORKER and end.first_token_ms == -1
    assert spans.take()[-1].error == "no_worker"


def test_an_adopted_request_goes_on_below_the_first_admission_s_span() -> None:
    spans = RequestSpans()
    spans.submitted(submit(), 300)
    spans.shown(frame(2, 1, reply="anything"), 320)
    spans.shown(frame(3, 1, end=True, reply="anything"), 330)
    found = spans.take()
    assert partition(found) == [("recover", 300, 320), ("stream", 320, 330)]
    assert found[-1].place == PLACE and found[-1].span_id == ""


def test_a_request_that_is_given_away_has_closed_spans_as_well() -> None:
    spans = RequestSpans()
    spans.opened(TICKET, ARRIVAL, 110)
    spans.submitted(submit(), 111)
    spans.shown(frame(0, 1), 150)
    spans.given_away("r1", 170)
    spans.given_away("r1", 180)
    found = spans.take()
    assert partition(found)[-1] == ("stream", 150, 170)
    whole = found[-1]
    assert (whole.span_id, whole.start_ns, whole.end_ns) == (PLACE.span_id, 100, 170)
    assert whole.attributes["streetcar.given_away"] == 1 and not spans.num_open


@pytest.mark.parametrize("sampled", [True, False])
def test_what_is_refused_before_it_is_a_request(sampled: bool) -> None:
    spans = RequestSpans()
    arrival = Arrival(dataclasses.replace(PLACE, sampled=sampled), "", 100)
    spans.refused("r1", arrival, ErrorCode.INVALID_REQUEST, 105)
    assert [s.error for s in spans.take()] == (["invalid_request"] if sampled else [])


def test_what_is_not_sampled_is_only_logged() -> None:
    spans = RequestSpans()
    unsampled = Arrival(dataclasses.replace(PLACE, sampled=False), "", 100)
    spans.opened(TICKET, unsampled, 110)
    assert spans.shown(frame(0, 1, end=True), 200) is not None
    assert not spans.take()
