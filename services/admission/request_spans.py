"""What a request went through as its admission sees it: one span, and phases that fill it.

    tokenise ─▶ await first token ─▶ stream ─▶ end
                                      │  ▲
                                      ▼  │
                                     recover      its engine was lost: from the last frame before to
                                                  the first one after

Invariant: the phases follow each other without a gap from the request's arrival to its terminal
frame, whatever dies meanwhile in the engine. What the engine does in them is the scheduler's to
tell. Every request is followed, for the log; only sampled ones become spans.

Pure: time is `now_ns`, monotonic.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from services.contracts.errors import ErrorCode
from services.contracts.spans import Attribute, SpanKind, TimedSpan
from services.contracts.trace_context import TraceContext, parse_traceparent

from .events import SendFrame, Submit
from .open_request import Ticket

SPAN_NAME: Final = "process generate"
# More than are ever open at once: each leaves with its last frame, or when it is given away.
MAX_FOLLOWED: Final = 32_768


class Phase(StrEnum):
    TOKENISE = "tokenise"
    AWAIT = "await first token"
    STREAM = "stream"
    RECOVER = "recover"


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request as it came in. place: its own span, below `parent_id` ("" for a new trace), or the
    span of the admission that had it before, where `parent_id` is None.
    """

    place: TraceContext
    parent_id: str | None
    received_ns: int


@dataclass(frozen=True, slots=True)
class RequestEnd:
    """For the log. first_token_ms is -1 where no token was shown."""

    request_id: str
    finish_reason: str
    code: ErrorCode | None
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    num_frames: int
    num_submissions: int
    first_token_ms: float
    duration_ms: float


@dataclass(slots=True)
class _Followed:
    """reply: where its frames go, "" where another admission opened it."""

    arrival: Arrival
    reply: str
    model: str
    engine: str
    num_prompt_tokens: int
    phase: Phase
    since_ns: int
    num_frames: int = 0
    num_submissions: int = 0
    first_token_ns: int = 0
    last_frame_ns: int = 0


