"""The request table: every open request, from its ticket to its one terminal frame.

    ticket ─▶ submitted ─▶ streaming ─▶ terminal frame ─▶ acknowledged to the scheduler, forgotten
                 │ refused ─────────────▶ error frame
                 └ cancelled, expired, stop string ─▶ terminal frame + abort

Invariants: exactly one terminal frame for each ticket, and nothing after it; tokens are shown in
order, once; what an engine may have lost (a gap, a higher epoch) is repaired by submitting again
what is open there.

Pure: time is `now_ns`, monotonic.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

from services.contracts.beats import AdmissionLoad, Beat, ServiceKind
from services.contracts.errors import ErrorCode
from services.contracts.limits import (
    CANCEL_TOMBSTONE_SECONDS,
    MAX_LANES,
    MAX_TOMBSTONES,
)
from services.contracts.public import Encoding, ErrorBody, FinishReason, Frame
from services.contracts.sequences import (
    AbortSequences,
    SequenceUpdates,
    SubmitReply,
    SubmitSequence,
)
from services.contracts.streams import Arrival
from services.contracts.vectors import unpack

from .engines import Engine, EngineDirectory
from .open_request import OpenRequest, Ticket, Vocabulary

TICK_NS: Final = 50_000_000
SUBMIT_RETRY_NS: Final = 250_000_000
SUBMIT_GIVE_UP_NS: Final = 10_000_000_000
# The scheduler ends a late sequence itself; admission does only where it does not hear from it.
DEADLINE_GRACE_NS: Final = 500_000_000
MAX_TAG: Final = 2**31 - 1
NEVER_NS: Final = 2**62


@dataclass(frozen=True, slots=True)
class CancelAsked:
    """`reply`: where the owner answers, or empty."""

    request_id: str
    reply: str = ""


@dataclass(frozen=True, slots=True)
class SubmitFailed:
    """No answer to a submission."""

    seq_id: str


@dataclass(frozen=True, slots=True)
class Flush:
    """The inbox is drained: show what has come."""


@dataclass(frozen=True, slots=True)
class DrainAsked:
    """Take no new requests; those here run to their end."""


Event: TypeAlias = (
    Ticket | SubmitReply | SubmitFailed | SequenceUpdates | CancelAsked | Beat | Flush | DrainAsked
)


@dataclass(frozen=True, slots=True)
class SendFrame:
    reply: str
    encoding: Encoding
    frame: Frame


@dataclass(frozen=True, slots=True)
class Submit:
    engine: str
    message: SubmitSequence


@dataclass(frozen=True, slots=True)
class Abort:
    engine: str
    message: AbortSequences


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The request was open here, and has ended."""

    request_id: str
    reply: str


Effect: TypeAlias = SendFrame | Submit | Abort | Cancelled


