"""Admission on the bus: decodes, checks and tokenises requests, and writes their frames.

Invariants: a request that does not decode, or that the model's limits refuse, gets its error frame
at once and never reaches the core; long texts are tokenised in a thread, so that the bus always
answers; frames go to inboxes of clients, never to a subject of the mesh.

Shell.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import secrets
import time
from collections.abc import Callable, Coroutine
from typing import Any, Final

import msgspec

from services.contracts import codec
from services.contracts.beats import Beat, ServiceKind
from services.contracts.errors import ERRORS, ErrorCode, RequestError, WireError
from services.contracts.ids import is_id
from services.contracts.limits import BEAT_PERIOD_MS, MAX_FRAME_DELAY_MS
from services.contracts.permissions import takes_frames
from services.contracts.public import (
    ErrorBody,
    FinishReason,
    Frame,
    decode_resume,
    encode_frame,
    encoding_of,
    request_id_of,
)
from services.contracts.sequences import (
    AbortReply,
    AdoptSequences,
    SequenceUpdates,
    SubmitReply,
)
from services.contracts.subjects import ADMISSION_QUEUE, Subjects
from services.runtime.actor import Actor
from services.runtime.bus import (
    Bus,
    Delivery,
    Endpoint,
    NoResponders,
    PayloadTooLarge,
    RequestTimeout,
)
from services.runtime.failpoints import failpoint
from services.runtime.incoming import Incoming
from services.runtime.log import get_logger, report_leaving, report_progress, report_ready
from services.runtime.service import (
    Stopping,
    connect,
    run_id,
    run_together,
    subjects,
    unless_stopped,
)
from services.runtime.settings import Settings
from services.runtime.telemetry.recorder import Recorder, new_span_id
from services.runtime.telemetry.sharing import telemetry

from .core import AdmissionCore
from .events import (
    Abort,
    BeatSent,
    CancelAsked,
    Cancelled,
    DrainAsked,
    Effect,
    Event,
    Flush,
    GivenAway,
    ResumeAsked,
    SendFrame,
    Submit,
    SubmitFailed,
    Unheard,
)
from .model_text import ModelText, load_model_text
from .request_spans import Arrival, RequestSpans
from .ticket_office import Sender, TicketOffice
from .validation import decode

SUBMIT_TIMEOUT_S: Final = 1.0
ABORT_TRIES: Final = 5
ABORT_TIMEOUT_S: Final = 1.0
MAX_OPEN_REQUESTS: Final = 16_384
DRAIN_S: Final = 3.0
# A scheduler that lives beats several times in it.
FIRST_BEAT_S: Final = 1.0
MAX_HEADER_CHARS: Final = 256
# All streams have their turn within the delay that a frame may have.
TURNS: Final = 8
TURN_NS: Final = MAX_FRAME_DELAY_MS * 1_000_000 // TURNS
MIN_FRAMES_A_TURN: Final = 16
NO_RESPONDERS: Final = "503"

_updates = codec.Decoder(SequenceUpdates)
_offer = codec.Decoder(AdoptSequences)
_beat = codec.Decoder(Beat)
_submit_reply = codec.Decoder(SubmitReply)
_abort_reply = codec.Decoder(AbortReply)


class AdmissionService:
    def __init__(
        self, core: AdmissionCore, text: ModelText, bus: Bus, names: Subjects, recorder: Recorder
    ) -> None:
        self._core = core
        self._bus = bus
        self._names = names
        self._recorder = recorder
        self._spans = RequestSpans()
        self._log = get_logger("admission")
        self._office = TicketOffice(text, core.engines)
        self._tasks: set[asyncio.Task[None]] = set()
        self._arriving: set[asyncio.Task[None]] = set()
        self._flushed_ns = 0
        self._flush_gap_ns = 0
        self._wake_timer: asyncio.TimerHandle | None = None
        self._empty = asyncio.Event()
        self._engine_heard = asyncio.Event()
        # The server answers here where nobody listens to a frame.
        self.watch = bus.new_inbox()
        self.actor: Actor[Event, Effect] = Actor(core, self._perform, self._after_turn)
        self._incoming = Incoming("admission")
        self.dropped = self._incoming.dropped

    # ---- requests in

    def on_generate(self, delivery: Delivery) -> None:
        if not self._may_answer(delivery.reply):
            self.dropped["no_inbox"] += 1
            return
        task = self._spawn(self._generate(delivery))
        self._arriving.add(task)
        task.add_done_callback(self._arriving.discard)

    def on_cancel(self, delivery: Delivery) -> None:
        request_id = self._names.tail(delivery.subject, 1)
        reply = delivery.reply if self._may_answer(delivery.reply) else ""
        if is_id(request_id):
            self.actor.post(CancelAsked(request_id, reply))

    def on_resume(self, delivery: Delivery) -> None:
        request_id = self._names.tail(delivery.subject, 1)
        try:
            offset = decode_resume(delivery.payload).offset
        except RequestError:
            self.dropped["bad_resume"] += 1
            return
        self.actor.post(ResumeAsked(request_id, offset))

    def on_watch(self, delivery: Delivery) -> None:
        if delivery.headers.get("Status") == NO_RESPONDERS:
            self.actor.post(Unheard(delivery.subject.rpartition(".")[2]))

    def on_offer(self, delivery: Delivery) -> None:
        message = self._incoming.decoded(_offer, delivery)
        if message is not None:
            self.actor.post(message)

    def on_updates(self, delivery: Delivery) -> None:
        message = self._incoming.decoded(_updates, delivery)
        if message is not None:
            self.actor.post(message)

    def on_beat(self, delivery: Delivery) -> None:
        message = self._incoming.decoded(_beat, delivery)
        if message is not None:
            self.actor.post(message)
            self._engine_heard.set()

    def _may_answer(self, reply: str) -> bool:
        """Frames go to inboxes of clients: anywhere else one would be a forged message."""
        return takes_frames(reply)

    async def _generate(self, delivery: Delivery) -> None:
        encoding, request_id = encoding_of(delivery.payload), request_id_of(delivery.payload)
        arrival = self._arrival(delivery)
        try:
            request = decode(delivery.payload)
            request_id = request_id or f"req-{secrets.token_hex(12)}"
            model = self._names.tail(delivery.subject, 1)
            sender = Sender(request_id, delivery.reply, encoding, arrival.place.traceparent)
            ticket = await self._office.ticket(request, model, sender)
        except RequestError as error:
            frame = Frame(
                request_id=request_id,
                offset=0,
                finish_reason=FinishReason.ERROR,
                error=ErrorBody(error.code, error.message),
            )
            await self._send_frame(SendFrame(delivery.reply, encoding, frame))
            self._spans.refused(request_id, arrival, error.code, time.monotonic_ns())
            self.actor.wake()
            self._log.info("request_refused", request_id=request_id, code=error.code.value)
            return
        self._spans.opened(ticket, arrival, time.monotonic_ns())
        if not failpoint("admission.after_ticket"):
            self.actor.post(ticket)

    def _arrival(self, delivery: Delivery) -> Arrival:
        caller = self._recorder.context(delivery.headers)
        return Arrival(caller.child(new_span_id()), caller.span_id, time.monotonic_ns())

    # ---- effects out

    async def _after_turn(self, num_queued: int) -> None:
        await self._flush_when_due(num_queued)
        # At once, not at the request's end, so that what is closed outlives this process.
        for span in self._spans.take():
            self._recorder.record(span)

    async def _flush_when_due(self, num_queued: int) -> None:
        """Show some of what has come once the inbox is empty, no more often than showing is cheap.

        Under load frames merge several steps' tokens, and none is later than MAX_FRAME_DELAY_MS.
        Requests take turns, so that hundreds of frames do not take the cores from a step at once.
        """
        if self._core.draining and not self._core.requests:
            self._empty.set()
        if not self._core.has_news:
            return
        start_ns = time.monotonic_ns()
        waited_ns = start_ns - self._flushed_ns
        if waited_ns < TURN_NS:
            if num_queued:
                return
            if waited_ns < self._flush_gap_ns:
                self._wake_later(self._flush_gap_ns - waited_ns)
                return
        most = max(MIN_FRAMES_A_TURN, -(-len(self._core.requests) // TURNS))
        for effect in self._core.handle(Flush(most), start_ns):
            await self._perform(effect)
        failpoint("admission.after_flush")
        self._flushed_ns = start_ns
        self._flush_gap_ns = frame_gap_ns(time.monotonic_ns() - start_ns)
        if self._core.has_news:
            self._wake_later(self._flush_gap_ns)

    def _wake_later(self, delay_ns: int) -> None:
        if self._wake_timer is None:
            loop = asyncio.get_running_loop()
            self._wake_timer = loop.call_later(delay_ns / 1e9, self._wake)

    def _wake(self) -> None:
        self._wake_timer = None
        self.actor.wake()

    async def _perform(self, effect: Effect) -> None:
        match effect:
            case SendFrame():
                if effect.frame.finish_reason is None:
                    await self._send_frame(effect)
                elif not failpoint("admission.before_terminal_frame"):
                    await self._send_frame(effect)
                    failpoint("admission.after_terminal_frame")
                self._frame_sent(effect)
            case Submit():
                self._spans.submitted(effect, time.monotonic_ns())
                self._spawn(self._submit(effect))
            case Abort():
                self._spawn(self._abort(effect))
            case GivenAway():
                self._spans.given_away(effect.request_id, time.monotonic_ns())
            case Cancelled():
                if effect.reply:
                    answer = msgspec.json.encode({"request_id": effect.request_id})
                    await self._bus.publish(effect.reply, answer)

    def _frame_sent(self, effect: SendFrame) -> None:
        end = self._spans.shown(effect, time.monotonic_ns())
        if end is not None:
            self._log.info("request_ended", **dataclasses.asdict(end))

    async def _send_frame(self, effect: SendFrame) -> None:
        frame = effect.frame
        payload = encode_frame(frame, effect.encoding)
        headers = None if frame.error is None else _error_headers(frame.error)
        # After the last frame nothing would follow from it.
        watch = f"{self.watch}.{frame.request_id}" if frame.finish_reason is None else ""
        try:
            await self._bus.publish(effect.reply, payload, reply=watch, headers=headers)
        except PayloadTooLarge as error:
            body = ErrorBody(ErrorCode.PAYLOAD_TOO_LARGE, str(error))
            small = Frame(
                request_id=frame.request_id,
                offset=frame.offset,
                finish_reason=FinishReason.ERROR,
                error=body,
            )
            if frame.finish_reason is None:
                self.actor.post(CancelAsked(frame.request_id))
            await self._bus.publish(
                effect.reply, encode_frame(small, effect.encoding), headers=_error_headers(body)
            )

    async def _submit(self, effect: Submit) -> None:
        seq_id = effect.message.seq_id
        try:
            answer = await self._bus.request(
                self._names.submit(effect.engine),
                codec.encode(effect.message),
                timeout_s=SUBMIT_TIMEOUT_S,
            )
            reply = _submit_reply.decode(answer)
            if not failpoint("admission.after_submit"):
                self.actor.post(reply)
        except PayloadTooLarge as error:
            refusal = SubmitReply(seq_id, 0, ErrorCode.PAYLOAD_TOO_LARGE, str(error))
            self.actor.post(refusal)
        except (NoResponders, RequestTimeout, WireError):
            self.actor.post(SubmitFailed(seq_id))

    async def _abort(self, effect: Abort) -> None:
        """Idempotent, and nobody waits for it: retried a few times, then the scheduler's log
        expires by itself.
        """
        payload = codec.encode(effect.message)
        for _ in range(ABORT_TRIES):
            try:
                answer = await self._bus.request(
                    self._names.abort(effect.engine), payload, timeout_s=ABORT_TIMEOUT_S
                )
                _abort_reply.decode(answer)
                return
            except (RequestTimeout, WireError):
                continue
            except NoResponders:
                await asyncio.sleep(ABORT_TIMEOUT_S)
        self.dropped["abort"] += 1

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # ---- the end

    async def until_engine_heard(self) -> None:
        """Who listens before that refuses what an engine would take a moment later."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FIRST_BEAT_S):
                await self._engine_heard.wait()

    async def beat_forever(self) -> None:
        """The core hears of each beat that went out: its silence is how others judge it."""
        while True:
            await self._beat()
            await asyncio.sleep(BEAT_PERIOD_MS / 1000)

    async def _beat(self) -> None:
        beat = self._core.beat()
        subject = self._names.beat("admission", beat.service_id)
        if await self._bus.publish(subject, codec.encode(beat)):
            self.actor.post(BeatSent())

    async def drain(self, *, for_good: bool) -> None:
        """Take no new requests, let open ones end, for a while; then leave them to another
        admission.

        for_good: nobody is going to take them, so they end with an error.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_S):
                await self._bus.leave(ADMISSION_QUEUE)
                await asyncio.gather(*self._arriving)
                self.actor.post(DrainAsked())
                await self._empty.wait()
        if for_good:
            message = "the service is being stopped"
            for effect in self._core.fail_all(ErrorCode.DRAINING, message):
                await self._perform(effect)
        self._core.leaving = True
        await self._beat()
        self._office.close()


def frame_gap_ns(cost_ns: int) -> int:
    """Least time between two flushes, from what the last one cost: frames take a ninth of a core.

    A flush of 0.5 ms (a turn of some twenty streams): every 4 ms. At most TURN_NS.
    """
    return min(8 * cost_ns, TURN_NS)


def _error_headers(error: ErrorBody) -> dict[str, str]:
    """As NATS services report errors (ADR-32)."""
    text = error.message.encode("ascii", "replace").decode()
    clean = "".join(c if c.isprintable() else " " for c in text)
    return {
        "Nats-Service-Error-Code": str(ERRORS[error.code].status),
        "Nats-Service-Error": f"{error.code}: {clean}"[:MAX_HEADER_CHARS],
    }


async def serve(settings: Settings, stopping: Stopping) -> None:
    report_progress(0.0, "loading the tokenizer")
    text = await unless_stopped(stopping, asyncio.to_thread(load_model_text, settings))
    names, me = subjects(settings), run_id(settings.admission_id)
    bus = await connect(settings, me, stopping)
    core = AdmissionCore(me, {text.name: text}, MAX_OPEN_REQUESTS)
    traces = telemetry(settings, ServiceKind.ADMISSION, me)
    service = AdmissionService(core, text, bus, names, traces.recorder)
    listeners: list[tuple[str, Callable[[Delivery], None]]] = [
        (names.updates(me), service.on_updates),
        (names.any_beat("scheduler"), service.on_beat),
        (f"{service.watch}.*", service.on_watch),
    ]
    endpoints = [
        Endpoint("generate", names.any_generate, service.on_generate, queue=ADMISSION_QUEUE),
        Endpoint("cancel", names.any_cancel, service.on_cancel),
        Endpoint("resume", names.any_resume, service.on_resume),
    ]
    for subject, handler in listeners:
        await bus.subscribe(subject, handler)
    await traces.join(bus, names)

    async def serve_and_drain() -> None:
        await service.until_engine_heard()
        await bus.subscribe(names.adopt, service.on_offer, queue=ADMISSION_QUEUE)
        await bus.serve("streetcar-admission", "Streetcar: requests in, text out", endpoints)
        await bus.flush()
        report_ready(id=me, model=text.name)
        await stopping.wait()
        if not stopping.for_good:
            report_leaving()
        await service.drain(for_good=stopping.for_good)

    try:
        never = asyncio.Event()
        await run_together(
            never,
            service.actor.run(),
            service.beat_forever(),
            serve_and_drain(),
            traces.share_forever(),
        )
    finally:
        await traces.close()
        await bus.close()
