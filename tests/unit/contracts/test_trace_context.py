"""W3C trace context: what is one, what is none, and who decides about sampling."""

from __future__ import annotations

import pytest

from services.contracts.limits import MAX_TRACESTATE_CHARS
from services.contracts.trace_context import (
    TraceContext,
    clean_tracestate,
    is_sampled,
    parse_traceparent,
    within_ratio,
)

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.mark.parametrize(
    ("flags", "sampled"), [("00", False), ("01", True), ("02", False), ("ff", True)]
)
def test_the_example_of_the_standard(flags: str, sampled: bool) -> None:
    context = parse_traceparent(f"00-{TRACE}-{SPAN}-{flags}")
    assert context == TraceContext(TRACE, SPAN, sampled)
    assert parse_traceparent(context.traceparent) == context
    assert is_sampled(context.traceparent) is sampled


@pytest.mark.parametrize(
    "text",
    [
        "",
        "00",
        f"00-{TRACE}-{SPAN}",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01-more",
        f"00-{TRACE}-{SPAN}-01\n",
        f" 00-{TRACE}-{SPAN}-01",
        f"00-{TRACE[:-1]}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-1",
        "00-" + "a" * 10_000,
    ],
)
def test_what_is_none_is_ignored(text: str) -> None:
    assert parse_traceparent(text) is None


def test_a_later_version_is_read_as_far_as_it_is_known() -> None:
    context = parse_traceparent(f"cc-{TRACE}-{SPAN}-01-what-the-future-holds")
    assert context == TraceContext(TRACE, SPAN, True)
    assert context.traceparent.startswith("00-")


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("congo=t61rcWkgMzE", "congo=t61rcWkgMzE"),
        ("a=1, b=2,,c@d=3 ", "a=1,b=2,c@d=3"),
        ("A=1", ""),
        ("a", ""),
        ("a=1\nb=2", ""),
        (",".join(f"k{n}=v" for n in range(33)), ""),
        ("a=" + "x" * MAX_TRACESTATE_CHARS, ""),
    ],
)
def test_tracestate_is_bounded(text: str, clean: str) -> None:
    assert clean_tracestate(text) == clean


def test_a_child_is_of_the_same_trace() -> None:
    context = TraceContext(TRACE, SPAN, True, "a=1")
    assert context.child("c" * 16) == TraceContext(TRACE, "c" * 16, True, "a=1")


@pytest.mark.parametrize(
    ("low", "ratio", "sampled"),
    [
        ("0" * 16, 0.0, False),
        ("f" * 16, 1.0, True),
        ("7fffffffffffffff", 0.5, True),
        ("8000000000000000", 0.5, False),
    ],
)
def test_the_ratio_is_of_the_low_half_of_the_id(low: str, ratio: float, sampled: bool) -> None:
    assert within_ratio("f" * 16 + low, ratio) is sampled
