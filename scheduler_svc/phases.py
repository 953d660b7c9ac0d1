"""Where the time of a traced sequence goes: phases that follow each other without a gap, from its
submission to its end, and within them what it waits for (the ledger, a block, its turn), its chunks
and its first token.

    queue ─▶ prefill ─▶ decode ─▶ end
                ▲  ▲      │ │
                │  └ preempted ◀┘        its blocks were needed
                └─── recover ◀────┘      its epoch ended: another worker, or another scheduler

Sequences whose trace is not sampled cost a lookup at each of these transitions, and nothing per
step; nor do those that decode in every step.

Pure: time is `now_ns`, monotonic, told at each event.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NamedTuple

from services.contracts.public import FinishReason
from services.contracts.spans import Attribute, TimedSpan, first_span_id
from services.contracts.trace_context import TraceContext, is_sampled, parse_traceparent

from .lanes import LaneTable
from .planning import Step
from .sequence import Sequence, SequenceStatus


class Phase(StrEnum):
    QUEUE = "queue"
    PREFILL = "prefill"
    DECODE = "decode"
    PREEMPTED = "preempted"
    RECOVER = "recover"


RUNNING: Final = frozenset({Phase.PREFILL, Phase.DECODE})


class _Chunk(NamedTuple):
    """A sequence's part in one step; is_last: a token was sampled after it."""

    uid: int
    num_tokens: int
    is_last: bool


@dataclass(slots=True)
class _Open:
    """The phase that a sequence is in. last_id: of its phases and their parts so far.

    asked_ns: when the ledger was asked for its prefix; held_ns: since when steps leave it out; None
    where that is not so now.
    """

    seq: Sequence
    place: TraceContext
    phase: Phase
    since_ns: int
    last_id: int
    span_id: str = ""
    asked_ns: int | None = None
    held_ns: int | None = None


