"""Admission as the simulation runs it: the real core and the real spans behind a shell made of
virtual time, which does what `services/admission/service.py` does.

Shell of the simulation; no clock, no socket.
"""

from __future__ import annotations

from typing import Any, Final

from services.admission import core as adm
from services.admission import events as adm_events
from services.admission.open_request import Ticket
from services.admission.request_spans import Arrival, RequestSpans
from services.admission.validation import ModelLimits, check, decode, prepare
from services.contracts import codec
from services.contracts.beats import Beat
from services.contracts.errors import ErrorCode, RequestError
from services.contracts.public import (
    Encoding,
    ErrorBody,
    FinishReason,
    Frame,
    GenerateRequest,
    encode_frame,
    encoding_of,
)
from services.contracts.sequences import AdoptSequences, SequenceUpdates, SubmitReply
from services.contracts.spans import first_span_id
from services.contracts.trace_context import TraceContext

from .bus import Answer, Asking, Envelope
from .model import VOCAB_SIZE
from .nodes import ENGINE, MODEL, SECOND_NS, CoreNode
from .phases import Phase
from .process import Skew

SUBMIT_TIMEOUT_NS: Final = SECOND_NS
ABORT_TIMEOUT_NS: Final = SECOND_NS
ABORT_TRIES: Final = 5
MAX_OPEN_REQUESTS: Final = 1000
FIRST_BEAT_NS: Final = SECOND_NS
EARLY_LOOK_NS: Final = 100_000_000

_submit_reply = codec.Decoder(SubmitReply)
_updates = codec.Decoder(SequenceUpdates)
_offer = codec.Decoder(AdoptSequences)


