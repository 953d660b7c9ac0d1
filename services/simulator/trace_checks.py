"""I16, spans: every recorded request is one trace from its client on, whose spans are all closed
and follow each other without a gap, unless the process that had them is dead.

Pure.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, Final

from services.contracts.spans import SpanKind, TimedSpan

from .admission_node import client_place
from .check import Check

SCHEDULER_PHASES: Final = frozenset({"queue", "prefill", "decode", "preempted", "recover"})


class Traces(Check):
    """A span's maker is the run that closed it; a request's span is made by who says `tokenise`."""

    name = "I16 spans"

    def __init__(self, world: Any) -> None:
        super().__init__(world)
        self._made: set[tuple[str, str]] = set()
        self._makers: dict[str, Any] = {}
        self._parents: list[tuple[Any, TimedSpan, str]] = []
        self._phases: dict[tuple[str, str], tuple[int, int]] = {}
        self._requests: Counter[str] = Counter()

    def span(self, node: Any, span: TimedSpan) -> None:
        who = f"{node.name}: {span.name} of {span.request_id}"
        client = self._client_place(span.request_id)
        self.require(span.place.sampled, f"{who} is recorded, though nobody asked for it")
        self.require(span.place.trace_id == client.trace_id, f"{who} is of another trace")
        self.require(span.start_ns <= span.end_ns, f"{who} ends before it begins")
        if span.span_id:
            made = (span.place.trace_id, span.span_id)
            self.require(made not in self._made, f"{who} has the id of another span")
            self._made.add(made)
        parent_id = span.parent_id if span.span_id else span.place.span_id
        if parent_id != client.span_id:
            self._parents.append((node, span, parent_id))
        if span.name == "tokenise":
            self._makers[span.place.span_id] = node
        if span.kind is SpanKind.CONSUMER:
            self._close_request(node, span, who)
        elif node.role == "admission" or span.name in SCHEDULER_PHASES:
            self._follow(node, span, who)

    def _client_place(self, request_id: str) -> Any:
        return client_place(request_id, self.world.clients[request_id].number)

    def _follow(self, node: Any, span: TimedSpan, who: str) -> None:
        """Phases of one request in one run: each begins where the one before has ended."""
        key = (node.name, span.request_id)
        first_ns, last_ns = self._phases.get(key, (span.start_ns, span.start_ns))
        self.require(span.start_ns == last_ns, f"{who} begins {span.start_ns - last_ns} ns late")
        if "finish_reason" in span.attributes:
            self._phases.pop(key, None)
        else:
            self._phases[key] = (first_ns, span.end_ns)

    def _close_request(self, node: Any, span: TimedSpan, who: str) -> None:
        self._requests[span.request_id] += 1
        filled = self._phases.pop((node.name, span.request_id), None)
        # One that was refused at the door has no phase.
        whole = filled is None or filled == (span.start_ns, span.end_ns)
        self.require(whole, f"{who} lasts {(span.start_ns, span.end_ns)}, its phases {filled}")

    def at_rest(self) -> None:
        for node in self.world.running():
            if node.role == "admission":
                self.require(not node.spans.num_open, f"{node.name} has not closed all its spans")
        for node, span, parent_id in self._parents:
            # Its maker may have died with it; the parts of a phase are made by who has the phase.
            part = node.role == "scheduler" and span.name not in SCHEDULER_PHASES
            maker = node if part else self._makers.get(parent_id)
            closed = (span.place.trace_id, parent_id) in self._made
            is_dead = maker is None or not maker.alive
            self.require(closed or is_dead, f"{node.name}: {span.name} has no parent")
        if all(node.alive for node in self.world.nodes):
            for request_id, client in self.world.clients.items():
                if client.ending is not None and self._client_place(request_id).sampled:
                    self.require(self._requests[request_id] > 0, f"{request_id} has no span")