class PhaseLog:
    """See the module. now_ns: of the event that is being handled. incarnation: of the scheduler."""

    def __init__(self, engine: str, incarnation: str) -> None:
        self.now_ns = 0
        self.generation = 0
        self.epoch = 0
        self._engine = engine
        self._incarnation = incarnation
        self._open: dict[int, _Open] = {}
        self._chunks: dict[int, list[_Chunk]] = {}
        self._held: dict[int, _Open] = {}
        self._prefilling: dict[int, _Open] = {}
        self._spans: list[TimedSpan] = []

    def take(self) -> list[TimedSpan]:
        """Spans closed since the last call."""
        spans, self._spans = self._spans, []
        return spans

    # ---- transitions

    def admitted(self, seq: Sequence) -> None:
        place = parse_traceparent(seq.traceparent) if is_sampled(seq.traceparent) else None
        if place is None:
            return
        first_id = first_span_id(place.trace_id, self._incarnation, seq.uid)
        opened = _Open(seq, place, Phase.QUEUE, self.now_ns, first_id)
        opened.span_id = self._next_id(opened)
        self._open[seq.uid] = opened

    def planned(self, steps: Iterable[Step], lanes: LaneTable) -> None:
        """`steps` were published just now."""
        for step in steps:
            if not self._open or not (step.chunks or self._prefilling):
                continue
            joined = {join.lane for join in step.joins}
            chunks = []
            for lane, count in self._chunks_of(step):
                seq = step.departed.get(lane) or lanes.occupant(lane)
                opened = self._open.get(seq.uid)
                if opened is None:
                    continue
                if lane in joined:
                    self._turn(opened, Phase.PREFILL)
                is_last = bool((step.sampled == lane).any())
                chunks.append(_Chunk(seq.uid, count, is_last))
                if is_last:
                    self._prefilling.pop(seq.uid, None)
            if chunks:
                self._chunks[step.step_id] = chunks

    def _chunks_of(self, step: Step) -> list[tuple[int, int]]:
        """(lane, tokens); also of those whose last chunk left one token, which is a decode then."""
        chunks = list(step.chunks)
        named = {lane for lane, _ in chunks}
        departed = {seq.uid: lane for lane, seq in step.departed.items()}
        for uid, opened in self._prefilling.items():
            lane = departed.get(uid, opened.seq.lane)
            if lane not in named and (step.sampled == lane).any():
                chunks.append((lane, 1))
        return chunks

    def asked(self, seq: Sequence) -> None:
        """The ledger, for the prefix of `seq`, which waits for the answer."""
        opened = self._open.get(seq.uid)
        if opened is not None:
            opened.asked_ns = self.now_ns

    def answered(self, seq: Sequence, num_hit_tokens: int | None) -> None:
        """That lookup is over. None: it was given up, for the ledger was silent or has to be told
        everything first, or `seq` has ended.
        """
        opened = self._open.get(seq.uid)
        if opened is not None and opened.asked_ns is not None:
            given_up = num_hit_tokens is None
            facts: dict[str, Attribute] = {"num_hit_tokens": num_hit_tokens or 0}
            self._add(opened, "kv lookup", opened.asked_ns, facts | {"given_up": int(given_up)})
            opened.asked_ns = None

    def held(self, held: list[int], lanes: LaneTable) -> None:
        """Lanes that the last step left out: for want of a block, of budget, or of their turn."""
        if not self._held and not (held and self._open):
            return
        seqs = [seq for lane in held if (seq := lanes.sequences[lane]) is not None]
        uids = {seq.uid for seq in seqs}
        for opened in [opened for uid, opened in self._held.items() if uid not in uids]:
            self._let_go(opened)
        for seq in seqs:
            opened_now = self._open.get(seq.uid)
            if opened_now is not None and opened_now.held_ns is None:
                opened_now.held_ns = self.now_ns
                self._held[seq.uid] = opened_now

    def arrived(self, step: Step) -> None:
        """The result of `step`; to be told before the sequences that it ends."""
        for chunk in self._chunks.pop(step.step_id, ()):
            opened = self._open.get(chunk.uid)
            if opened is None:
                continue
            facts: dict[str, Attribute] = {"step_id": step.step_id, "num_tokens": chunk.num_tokens}
            self._add(opened, "prefill chunk", step.started_ns, facts)
            if chunk.is_last and opened.phase is Phase.PREFILL:
                if opened.seq.num_output_tokens == 0:
                    self._add(opened, "first token", self.now_ns, {})
                self._turn(opened, Phase.DECODE)

    def preempted(self) -> None:
        """Somebody was, in the plans just made."""
        waits = (SequenceStatus.PREEMPTED, SequenceStatus.WAITING)
        for opened in self._open.values():
            if opened.phase in RUNNING and opened.seq.status in waits:
                self._turn(opened, Phase.PREEMPTED)

    def attached(self, generation: int, epoch: int) -> None:
        self.generation, self.epoch = generation, epoch

    def detached(self) -> None:
        """The epoch has ended: what ran waits again, and the steps in flight are void."""
        self._chunks.clear()
        for opened in self._open.values():
            self.answered(opened.seq, None)
            if opened.phase is not Phase.QUEUE:
                self._turn(opened, Phase.RECOVER)

    def ended(self, seq: Sequence, reason: FinishReason) -> None:
        opened = self._open.pop(seq.uid, None)
        if opened is not None:
            self._close(opened, {"finish_reason": reason.value})

    def check_invariants(self, live: Iterable[Sequence]) -> None:
        assert self._open.keys() <= {seq.uid for seq in live}, (
            "a phase of a sequence that has ended"
        )
        assert self._held.keys() | self._prefilling.keys() <= self._open.keys()
        assert all(opened.phase in RUNNING for opened in self._held.values())
        assert all(opened.phase is Phase.PREFILL for opened in self._prefilling.values())

    # ---- spans

    def _turn(self, opened: _Open, phase: Phase) -> None:
        if opened.phase is phase:
            return
        self._close(opened, {})
        opened.phase, opened.since_ns = phase, self.now_ns
        if phase is Phase.PREFILL:
            self._prefilling[opened.seq.uid] = opened
        opened.span_id = self._next_id(opened)

    def _let_go(self, opened: _Open) -> None:
        if opened.held_ns is not None:
            self._add(opened, "hold", opened.held_ns, {})
            opened.held_ns = None
            del self._held[opened.seq.uid]

    def _close(self, opened: _Open, facts: dict[str, Attribute]) -> None:
        self._let_go(opened)
        seq = opened.seq
        self._prefilling.pop(seq.uid, None)
        self._spans.append(
            TimedSpan(
                name=opened.phase.value,
                place=opened.place,
                start_ns=opened.since_ns,
                end_ns=self.now_ns,
                span_id=opened.span_id,
                parent_id=opened.place.span_id,
                request_id=seq.seq_id,
                attributes={
                    "engine": self._engine,
                    "generation": self.generation,
                    "epoch": self.epoch,
                    "num_prompt_tokens": seq.num_prompt_tokens,
                    "num_output_tokens": seq.num_output_tokens,
                    "num_cached_tokens": max(0, seq.num_cached_tokens),
                    "num_preemptions": seq.num_preemptions,
                    **facts,
                },
            )
        )

    def _add(self, opened: _Open, name: str, start_ns: int, facts: dict[str, Attribute]) -> None:
        """A span below the phase that is open."""
        self._spans.append(
            TimedSpan(
                name=name,
                place=opened.place,
                start_ns=start_ns,
                end_ns=self.now_ns,
                span_id=self._next_id(opened),
                parent_id=opened.span_id,
                request_id=opened.seq.seq_id,
                attributes=facts,
            )
        )

    def _next_id(self, opened: _Open) -> str:
        opened.last_id = (opened.last_id + 1) % 2**64 or 1
        return f"{opened.last_id:016x}"
