"""The request table: every open request, from its ticket to its one terminal frame.

    ticket ─▶ submitted ─▶ streaming ─▶ terminal frame ─▶ acknowledged to the scheduler, forgotten
        │        │ refused ─────────────▶ error frame
        │        │ another admission has it ─▶ forgotten without a word
        │        └ cancelled, expired, stop string, unheard ─▶ terminal frame + abort
        └ no engine, but lately there was one ─▶ waits for it

Invariants: exactly one terminal frame for each ticket that is its own, and nothing after it but the
same again for who asks to resume; tokens are shown in order, and again only from where a client
asks; what an engine may have lost (a gap, a higher epoch, a late abort) is repaired by submitting
again what is open there; after a sleep nothing is shown before the scheduler has said whose it is.

Pure: time is `now_ns`, monotonic.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import Final

from services.contracts.beats import AdmissionLoad, Beat, ServiceKind
from services.contracts.errors import ErrorCode, RequestError
from services.contracts.limits import (
    BEAT_PERIOD_MS,
    ENGINE_ABSENCE_SECONDS,
    UNHEARD_SECONDS,
)
from services.contracts.public import ErrorBody, FinishReason, Frame, Usage
from services.contracts.sequences import (
    AdoptSequences,
    SequenceUpdates,
    SubmitReply,
)
from services.contracts.streams import Arrival
from services.contracts.vectors import unpack

from .adoption import envelope_of, ticket_of
from .ended import EndedRequests
from .engines import Engine, EngineDirectory
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
from .open_request import LISTENING, OpenRequest, Ticket, Vocabulary
from .request_table import RequestTable, Tombstones
from .submissions import Submissions

TICK_NS: Final = 50_000_000
# Gaps of one engine's updates are repaired together, no more often than this.
REPAIR_NS: Final = 50_000_000
SUBMIT_RETRY_NS: Final = 250_000_000
SUBMIT_GIVE_UP_NS: Final = ENGINE_ABSENCE_SECONDS * 1_000_000_000
# The scheduler ends a late sequence itself; admission does only where it does not hear from it.
DEADLINE_GRACE_NS: Final = 500_000_000
UNHEARD_NS: Final = UNHEARD_SECONDS * 1_000_000_000
# Sooner than the scheduler's suspicion, three periods, by more than a message takes.
DOUBT_AFTER_NS: Final = 5 * BEAT_PERIOD_MS * 1_000_000 // 2
# Refusals of an engine that is between two workers or two schedulers, or has to sort itself.
_PASSING: Final = (ErrorCode.NO_WORKER, ErrorCode.DRAINING, ErrorCode.QUEUE_FULL)
NEVER_NS: Final = 2**62


class AdmissionCore:
    """See the module. admission_id: new with every run. vocabularies: by served model."""

    def __init__(
        self, admission_id: str, vocabularies: Mapping[str, Vocabulary], max_open: int
    ) -> None:
        self.admission_id = admission_id
        self.vocabularies = vocabularies
        self.max_open = max_open
        self.engines = EngineDirectory()
        self.table = RequestTable()
        self.ended = EndedRequests()
        self.draining = False
        self.leaving = False
        self._tombstones = Tombstones()
        self._submissions = Submissions(admission_id)
        self._tick_at_ns = 0
        self._now_ns = 0
        self._beat_ns = NEVER_NS
        self._in_doubt = False
        self._effects: list[Effect] = []

    @property
    def requests(self) -> Mapping[str, OpenRequest]:
        """Open ones by id."""
        return self.table.by_id

    # ---- entry

    def handle(self, event: Event, now_ns: int) -> list[Effect]:
        self._see_time(now_ns)
        match event:
            case SequenceUpdates():
                self._on_updates(event, now_ns)
            case Flush():
                self._show(event.most)
            case Ticket():
                self._on_ticket(event, now_ns)
            case SubmitReply():
                self._on_submit_reply(event, now_ns)
            case SubmitFailed():
                self._on_submit_failed(event, now_ns)
            case CancelAsked():
                self._on_cancel(event, now_ns)
            case ResumeAsked():
                self._on_resume(event)
            case Unheard():
                self._on_unheard(event, now_ns)
            case AdoptSequences():
                self._on_offer(event, now_ns)
            case Beat():
                self._on_beat(event, now_ns)
            case BeatSent():
                self._beat_ns, self._in_doubt = now_ns, False
            case DrainAsked():
                self.draining = True
        return self._out()

    def tick(self, now_ns: int) -> list[Effect]:
        self._see_time(now_ns)
        lost = self.engines.lost(now_ns)
        for request in self.table:
            if request.submitted and request.engine_id in lost:
                self._leave_engine(request, now_ns)
            elif not request.submitted and now_ns >= request.submit_at_ns:
                self._submissions.lost(request.request_id)
                self._submit_again(request, now_ns)
            elif now_ns >= _deadline_ns(request) and not request.withheld:
                self._fail(request, ErrorCode.DEADLINE_EXCEEDED, "deadline exceeded")
        for engine in list(self.engines.engines.values()):
            self._repair(engine, now_ns)
        self._tombstones.forget_old(now_ns)
        self.ended.forget_old(now_ns)
        self._tick_at_ns = now_ns + TICK_NS
        return self._out()

    @property
    def wake_at_ns(self) -> int | None:
        waits = self.requests or self._tombstones or self.ended
        return self._tick_at_ns if waits else None

    @property
    def has_news(self) -> bool:
        return bool(self.table.news) or self._submissions.has_aborts

    # ---- requests come and go

    def _on_ticket(self, ticket: Ticket, now_ns: int) -> None:
        known = self.requests.get(ticket.request_id)
        ended = self.ended.find(ticket.request_id)
        if known is not None and _is_again(ticket, known.ticket):
            self._ask_again(known, ticket, now_ns)
        elif ended is not None and _is_again(ticket, ended.request.ticket):
            for frame in ended.frames(0):
                self._effects.append(SendFrame(ticket.reply, ticket.encoding, frame))
        elif known is not None:
            text = f"request_id {ticket.request_id} is in use by a running request"
            self._refuse(ticket, ErrorCode.DUPLICATE_REQUEST, text)
        elif self._tombstones.take(ticket.request_id):
            frame = Frame(
                request_id=ticket.request_id,
                offset=0,
                finish_reason=FinishReason.ABORT,
                usage=Usage(len(ticket.prompt_token_ids), 0, 0),
            )
            self._effects.append(SendFrame(ticket.reply, ticket.encoding, frame))
        elif self.draining:
            self._refuse(ticket, ErrorCode.DRAINING, "the service is being stopped")
        elif len(self.requests) >= self.max_open:
            text = f"{len(self.requests)} requests are open already"
            self._refuse(ticket, ErrorCode.QUEUE_FULL, text)
        else:
            self._open(ticket, now_ns)

    def _open(self, ticket: Ticket, now_ns: int) -> None:
        engine = self.engines.choose(ticket.model, now_ns)
        if engine is None and self.engines.expect(ticket.model, now_ns) is None:
            text = f"no worker serves {ticket.model} at this moment"
            self._refuse(ticket, ErrorCode.NO_WORKER, text)
            return
        try:
            envelope = envelope_of(ticket)
        except RequestError as error:
            self._refuse(ticket, error.code, error.message)
            return
        self._take(ticket, envelope, engine.engine_id if engine else "", now_ns)

    def _take(self, ticket: Ticket, envelope: bytes, engine_id: str, now_ns: int) -> None:
        request = OpenRequest(
            ticket=ticket,
            vocabulary=self.vocabularies[ticket.model],
            arrival_ns=now_ns,
            engine_id=engine_id,
            envelope=envelope,
            submit_at_ns=now_ns + SUBMIT_RETRY_NS,
            give_up_ns=now_ns + SUBMIT_GIVE_UP_NS,
        )
        self.ended.drop(ticket.request_id)
        self.table.add(request)
        if engine_id:
            self._submit(request, now_ns)

    def _ask_again(self, request: OpenRequest, ticket: Ticket, now_ns: int) -> None:
        """Its client has sent it again: everything is shown from the first token on."""
        request.answer_to(ticket)
        try:
            envelope = envelope_of(request.ticket)
        except RequestError as error:
            self._fail(request, error.code, error.message)
            return
        if envelope != request.envelope:
            request.envelope = envelope
            if request.submitted:
                self._submit(request, now_ns)
        request.unheard_ns = LISTENING
        request.rewind(0)
        self.table.news[request.request_id] = request

    def _submit(self, request: OpenRequest, now_ns: int) -> None:
        assert request.engine_id
        request.submitted = False
        request.num_submissions += 1
        # The shell answers each submission with a reply or a failure; this is for one that it
        # loses.
        request.submit_at_ns = now_ns + SUBMIT_GIVE_UP_NS
        self._submissions.sent(request.request_id, request.engine_id)
        message = request.submission(self.admission_id, now_ns)
        self._effects.append(Submit(request.engine_id, message))

    def _submit_again(self, request: OpenRequest, now_ns: int) -> None:
        engine = self.engines.choose(request.ticket.model, now_ns)
        if engine is None and now_ns >= request.give_up_ns:
            text = f"no worker serves {request.ticket.model} any more"
            self._fail(request, ErrorCode.NO_WORKER, text)
            return
        if engine is not None and not self.engines.is_ready(request.engine_id, now_ns):
            self._move(request, engine.engine_id)
        if request.engine_id:
            self._submit(request, now_ns)
        else:
            request.submit_at_ns = now_ns + SUBMIT_RETRY_NS

    def _leave_engine(self, request: OpenRequest, now_ns: int) -> None:
        """What it has begun goes on at another engine, with the tokens that are here."""
        model = request.ticket.model
        engine = self.engines.choose(model, now_ns)
        if engine is None:
            self._fail(request, ErrorCode.NO_WORKER, f"no worker serves {model} any more")
            return
        self._submissions.abort(request.request_id, request.engine_id)
        self._move(request, engine.engine_id)
        self._submit(request, now_ns)

    def _move(self, request: OpenRequest, engine_id: str) -> None:
        self.table.rename(request)
        request.engine_id = engine_id

    def _on_submit_reply(self, reply: SubmitReply, now_ns: int) -> None:
        self._submissions.answered(reply.seq_id, wanted=reply.seq_id in self.requests)
        request = self.requests.get(reply.seq_id)
        if request is None or not request.engine_id:
            # It has ended; or was lost and sent again since, and waits for an engine.
            return
        if reply.code is None and reply.epoch < self.engines.get(request.engine_id).epoch[1]:
            # By a scheduler that another has replaced, and that does not know it yet.
            self._try_later(request, now_ns)
        elif reply.owned_elsewhere:
            self._lose(request, is_same=reply.is_same)
        elif reply.code is None:
            request.submitted = request.accepted = True
            if request.withheld and not self._submissions.is_in_air(reply.seq_id):
                # The answer to the last submission, so to one of after the sleep.
                self._unveil(request)
        elif request.finished is not None:
            # Withheld at its end, and whoever could say whose it was is gone: no other has it.
            self._unveil(request)
        elif _may_pass(request, reply.code, now_ns):
            request.submit_at_ns = now_ns + SUBMIT_RETRY_NS
        else:
            self._end(request, request.error_frame(reply.code, reply.message), abort=False)

    def _unveil(self, request: OpenRequest) -> None:
        request.withheld = False
        self.table.news[request.request_id] = request

    def _on_submit_failed(self, failed: SubmitFailed, now_ns: int) -> None:
        self._submissions.answered(failed.seq_id, wanted=failed.seq_id in self.requests)
        request = self.requests.get(failed.seq_id)
        if request is not None:
            self._try_later(request, now_ns)

    def _try_later(self, request: OpenRequest, now_ns: int) -> None:
        request.submitted = False
        request.submit_at_ns = now_ns + SUBMIT_RETRY_NS

    def _lose(self, request: OpenRequest, *, is_same: bool) -> None:
        """Another admission has it, and tells the client all that is to be told: a retry that went
        there has overtaken the request itself, or another has adopted it.

        A new request that is refused so at once has the id of another one that runs.
        """
        if is_same or request.ticket.retry or request.num_submissions > 1:
            self._give_away(request)
            return
        text = f"request_id {request.request_id} is in use by a running request"
        frame = request.error_frame(ErrorCode.DUPLICATE_REQUEST, text)
        self._end(request, frame, abort=False)

    def _give_away(self, request: OpenRequest) -> None:
        self.table.remove(request)
        self._effects.append(GivenAway(request.request_id))

    def _on_cancel(self, cancel: CancelAsked, now_ns: int) -> None:
        request = self.requests.get(cancel.request_id)
        if request is not None:
            self._end(request, request.abort_frame(), abort=True)
        if cancel.request_id in self.ended:
            self._effects.append(Cancelled(cancel.request_id, cancel.reply))
            return
        self._tombstones.bury(cancel.request_id, now_ns)

    def _on_resume(self, event: ResumeAsked) -> None:
        """Frames from the offset on; one without tokens where there is nothing new, so that the
        client knows that its request is somebody's.
        """
        request = self.requests.get(event.request_id)
        ended = self.ended.find(event.request_id)
        if request is not None:
            request.unheard_ns = LISTENING
            if event.offset < request.num_shown and not request.withheld:
                request.rewind(event.offset)
                self.table.news[event.request_id] = request
            elif not request.withheld:
                frame = Frame(request_id=event.request_id, offset=event.offset)
                self._send(request, frame)
        elif ended is not None:
            for frame in ended.frames(event.offset):
                self._send(ended.request, frame)

    def _on_unheard(self, event: Unheard, now_ns: int) -> None:
        """A client may be away for a moment; one that stays away wants no more tokens."""
        request = self.requests.get(event.request_id)
        if request is None or request.withheld:
            return
        if request.unheard_ns == LISTENING:
            request.unheard_ns = now_ns
        if now_ns - request.unheard_ns >= UNHEARD_NS:
            self._end(request, request.abort_frame(), abort=True)

    def _on_offer(self, offer: AdoptSequences, now_ns: int) -> None:
        """Take over what another admission has left."""
        offered = [(message.seq_id, ticket_of(message), message) for message in offer.sequences]
        for seq_id, ticket, message in offered:
            known = self.requests.get(seq_id)
            if known is not None and known.engine_id == offer.engine:
                if known.submitted:
                    self._submit(known, now_ns)
            elif (known is not None and known.engine_id) or seq_id in self.ended:
                # It runs on another engine, or its client knows the end: nobody wants this one.
                self._submissions.abort(seq_id, offer.engine)
            elif known is None and self._has_room and ticket.model in self.vocabularies:
                self._take(ticket, message.envelope, offer.engine, now_ns)

    @property
    def _has_room(self) -> bool:
        return not self.draining and len(self.requests) < self.max_open

    def fail_all(self, code: ErrorCode, message: str) -> list[Effect]:
        """The end of a drain that took too long: every open request gets its terminal frame."""
        for request in self.table:
            self._fail(request, code, message)
        return self._out()

    def _fail(self, request: OpenRequest, code: ErrorCode, message: str) -> None:
        self._end(request, request.error_frame(code, message), abort=True)

    def _end(self, request: OpenRequest, frame: Frame, *, abort: bool) -> None:
        """The terminal frame: the only place that ends a request that was opened."""
        self.table.remove(request)
        self.ended.keep(request, frame, self._now_ns)
        self._send(request, frame)
        if abort:
            self._submissions.abort(request.request_id, request.engine_id)

    def _send(self, request: OpenRequest, frame: Frame) -> None:
        self._effects.append(SendFrame(request.ticket.reply, request.ticket.encoding, frame))

    def _refuse(self, ticket: Ticket, code: ErrorCode, message: str) -> None:
        frame = Frame(
            request_id=ticket.request_id,
            offset=0,
            finish_reason=FinishReason.ERROR,
            error=ErrorBody(code, message),
        )
        self._effects.append(SendFrame(ticket.reply, ticket.encoding, frame))

    # ---- tokens

    def _on_updates(self, updates: SequenceUpdates, now_ns: int) -> None:
        engine = self.engines.get(updates.engine)
        epoch = (updates.generation, updates.epoch)
        if epoch < engine.epoch:
            return
        self._see_epoch(engine, epoch, now_ns)
        arrival = engine.updates.arrive(updates.number)
        if arrival is Arrival.DUPLICATE:
            return
        if arrival is Arrival.GAP:
            engine.updates.restart(updates.number)
            engine.has_gap = True
            self._repair(engine, now_ns)
        self._take_updates(updates, now_ns)

    def _take_updates(self, updates: SequenceUpdates, now_ns: int) -> None:
        by_tag, news = self.table.by_tag, self.table.news
        for started in updates.started:
            if (request := by_tag.get(started.tag)) is not None:
                request.num_cached_tokens = started.num_cached_tokens
        tags, offsets = unpack(updates.tags).tolist(), unpack(updates.offsets).tolist()
        token_ids = unpack(updates.token_ids).tolist()
        counts = unpack(updates.counts).tolist() if updates.counts else [1] * len(tags)
        at = 0
        for tag, offset, count in zip(tags, offsets, counts, strict=True):
            request = by_tag.get(tag)
            if request is not None:
                if count == 1 and offset == len(request.token_ids):
                    # What `accept` does, for what nearly all of them are.
                    request.token_ids.append(token_ids[at])
                    news[request.request_id] = request
                elif request.accept(offset, token_ids[at : at + count]):
                    news[request.request_id] = request
                elif request.submitted:
                    # Something before these tokens was lost, and no repair of it is under way.
                    self._submit(request, now_ns)
            at += count
        for entry in updates.logprobs:
            if (request := by_tag.get(entry.tag)) is not None:
                request.accept_logprobs(entry.offset, entry.logprobs)
        for prompt in updates.prompt_logprobs:
            if (request := by_tag.get(prompt.tag)) is not None:
                request.accept_prompt_logprobs(prompt.first, prompt.logprobs)
        for finished in updates.finished:
            request = by_tag.get(finished.tag)
            if request is None:
                continue
            if finished.reason is FinishReason.ABORT:
                # Whom its client has cancelled is open here no more: a late abort has hit it.
                self._submit(request, now_ns)
            # An end whose last tokens were lost waits for them: the resubmission brings both again.
            elif len(request.token_ids) >= finished.num_output_tokens:
                request.finished = finished
                news[request.request_id] = request
        for tag in unpack(updates.moved).tolist() if updates.moved else ():
            if (request := by_tag.get(tag)) is not None:
                self._give_away(request)

    def _show(self, most: int | None) -> None:
        """A frame for requests with news; acknowledgements and aborts, batched."""
        news = self.table.news
        for request_id in list(islice(news, most)):
            request = news.pop(request_id)
            if request.withheld:
                continue
            frame = request.frame()
            while frame is not None and frame.finish_reason is None:
                self._send(request, frame)
                frame = request.frame() if request.has_more else None
            if frame is not None:
                self._end(request, frame, abort=True)

    # ---- sleep

    def _see_time(self, now_ns: int) -> None:
        """Where our own beats are late, another admission may have been given what is open here."""
        self._now_ns = now_ns
        if self._in_doubt or now_ns - self._beat_ns <= DOUBT_AFTER_NS:
            return
        self._in_doubt = True
        self.engines.absolve(now_ns)
        for request in self.requests.values():
            # One that still waits for an engine was never anybody else's.
            if request.engine_id:
                request.withheld = True
                self._submit(request, now_ns)

    # ---- engines

    def _on_beat(self, beat: Beat, now_ns: int) -> None:
        if beat.kind is not ServiceKind.SCHEDULER or beat.engine is None:
            return
        engine = self.engines.on_beat(beat, now_ns)
        epoch = (beat.generation, beat.epoch)
        if epoch < engine.epoch:
            return
        self._see_epoch(engine, epoch, now_ns)
        for mark in beat.streams:
            if mark.name == self.admission_id and engine.updates.behind(mark.number):
                engine.updates.restart(mark.number)
                engine.has_gap = True
                self._repair(engine, now_ns)

    def _see_epoch(self, engine: Engine, epoch: tuple[int, int], now_ns: int) -> None:
        """A higher epoch: its scheduler may know nothing of what is open there, and its stream
        begins anew.
        """
        if epoch > engine.epoch:
            engine.epoch = epoch
            engine.updates.restart(0)
            self._resubmit_all(engine, now_ns)

    def _repair(self, engine: Engine, now_ns: int) -> None:
        """Submit again what a gap may have hit; not for every gap anew, as each of the answers is
        an update that may be lost as well.
        """
        if engine.has_gap and now_ns >= engine.repair_at_ns:
            engine.has_gap, engine.repair_at_ns = False, now_ns + REPAIR_NS
            self._resubmit_all(engine, now_ns)

    def _resubmit_all(self, engine: Engine, now_ns: int) -> None:
        for request in self.requests.values():
            if request.engine_id == engine.engine_id:
                request.give_up_ns = now_ns + SUBMIT_GIVE_UP_NS
                self._submit(request, now_ns)

    def _out(self) -> list[Effect]:
        self._effects.extend(Abort(*abort) for abort in self._submissions.take_aborts())
        effects, self._effects = self._effects, []
        return effects

    # ---- what others may ask

    def beat(self) -> Beat:
        return Beat(
            kind=ServiceKind.ADMISSION,
            service_id=self.admission_id,
            admission=AdmissionLoad(models=list(self.vocabularies), num_open=len(self.requests)),
            leaving=self.leaving,
        )

    def check_invariants(self) -> None:
        self.table.check_invariants()
        assert len(self.table) <= self.max_open


def _is_again(ticket: Ticket, known: Ticket) -> bool:
    """Whether it is the known request sent again; else another one with the same id."""
    return ticket.retry or ticket.reply == known.reply


def _may_pass(request: OpenRequest, code: ErrorCode, now_ns: int) -> bool:
    """Whether the refusal of a submission is the engine's state of a moment.

    A sequence that it had taken before it takes back; a new one waits for a while.
    """
    if request.accepted:
        return code in _PASSING
    return code is not ErrorCode.QUEUE_FULL and code in _PASSING and now_ns < request.give_up_ns


def _deadline_ns(request: OpenRequest) -> int:
    deadline_ms = request.ticket.deadline_ms
    if not deadline_ms:
        return NEVER_NS
    return request.arrival_ns + deadline_ms * 1_000_000 + DEADLINE_GRACE_NS