class AdmissionNode(CoreNode):
    role = "admission"

    def __init__(self, world: Any, name: str, host: str, skew: Skew) -> None:
        super().__init__(world, name, host, skew)
        self.core: adm.AdmissionCore = adm.AdmissionCore(
            name, {MODEL: world.vocabulary}, MAX_OPEN_REQUESTS
        )
        self.spans = RequestSpans()
        self._serves = False
        self._num_spans = 0

    def begin(self) -> None:
        self.bus.subscribe(self, f"updates.{self.name}", lambda b, _: self.post(_updates.decode(b)))
        self.hear_beats("scheduler")
        self.beat_forever("admission")
        # Who serves before it has heard of an engine refuses what that would take a moment later.
        self.after(FIRST_BEAT_NS, self._serve)

    def _serve(self) -> None:
        if not self._serves:
            self._serves = True
            self.bus.subscribe(self, "adopt", self._hear_offer, queue="admission")
            self.bus.subscribe(self, "generate", self._hear_generate, queue="admission")
            self.bus.subscribe(self, "cancel", self._hear_cancel)
            self.bus.subscribe(self, "resume", self._hear_resume)

    def beat(self) -> Beat:
        # The core hears of each beat that went out.
        if not self.bus.outage:
            self.post(adm_events.BeatSent())
        return super().beat()

    # ---- in

    def post(self, event: Any) -> None:
        super().post(event)
        if isinstance(event, Beat):
            self._serve()

    def _hear_offer(self, payload: bytes, _answer: Answer) -> None:
        self.post(_offer.decode(payload))

    def _hear_resume(self, payload: bytes, _answer: Answer) -> None:
        request_id, _, offset = payload.decode().partition(" ")
        self.post(adm_events.ResumeAsked(request_id, int(offset)))

    def _hear_generate(self, payload: bytes, _answer: Answer) -> None:
        request, encoding = decode(payload), encoding_of(payload)
        reply = f"inbox.{request.request_id}"
        engine = self.core.engines.expect(MODEL, self.now_ns)
        if engine is not None and not engine.max_model_len:
            # Its first worker is still to come.
            self.after(EARLY_LOOK_NS, lambda: self._hear_generate(payload, _answer))
            return
        caller = client_place(request.request_id or "", request.seed or 0)
        arrival = Arrival(caller.child(self._new_span_id()), caller.span_id, self.now_ns)
        try:
            ticket = self._ticket(request, reply, encoding, arrival.place.traceparent)
        except RequestError as error:
            frame = Frame(
                request_id=request.request_id or "",
                offset=0,
                finish_reason=FinishReason.ERROR,
                error=ErrorBody(error.code, error.message),
            )
            self.perform(adm_events.SendFrame(reply, encoding, frame))
            self.spans.refused(frame.request_id, arrival, error.code, self.now_ns)
            self._tell_spans()
            return
        self.spans.opened(ticket, arrival, self.now_ns)
        self.post(ticket)

    def _new_span_id(self) -> str:
        """Drawn in the services; here made of the run's name, so that a history stays the same."""
        self._num_spans += 1
        return f"{first_span_id(self.name, self._num_spans):016x}"

    def _ticket(
        self, request: GenerateRequest, reply: str, encoding: Encoding, traceparent: str
    ) -> Ticket:
        engine = self.core.engines.expect(MODEL, self.now_ns)
        if engine is None:
            raise RequestError(ErrorCode.NO_WORKER, "no worker serves it at this moment")
        limits = ModelLimits(VOCAB_SIZE, engine.max_model_len, 8)
        check(request, limits)
        prompt = request.prompt_token_ids or []
        prepared = prepare(request, len(prompt), limits, seed=0, eos_token_ids=())
        return Ticket(
            request_id=request.request_id or "",
            model=MODEL,
            reply=reply,
            encoding=encoding,
            prompt_token_ids=prompt,
            max_tokens=prepared.max_tokens,
            sampling=prepared.sampling,
            stop_token_ids=prepared.stop_token_ids,
            stop_strings=prepared.stop_strings,
            include_stop=False,
            stream=request.stream,
            salt=request.cache_salt.encode(),
            priority=request.priority,
            deadline_ms=request.deadline_ms or 0,
            retry=request.retry,
            traceparent=traceparent,
        )

    def _hear_cancel(self, payload: bytes, _answer: Answer) -> None:
        self.post(adm_events.CancelAsked(payload.decode()))

    # ---- out

    def settled(self) -> None:
        while self.core.has_news and self.alive:
            for effect in self.core.handle(adm_events.Flush(), self.now_ns):
                if self.alive:
                    self.perform(effect)
        self._tell_spans()
        super().settled()

    def _tell_spans(self) -> None:
        for span in self.spans.take():
            self.world.span(self, span)

    def perform(self, effect: adm_events.Effect) -> None:
        match effect:
            case adm_events.SendFrame():
                self._send_frame(effect)
                self.spans.shown(effect, self.now_ns)
            case adm_events.Submit():
                self.spans.submitted(effect, self.now_ns)
                self._submit(effect)
            case adm_events.Abort():
                self._abort(effect, ABORT_TRIES)
            case adm_events.GivenAway():
                self.spans.given_away(effect.request_id, self.now_ns)
            case adm_events.Cancelled():
                self.world.cancelled(effect.request_id)

    def _send_frame(self, effect: adm_events.SendFrame) -> None:
        frame = effect.frame
        reached = Phase.FIRST_FRAME if frame.offset == 0 else Phase.FRAME
        if frame.finish_reason is not None:
            reached = Phase.TERMINAL
        payload = encode_frame(frame, effect.encoding)
        heard = self.bus.publish(self, effect.reply, Envelope("frame", payload, (reached,)))
        if frame.finish_reason is None and not heard and not self.bus.outage:
            self.after(0, lambda: self.post(adm_events.Unheard(frame.request_id)))

    def _submit(self, effect: adm_events.Submit) -> None:
        assert effect.engine == ENGINE, f"a submission to {effect.engine!r}"
        failed = adm_events.SubmitFailed(effect.message.seq_id)
        asking = Asking(
            SUBMIT_TIMEOUT_NS,
            lambda b: self.post(_submit_reply.decode(b)),
            lambda: self.post(failed),
            lambda: self.post(failed),
        )
        payload = codec.encode(effect.message)
        self.bus.request(self, "submit", Envelope("submit", payload, (Phase.SUBMITTED,)), asking)

    def _abort(self, effect: adm_events.Abort, tries: int) -> None:
        """Idempotent, and nobody waits for it: tried a few times."""

        def again() -> None:
            if tries > 1:
                self._abort(effect, tries - 1)

        asking = Asking(
            ABORT_TIMEOUT_NS,
            lambda b: None,
            again,
            lambda: self.after(ABORT_TIMEOUT_NS, again),
        )
        payload = codec.encode(effect.message)
        envelope = Envelope("abort", payload, (Phase.ACKNOWLEDGED,))
        self.bus.request(self, "abort", envelope, asking)


def client_place(request_id: str, number: int) -> TraceContext:
    """The client's own span; three of four are recorded."""
    trace_id = f"{first_span_id(request_id, 0):016x}{first_span_id(request_id, 1):016x}"
    return TraceContext(trace_id, f"{first_span_id(trace_id):016x}", number % 4 != 0)