class AdmissionCore:
    """See the module. vocabularies: by served model.

    first_tag: where this run's tags begin, 0 to MAX_TAG. The scheduler may still speak of sequences
    of the run before under the same admission id, so the shell draws it.
    """

    def __init__(
        self,
        admission_id: str,
        vocabularies: Mapping[str, Vocabulary],
        max_open: int,
        first_tag: int = 0,
    ) -> None:
        self.admission_id = admission_id
        self.vocabularies = vocabularies
        self.max_open = max_open
        self.engines = EngineDirectory()
        self.requests: dict[str, OpenRequest] = {}
        self.draining = False
        self._by_tag: dict[int, OpenRequest] = {}
        self._next_tag = first_tag
        self._news: dict[str, OpenRequest] = {}
        self._aborts: dict[str, list[str]] = {}
        self._tombstones: OrderedDict[str, int] = OrderedDict()
        self._abort_when_acknowledged: dict[str, str] = {}
        self._tick_at_ns = 0
        self._effects: list[Effect] = []

    # ---- entry

    def handle(self, event: Event, now_ns: int) -> list[Effect]:
        match event:
            case SequenceUpdates():
                self._on_updates(event, now_ns)
            case Flush():
                self._show()
            case Ticket():
                self._on_ticket(event, now_ns)
            case SubmitReply():
                self._on_submit_reply(event, now_ns)
            case SubmitFailed():
                self._on_submit_failed(event, now_ns)
            case CancelAsked():
                self._on_cancel(event, now_ns)
            case Beat():
                self._on_beat(event, now_ns)
            case DrainAsked():
                self.draining = True
        return self._out()

    def tick(self, now_ns: int) -> list[Effect]:
        for request in list(self.requests.values()):
            if not request.submitted and now_ns >= request.submit_at_ns:
                self._submit_again(request, now_ns)
            elif now_ns >= _deadline_ns(request):
                self._fail(request, ErrorCode.DEADLINE_EXCEEDED, "deadline exceeded")
        self._forget_tombstones(now_ns)
        self._tick_at_ns = now_ns + TICK_NS
        return self._out()

    @property
    def wake_at_ns(self) -> int | None:
        return self._tick_at_ns if self.requests or self._tombstones else None

    @property
    def has_news(self) -> bool:
        return bool(self._news or self._aborts)

    # ---- requests come and go

    def _on_ticket(self, ticket: Ticket, now_ns: int) -> None:
        known = self.requests.get(ticket.request_id)
        if known is not None and ticket.retry:
            known.replay(ticket)
            self._news[ticket.request_id] = known
        elif known is not None:
            text = f"request_id {ticket.request_id} is in use by a running request"
            self._refuse(ticket, ErrorCode.DUPLICATE_REQUEST, text)
        elif self._tombstones.pop(ticket.request_id, None) is not None:
            frame = Frame(request_id=ticket.request_id, offset=0, finish_reason=FinishReason.ABORT)
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
        if engine is None:
            text = f"no worker serves {ticket.model} at this moment"
            self._refuse(ticket, ErrorCode.NO_WORKER, text)
            return
        request = OpenRequest(
            ticket=ticket,
            vocabulary=self.vocabularies[ticket.model],
            tag=self._take_tag(),
            arrival_ns=now_ns,
            engine_id=engine.engine_id,
            give_up_ns=now_ns + SUBMIT_GIVE_UP_NS,
        )
        self.requests[ticket.request_id] = request
        self._by_tag[request.tag] = request
        self._submit(request, now_ns)

    def _submit(self, request: OpenRequest, now_ns: int) -> None:
        request.submitted = False
        # The shell answers each submission with a reply or a failure; this is for one that it
        # loses.
        request.submit_at_ns = now_ns + SUBMIT_GIVE_UP_NS
        message = request.submission(self.admission_id, now_ns)
        self._effects.append(Submit(request.engine_id, message))

    def _submit_again(self, request: OpenRequest, now_ns: int) -> None:
        engine = self.engines.choose(request.ticket.model, now_ns)
        if engine is None and now_ns >= request.give_up_ns:
            text = f"no worker serves {request.ticket.model} any more"
            self._fail(request, ErrorCode.NO_WORKER, text)
            return
        if engine is not None and not self.engines.get(request.engine_id).is_ready(now_ns):
            request.engine_id = engine.engine_id
        self._submit(request, now_ns)

    def _on_submit_reply(self, reply: SubmitReply, now_ns: int) -> None:
        self._abort_orphan(reply.seq_id)
        request = self.requests.get(reply.seq_id)
        if request is None:
            return
        if reply.code is None:
            request.submitted = request.accepted = True
        elif reply.code is ErrorCode.NO_WORKER and request.accepted:
            # It was taken before: the engine is between two workers, and will take it back.
            request.submit_at_ns = now_ns + SUBMIT_RETRY_NS
        else:
            self._end(request, request.error_frame(reply.code, reply.message), abort=False)

    def _on_submit_failed(self, failed: SubmitFailed, now_ns: int) -> None:
        self._abort_orphan(failed.seq_id)
        request = self.requests.get(failed.seq_id)
        if request is not None:
            request.submitted = False
            request.submit_at_ns = now_ns + SUBMIT_RETRY_NS

    def _on_cancel(self, cancel: CancelAsked, now_ns: int) -> None:
        request = self.requests.get(cancel.request_id)
        if request is not None:
            self._end(request, request.abort_frame(), abort=True)
            self._effects.append(Cancelled(cancel.request_id, cancel.reply))
            return
        # It may overtake its request, which is then still being tokenised.
        self._tombstones[cancel.request_id] = now_ns + CANCEL_TOMBSTONE_SECONDS * 1_000_000_000
        if len(self._tombstones) > MAX_TOMBSTONES:
            self._tombstones.popitem(last=False)

    def _forget_tombstones(self, now_ns: int) -> None:
        while self._tombstones and next(iter(self._tombstones.values())) <= now_ns:
            self._tombstones.popitem(last=False)

    def fail_all(self, code: ErrorCode, message: str) -> list[Effect]:
        """The end of a drain that took too long: every open request gets its terminal frame."""
        for request in list(self.requests.values()):
            self._fail(request, code, message)
        return self._out()

    def _fail(self, request: OpenRequest, code: ErrorCode, message: str) -> None:
        self._end(request, request.error_frame(code, message), abort=True)

    def _end(self, request: OpenRequest, frame: Frame, *, abort: bool) -> None:
        """The terminal frame: the only place that ends a request that was opened."""
        del self.requests[request.request_id]
        del self._by_tag[request.tag]
        self._news.pop(request.request_id, None)
        self._effects.append(SendFrame(request.ticket.reply, request.ticket.encoding, frame))
        if abort and request.submitted:
            self._aborts.setdefault(request.engine_id, []).append(request.request_id)
        elif abort:
            # The submission is on its way and an abort might overtake it.
            self._abort_when_acknowledged[request.request_id] = request.engine_id

    def _abort_orphan(self, seq_id: str) -> None:
        engine_id = self._abort_when_acknowledged.pop(seq_id, None)
        if engine_id is not None and seq_id not in self.requests:
            self._aborts.setdefault(engine_id, []).append(seq_id)

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
            self._resubmit_all(engine, now_ns)
        self._take_updates(updates, now_ns)

    def _take_updates(self, updates: SequenceUpdates, now_ns: int) -> None:
        by_tag, news = self._by_tag, self._news
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
                if request.accept(offset, token_ids[at : at + count]):
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
            # An end whose last tokens were lost waits for them: the resubmission brings both again.
            if request is not None and len(request.token_ids) >= finished.num_output_tokens:
                request.finished = finished
                news[request.request_id] = request

    def _show(self) -> None:
        """A frame for every request with news; acknowledgements and aborts, batched."""
        news, self._news = self._news, {}
        for request in news.values():
            frame = request.frame()
            if frame is None:
                continue
            if frame.finish_reason is None:
                self._effects.append(
                    SendFrame(request.ticket.reply, request.ticket.encoding, frame)
                )
            else:
                self._end(request, frame, abort=True)

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
                self._resubmit_all(engine, now_ns)

    def _see_epoch(self, engine: Engine, epoch: tuple[int, int], now_ns: int) -> None:
        """A higher epoch: its scheduler may know nothing of what is open there, and its stream
        begins anew.
        """
        if epoch > engine.epoch:
            engine.epoch = epoch
            engine.updates.restart(0)
            self._resubmit_all(engine, now_ns)

    def _resubmit_all(self, engine: Engine, now_ns: int) -> None:
        for request in self.requests.values():
            if request.engine_id == engine.engine_id:
                request.give_up_ns = now_ns + SUBMIT_GIVE_UP_NS
                self._submit(request, now_ns)

    def _take_tag(self) -> int:
        self._next_tag = self._next_tag % MAX_TAG + 1
        while self._next_tag in self._by_tag:
            self._next_tag = self._next_tag % MAX_TAG + 1
        return self._next_tag

    def _out(self) -> list[Effect]:
        for engine, seq_ids in self._aborts.items():
            for start in range(0, len(seq_ids), MAX_LANES):
                part = seq_ids[start : start + MAX_LANES]
                message = AbortSequences(admission_id=self.admission_id, seq_ids=part)
                self._effects.append(Abort(engine, message))
        self._aborts = {}
        effects, self._effects = self._effects, []
        return effects

    # ---- what others may ask

    def beat(self) -> Beat:
        return Beat(
            kind=ServiceKind.ADMISSION,
            service_id=self.admission_id,
            admission=AdmissionLoad(models=list(self.vocabularies), num_open=len(self.requests)),
        )

    def check_invariants(self) -> None:
        assert len(self.requests) == len(self._by_tag) <= self.max_open
        assert self._news.keys() <= self.requests.keys()


def _deadline_ns(request: OpenRequest) -> int:
    deadline_ms = request.ticket.deadline_ms
    if not deadline_ms:
        return NEVER_NS
    return request.arrival_ns + deadline_ms * 1_000_000 + DEADLINE_GRACE_NS
