"""A trace in the terminal: parents before children, bars where they belong."""

from __future__ import annotations

from typing import Any

import pytest

from services.cli.waterfall import BAR_WIDTH, bar, line, rows, show
from services.contracts.spans import SpanKind, SpanLink, SpanRecord

TRACE, STEP = "ab" * 16, "12" * 16


def record(name: str, start: int, length: int, **more: Any) -> SpanRecord:
    fields: dict[str, Any] = {
        "trace_id": TRACE,
        "span_id": f"{abs(hash((name, start))) % 2**64:016x}",
        "parent_id": "",
        "kind": SpanKind.INTERNAL,
        "service": "scheduler/engine-0",
        "request_id": "r1",
    }
    return SpanRecord(name=name, start_unix_ns=start, duration_ns=length, **{**fields, **more})


ROOT = record("POST", 0, 1000, service="gateway/g", span_id="01" * 8)
REQUEST = record("process", 10, 980, service="admission/a", parent_id="01" * 8, span_id="02" * 8)
PREFILL = record("prefill", 100, 200, parent_id="02" * 8, span_id="03" * 8)
CHUNK = record("prefill chunk", 100, 100, parent_id="03" * 8, span_id="04" * 8)
DECODE = record("decode", 300, 600, parent_id="02" * 8, span_id="05" * 8)
LOST = record("decode", 50, 20, parent_id="77" * 8, span_id="06" * 8)
STEADY = record(
    "step",
    400,
    10,
    trace_id=STEP,
    service="gpu_worker/w",
    request_id="",
    links=[SpanLink(TRACE, "02" * 8)],
)
ALL = [STEADY, DECODE, LOST, CHUNK, PREFILL, REQUEST, ROOT]


def test_a_tree_in_the_order_of_time() -> None:
    found = [(row.span.name, row.depth, row.linked) for row in rows(ALL, TRACE)]
    assert found == [
        ("POST", 0, False),
        ("process", 1, False),
        ("prefill", 2, False),
        ("prefill chunk", 3, False),
        ("decode", 2, False),
        ("step", 3, True),
        ("decode", 1, False),
    ]


def test_a_trace_whose_root_is_elsewhere_is_shown_all_the_same() -> None:
    found = [row.span.name for row in rows([PREFILL, CHUNK, DECODE], TRACE)]
    assert found == ["prefill", "prefill chunk", "decode"]


@pytest.mark.parametrize(
    ("offset", "length", "start", "width"),
    [(0, 100, 0, BAR_WIDTH), (0, 0, 0, 1), (100, 0, BAR_WIDTH - 1, 1), (50, 50, BAR_WIDTH // 2, 0)],
)
def test_bars(offset: int, length: int, start: int, width: int) -> None:
    drawn = bar(offset, length, 100)
    assert len(drawn) - len(drawn.lstrip()) == start and len(drawn) <= BAR_WIDTH
    assert len(drawn.strip()) == (width or BAR_WIDTH - start)


def test_a_line_says_what_there_is_to_know() -> None:
    failed = record("decode", 300, 600, attributes={"num_output_tokens": 7}, error="numerics")
    text = line(rows([failed], TRACE)[0], 0, 1000).plain
    assert "error numerics" in text and "num_output_tokens 7" in text


def test_in_a_pipe_nothing_is_cut(capsys: pytest.CaptureFixture[str]) -> None:
    show("r1", ALL, ["a note"])
    out = capsys.readouterr().out
    assert out.count("\n") == len(ALL) + 2 and "a note" in out and TRACE in out
