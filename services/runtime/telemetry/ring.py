"""The spans that a service keeps: the newest, bounded by count and by bytes.

Invariant: what is kept never exceeds either bound; the oldest give way and are counted. Appending
costs the same however much is kept; looking something up reads all of it, which only a person asks.

Pure.
"""

from __future__ import annotations

from collections import deque

from services.contracts.limits import MAX_SPAN_BYTES_KEPT, MAX_SPANS_KEPT
from services.contracts.spans import SpanRecord


class SpanRing:
    """See the module. num_evicted: spans that gave way so far."""

    def __init__(
        self, max_spans: int = MAX_SPANS_KEPT, max_bytes: int = MAX_SPAN_BYTES_KEPT
    ) -> None:
        self._max_spans = max_spans
        self._max_bytes = max_bytes
        self._spans: deque[SpanRecord] = deque()
        self.num_bytes = 0
        self.num_evicted = 0

    def __len__(self) -> int:
        return len(self._spans)

    def add(self, span: SpanRecord) -> None:
        self._spans.append(span)
        self.num_bytes += span.size_bytes
        while len(self._spans) > self._max_spans or self.num_bytes > self._max_bytes:
            self.num_bytes -= self._spans.popleft().size_bytes
            self.num_evicted += 1

    def find(self, request_or_trace_id: str) -> list[SpanRecord]:
        """The spans of a trace, or of every trace that a request of this id is in, and those that
        link to them; oldest first.
        """
        asked = request_or_trace_id
        traces = {span.trace_id for span in self._spans if span.request_id == asked} | {asked}
        return [
            span
            for span in self._spans
            if span.trace_id in traces or any(link.trace_id in traces for link in span.links)
        ]
