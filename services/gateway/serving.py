"""The course of one request: check the model, ask the mesh, answer whole or as a stream.

Invariants: a failure before the first frame is an HTTP status; whatever ends the request ends its
generations; every generation is metered to its end.

Shell: clock, connection.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from services.client import Frame, StreetcarClientError
from services.contracts.errors import ErrorCode
from services.contracts.ids import MAX_ID_LENGTH
from services.contracts.limits import MAX_PAYLOAD_BYTES
from services.contracts.public import FinishReason
from services.gateway.answers import (
    Answer,
    AnyChoice,
    Choice,
    Dialect,
    Usage,
    encode,
    total_usage,
)
from services.gateway.asking import Ask, with_request_ids
from services.gateway.disconnect import OpenWork, unless_gone
from services.gateway.fan_out import Generator, fan_out
from services.gateway.mesh_view import MeshView
from services.gateway.metrics import Meter, Metrics
from services.gateway.reading import read_body
from services.gateway.refusals import JSON, Refusal, from_mesh
from services.gateway.request_span import RequestSpan
from services.gateway.sse import DONE, EventStream, event
from services.runtime.failpoints import failpoint
from services.runtime.log import get_logger
from services.runtime.telemetry.recorder import Recorder


@dataclass(slots=True)
class Gateway:
    """What all requests share. client: None while there is no bus. body_limit: in bytes.

    draining: another gateway takes what is new. ending: nobody does, and it is refused.
    bus_up: whether the bus answers at this moment.
    """

    client: Generator | None
    view: MeshView
    body_limit: int = MAX_PAYLOAD_BYTES
    draining: bool = False
    ending: bool = False
    bus_up: Callable[[], bool] = lambda: True
    recorder: Recorder = field(default_factory=lambda: Recorder("gateway"))
    open_work: OpenWork = field(default_factory=OpenWork)
    metrics: Metrics = field(init=False)

    def __post_init__(self) -> None:
        self.metrics = Metrics(self.view)

    def missing(self, now_ns: int) -> list[str]:
        """What is not there for a request to be served; empty means ready."""
        missing = [] if self.client and self.bus_up() else ["bus: no nats-server answers"]
        missing += self.view.missing(now_ns)
        return [*missing, "draining: the gateway is stopping"] if self.draining else missing


class Call:
    """One HTTP request that is being served: its generations, their choices and meters."""

    def __init__(
        self,
        gateway: Gateway,
        client: Generator,
        ask: Ask,
        dialect: Dialect,
        *,
        started_s: float,
        span: RequestSpan,
    ) -> None:
        """`started_s`: when the request arrived, as `time.monotonic` says."""
        name = uuid.uuid4().hex
        self._ask = with_request_ids(ask, name)
        self._dialect = dialect
        self._id = dialect.prefix + name
        self._created = int(time.time())
        self._choices = [Choice(index) for index in range(len(ask.children))]
        self._usages: dict[int, Frame] = {}
        metrics = gateway.metrics
        self._meters = [Meter(metrics, ask.model, started_s) for _ in ask.children]
        metrics.params_n.labels(ask.model).observe(ask.num_choices)
        if max_tokens := ask.children[0].get("max_tokens"):
            metrics.params_max_tokens.labels(ask.model).observe(max_tokens)
        self._span = span
        self._frames = fan_out(client, ask.model, self._ask.children, span.place)

    async def whole(self) -> bytes:
        """The body of a complete answer. Raises Refusal."""
        async with aclosing(self._metered()) as frames:
            async for index, frame in frames:
                self._choices[index].add(frame)
        num_logprobs = self._ask.num_logprobs
        choices = [self._dialect.complete(choice, num_logprobs) for choice in self._choices]
        return self._encode(self._dialect.whole, choices, self._usage())

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """Events, as soon as the mesh has begun to answer. Raises Refusal before the first one."""
        begun = False
        try:
            async with aclosing(self._metered()) as frames:
                async for index, frame in frames:
                    if not begun:
                        begun = True
                        failpoint("gateway.after_first_frame")
                        for opening in self._openings():
                            yield event(self._chunk([opening]))
                    if frame["text"] or frame["logprobs"] or frame["finish_reason"]:
                        choice, num_logprobs = self._choices[index], self._ask.num_logprobs
                        yield event(self._chunk([self._dialect.part(choice, frame, num_logprobs)]))
            if self._ask.include_usage:
                yield event(self._chunk([], self._usage()))
        except Refusal as refusal:
            if not begun:
                raise
            yield event(refusal.event())
        failpoint("gateway.before_done")
        yield DONE

    def reader_is_slow(self) -> None:
        """Who does not read its stream ends it; there is no way to tell it so."""
        get_logger("gateway").warning("slow_client", request_id=self._id)
        for meter in self._meters:
            if not meter.ended:
                meter.fail(ErrorCode.SLOW_CLIENT.value)

    async def _metered(self) -> AsyncGenerator[tuple[int, Frame], None]:
        try:
            async with aclosing(self._frames) as frames:
                async for index, frame in frames:
                    self._meters[index].frame(frame)
                    if frame["usage"] is not None:
                        self._usages[index] = frame["usage"]
                    yield index, frame
        except StreetcarClientError as error:
            next(meter for meter in self._meters if not meter.ended).fail(error.code)
            self._span.error = error.code
            raise from_mesh(error) from None
        finally:
            for meter in self._meters:
                meter.end(FinishReason.ABORT.value)
            self._span.end(self._id, self._ask, self._usages)

    def _openings(self) -> list[AnyChoice]:
        openings = (self._dialect.opening(choice.index) for choice in self._choices)
        return [opening for opening in openings if opening is not None]

    def _usage(self) -> Usage:
        return total_usage(self._usages, self._ask.num_choices)

    def _chunk(self, choices: Sequence[AnyChoice], usage: Usage | UnsetType = UNSET) -> bytes:
        return self._encode(self._dialect.chunk, choices, usage)

    def _encode(self, kind: str, choices: Sequence[AnyChoice], usage: Usage | UnsetType) -> bytes:
        return encode(Answer(self._id, kind, self._created, self._ask.model, choices, usage))


async def serve(
    gateway: Gateway,
    request: Request,
    parse: Callable[[dict[str, Any]], Ask],
    dialect: Dialect,
) -> Response:
    """Answer `request`. Raises Refusal, or ClientGone."""
    started_s = time.monotonic()
    body = await read_body(request, gateway.body_limit)
    if gateway.ending:
        raise Refusal(503, ErrorCode.DRAINING.value, "the gateway is stopping")
    client = gateway.client
    if client is None:
        raise Refusal(503, "no_server", "the bus is away")
    ask = parse(body)
    _check_model(gateway, ask.model)
    failpoint("gateway.before_request")
    span = RequestSpan(gateway.recorder, request, started_s)
    call = Call(gateway, client, ask, dialect, started_s=started_s, span=span)
    open_work = gateway.open_work
    if not ask.stream:
        answer = await unless_gone(request.receive, call.whole(), open_work)
        return Response(answer, media_type=JSON)
    events = call.stream()
    first = await unless_gone(request.receive, _next(events), open_work)
    return EventStream(first, events, call.reader_is_slow, open_work)


async def _next(events: AsyncGenerator[bytes, None]) -> bytes:
    return await anext(events)


def _check_model(gateway: Gateway, model: str) -> None:
    """Refuse a name that no admission serves; where none is known, the mesh itself is asked."""
    known = gateway.view.models(time.monotonic_ns())
    if known and model not in known:
        message = f"model {model[:MAX_ID_LENGTH]!r} is not served here; known: {', '.join(known)}"
        raise Refusal(404, ErrorCode.MODEL_NOT_FOUND.value, message)
