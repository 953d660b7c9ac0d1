"""One HTTP request as a span: the root of its trace, or the child of the caller's.

Invariant: it is closed once, when the answer has ended for whatever reason; its time is the same
monotonic clock's as that of the metrics.

Shell: reads the clock.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request

from services.contracts.spans import SpanKind, TimedSpan
from services.contracts.trace_context import TraceContext
from services.gateway.asking import Ask
from services.runtime.telemetry.recorder import Recorder, new_span_id


class RequestSpan:
    """place: what the generations are children of. error: code of what went wrong, or ""."""

    def __init__(self, recorder: Recorder, request: Request, started_s: float) -> None:
        caller = recorder.context(request.headers)
        self.place: TraceContext = caller.child(new_span_id())
        self.error = ""
        self._parent_id = caller.span_id
        self._recorder = recorder
        self._name = f"{request.method} {request.url.path}"
        self._started_ns = round(started_s * 1e9)

    def end(self, answer_id: str, ask: Ask, usages: Mapping[int, Mapping[str, Any]]) -> None:
        chat = self._name.endswith("/chat/completions")
        self._recorder.record(
            TimedSpan(
                name=self._name,
                place=self.place,
                start_ns=self._started_ns,
                end_ns=time.monotonic_ns(),
                kind=SpanKind.SERVER,
                span_id=self.place.span_id,
                parent_id=self._parent_id,
                request_id=answer_id,
                attributes={
                    "gen_ai.operation.name": "chat" if chat else "text_completion",
                    "gen_ai.provider.name": "streetcar",
                    "gen_ai.request.model": ask.model,
                    "gen_ai.request.choice.count": ask.num_choices,
                    "gen_ai.request.stream": int(ask.stream),
                    "gen_ai.response.id": answer_id,
                    "gen_ai.usage.input_tokens": _sum(usages, "prompt_tokens"),
                    "gen_ai.usage.output_tokens": _sum(usages, "completion_tokens"),
                },
                error=self.error,
            )
        )


def _sum(usages: Mapping[int, Mapping[str, Any]], name: str) -> int:
    return sum(int(usage[name]) for usage in usages.values())