class RequestSpans:
    """See the module."""

    def __init__(self) -> None:
        self._followed: OrderedDict[str, _Followed] = OrderedDict()
        self._spans: list[TimedSpan] = []

    def take(self) -> list[TimedSpan]:
        """Spans closed since the last call."""
        spans, self._spans = self._spans, []
        return spans

    # ---- what happens to a request

    def opened(self, ticket: Ticket, arrival: Arrival, now_ns: int) -> None:
        """It is tokenised, and goes to the core."""
        known = self._followed.get(ticket.request_id)
        if known is not None:
            if ticket.retry:
                known.reply = ticket.reply
            return
        request = _Followed(
            arrival,
            ticket.reply,
            ticket.model,
            "",
            len(ticket.prompt_token_ids),
            Phase.TOKENISE,
            arrival.received_ns,
        )
        self._follow(ticket.request_id, request)
        self._turn(ticket.request_id, request, Phase.AWAIT, now_ns)

    def refused(self, request_id: str, arrival: Arrival, code: ErrorCode, now_ns: int) -> None:
        """It is no request at all."""
        self._add(request_id, arrival, now_ns, {}, code.value)

    def submitted(self, effect: Submit, now_ns: int) -> None:
        message = effect.message
        request = self._followed.get(message.seq_id)
        if request is None:
            request = self._adopted(effect, now_ns)
        request.num_submissions += 1
        request.engine = effect.engine
        if request.phase is Phase.STREAM:
            # What the client noticed began with the last frame.
            self._turn(message.seq_id, request, Phase.RECOVER, request.last_frame_ns)

    def shown(self, effect: SendFrame, now_ns: int) -> RequestEnd | None:
        """A frame went out -> what there is to say, if it was the last."""
        frame = effect.frame
        request = self._followed.get(frame.request_id)
        # A duplicate's refusal names the same request, on another inbox.
        if request is None or request.reply not in ("", effect.reply):
            return None
        request.num_frames += 1
        request.last_frame_ns = now_ns
        if frame.token_ids and request.phase is not Phase.STREAM:
            request.first_token_ns = request.first_token_ns or now_ns
            self._turn(frame.request_id, request, Phase.STREAM, now_ns)
        if frame.finish_reason is None:
            return None
        del self._followed[frame.request_id]
        return self._ended(effect, request, now_ns)

    def given_away(self, request_id: str, now_ns: int) -> None:
        """Another admission has it, whose spans go on."""
        request = self._followed.pop(request_id, None)
        if request is not None:
            self._turn(request_id, request, request.phase, now_ns)
            facts: dict[str, Attribute] = {"streetcar.given_away": 1}
            self._add(request_id, request.arrival, now_ns, facts, "")

    @property
    def num_open(self) -> int:
        return len(self._followed)

    # ---- parts

    def _adopted(self, effect: Submit, now_ns: int) -> _Followed:
        """Another admission opened it, and is gone."""
        message = effect.message
        place = parse_traceparent(message.traceparent) or TraceContext("", "", False)
        arrival = Arrival(place, None, now_ns)
        num_tokens = len(message.prompt) // 4
        request = _Followed(
            arrival, "", "", effect.engine, num_tokens, Phase.RECOVER, now_ns, last_frame_ns=now_ns
        )
        self._follow(message.seq_id, request)
        return request

    def _follow(self, request_id: str, request: _Followed) -> None:
        self._followed[request_id] = request
        if len(self._followed) > MAX_FOLLOWED:
            self._followed.popitem(last=False)

    def _turn(self, request_id: str, request: _Followed, phase: Phase, now_ns: int) -> None:
        if request.arrival.place.sampled:
            facts: dict[str, Attribute] = {"engine": request.engine} if request.engine else {}
            self._spans.append(
                TimedSpan(
                    name=request.phase.value,
                    place=request.arrival.place,
                    start_ns=request.since_ns,
                    end_ns=now_ns,
                    request_id=request_id,
                    attributes=facts,
                )
            )
        request.phase, request.since_ns = phase, now_ns

    def _ended(self, effect: SendFrame, request: _Followed, now_ns: int) -> RequestEnd:
        frame, arrival = effect.frame, request.arrival
        self._turn(frame.request_id, request, request.phase, now_ns)
        assert frame.finish_reason is not None
        first_ns = request.first_token_ns
        end = RequestEnd(
            request_id=frame.request_id,
            finish_reason=frame.finish_reason.value,
            code=frame.error.code if frame.error else None,
            num_prompt_tokens=request.num_prompt_tokens,
            num_cached_tokens=frame.usage.cached_tokens if frame.usage else 0,
            num_output_tokens=frame.offset + len(frame.token_ids),
            num_frames=request.num_frames,
            num_submissions=request.num_submissions,
            first_token_ms=round((first_ns - arrival.received_ns) / 1e6, 3) if first_ns else -1.0,
            duration_ms=round((now_ns - arrival.received_ns) / 1e6, 3),
        )
        facts: dict[str, Attribute] = {
            "gen_ai.request.model": request.model,
            "gen_ai.response.finish_reasons": end.finish_reason,
            "gen_ai.usage.input_tokens": end.num_prompt_tokens,
            "gen_ai.usage.cache_read.input_tokens": end.num_cached_tokens,
            "gen_ai.usage.output_tokens": end.num_output_tokens,
            "streetcar.engine": request.engine,
            "streetcar.num_frames": end.num_frames,
            "streetcar.num_submissions": end.num_submissions,
        }
        if first_ns:
            facts["streetcar.time_to_first_token_ms"] = end.first_token_ms
        error = end.code.value if end.code else ""
        self._add(frame.request_id, arrival, now_ns, facts, error)
        return end

    def _add(
        self,
        request_id: str,
        arrival: Arrival,
        now_ns: int,
        facts: dict[str, Attribute],
        error: str,
    ) -> None:
        """The request's own span; an adopted one has it below the span of the first admission."""
        if not arrival.place.sampled:
            return
        own = arrival.parent_id is not None
        self._spans.append(
            TimedSpan(
                name=SPAN_NAME,
                place=arrival.place,
                start_ns=arrival.received_ns,
                end_ns=now_ns,
                kind=SpanKind.CONSUMER,
                span_id=arrival.place.span_id if own else "",
                parent_id=arrival.parent_id or "",
                request_id=request_id,
                attributes={"messaging.system": "nats", **facts},
                error=error,
            )
        )
