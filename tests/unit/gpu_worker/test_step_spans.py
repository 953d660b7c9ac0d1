"""Which steps become spans, and what they link to."""

from __future__ import annotations

import msgspec

from gpu_worker.step_spans import STEADY_EVERY, TracedLanes, step_span
from services.contracts.limits import MAX_SPAN_LINKS
from services.contracts.step import LaneJoin, StepResult
from services.contracts.trace_context import TraceContext
from services.contracts.vectors import pack
from tests.unit.gpu_worker.plans import join, plan


def place(number: int) -> TraceContext:
    return TraceContext(f"{number + 1:032x}", f"{number + 1:016x}", sampled=True)


def traced(lane: int) -> LaneJoin:
    return msgspec.structs.replace(join(lane, [1, 2, 3], [1]), traceparent=place(lane).traceparent)


def test_joins_and_chunks_of_sampled_sequences_and_few_others() -> None:
    lanes = TracedLanes()
    untraced = join(1, [1, 2], [2])
    assert lanes.links(plan(1, joins=[untraced], chunks={1: 2})) == ()
    assert lanes.links(plan(2, joins=[traced(0)], chunks={0: 2})) == (place(0),)
    assert lanes.links(plan(3, chunks={0: 1})) == (place(0),)
    assert [step for step in range(4, 3 * STEADY_EVERY) if lanes.links(plan(step))] == [
        STEADY_EVERY,
        2 * STEADY_EVERY,
    ]
    assert lanes.links(plan(STEADY_EVERY, decode=False)) == ()


def test_who_has_left_is_not_linked_to() -> None:
    lanes = TracedLanes()
    lanes.links(plan(1, joins=[traced(0), traced(1)], chunks={0: 3, 1: 3}))
    assert lanes.links(plan(STEADY_EVERY, leave=[0])) == (place(1),)
    # The lane is another's now.
    lanes.links(plan(2, joins=[join(0, [1], [3])], chunks={0: 1}))
    assert lanes.links(plan(STEADY_EVERY)) == (place(1),)
    assert lanes.links(plan(STEADY_EVERY, reset=True)) == ()


def test_links_are_bounded() -> None:
    lanes = TracedLanes()
    joins = [traced(lane) for lane in range(MAX_SPAN_LINKS + 9)]
    chunks = dict.fromkeys(range(len(joins)), 3)
    assert len(lanes.links(plan(1, joins=joins, chunks=chunks))) == MAX_SPAN_LINKS
    assert len(lanes.links(plan(STEADY_EVERY))) == MAX_SPAN_LINKS


def test_a_step_is_of_its_own_trace() -> None:
    made = plan(7, chunks={0: 5, 2: 6})
    result = StepResult(1, 1, 7, 7, token_ids=pack([3, 4]), elapsed_us=1500, waited_us=20)
    span = step_span(made, result, (place(0),), "ab" * 16, end_ns=2_000_000)
    assert (span.place.trace_id, span.start_ns, span.links) == ("ab" * 16, 500_000, (place(0),))
    assert span.attributes["num_prefill_tokens"] == 11
    assert span.attributes["num_sampled_tokens"] == 2
