"""Which steps become spans: those that begin or continue a traced sequence's prompt, and now and
then a steady one.

A step's span is of a trace of its own and links to the requests in it; there is never a span per
step and request. The others are seen in the StepEvents.

Pure.
"""

from __future__ import annotations

from typing import Final

from services.contracts.limits import MAX_SPAN_LINKS
from services.contracts.spans import TimedSpan
from services.contracts.step import StepPlan, StepResult
from services.contracts.trace_context import TraceContext, parse_traceparent
from services.contracts.vectors import unpack

STEADY_EVERY: Final = 256
"""One steady step of so many: at 5 ms one in 1.3 s, at a cost of microseconds a step."""


class TracedLanes:
    """Which lanes hold a sequence whose trace is recorded; plans in order."""

    def __init__(self) -> None:
        self._places: dict[int, TraceContext] = {}

    def links(self, plan: StepPlan) -> tuple[TraceContext, ...]:
        """Take `plan` -> the requests that its span links to; empty where it is none."""
        places = self._places
        if plan.reset:
            places.clear()
        if places and plan.leave:
            for lane in unpack(plan.leave).tolist():
                places.pop(lane, None)
        for join in plan.join:
            place = parse_traceparent(join.traceparent) if join.traceparent else None
            if place is not None:
                places[join.lane] = place
        if not places:
            return ()
        if plan.chunk_lanes:
            chunked = [places.get(lane) for lane in unpack(plan.chunk_lanes).tolist()]
            found = tuple(place for place in chunked if place is not None)[:MAX_SPAN_LINKS]
            if found:
                return found
        if plan.decode and plan.step_id % STEADY_EVERY == 0:
            return tuple(places.values())[:MAX_SPAN_LINKS]
        return ()


def step_span(
    plan: StepPlan, result: StepResult, links: tuple[TraceContext, ...], trace_id: str, end_ns: int
) -> TimedSpan:
    """`plan` as a span of a new trace `trace_id`, that ended at `end_ns` (monotonic)."""
    return TimedSpan(
        name="step",
        place=TraceContext(trace_id, "", sampled=True),
        start_ns=end_ns - result.elapsed_us * 1000,
        end_ns=end_ns,
        attributes={
            "generation": plan.generation,
            "epoch": plan.epoch,
            "step_id": plan.step_id,
            "num_sampled_tokens": len(result.token_ids) // 4,
            "num_prefill_tokens": int(unpack(plan.chunk_tokens).sum()),
            "waited_us": result.waited_us,
        },
        links=links,
    )
