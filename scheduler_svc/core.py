"""The scheduler's state machine: one entry, `handle(event, now_ns) -> effects`.

Invariants: at most one worker epoch is served, and nothing of another one is believed; a step's
result is read against the lane map of its plan; blocks go back only after every step in flight that
names them has ended; each sequence finishes once, and stays in the log until its admission has said
that it knows.

Pure: no clock, no bus; time is `now_ns`, monotonic.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from services.contracts.beats import Beat, EngineLoad, ServiceKind, StreamMark
from services.contracts.errors import ErrorCode, InvariantError
from services.contracts.kv import KvStatus, LeaseReply, LookupReply
from services.contracts.public import FinishReason
from services.contracts.sequences import (
    AbortReply,
    AbortSequences,
    SubmitReply,
    SubmitSequence,
)
from services.contracts.step import (
    Attach,
    Attached,
    Poll,
    PollReply,
    PollState,
    StepEvent,
    StepPlan,
    StepResult,
)
from services.contracts.vectors import pack, unpack

from .events import (
    AbortAsked,
    DrainAsked,
    Effect,
    Event,
    Note,
    Reply,
    Submitted,
    WorkerSilent,
)
from .lanes import LaneTable
from .lease import Lease, low_water_blocks
from .pipeline import NEVER_NS, Pipeline
from .planning import Planner, Step
from .policy import never_fits
from .reclaim import Reclaim
from .results import apply_result
from .roster import Roster
from .sequence import NO_LANE, Sequence, SequenceStatus
from .updates import UpdateLog
from .waiting import WaitingQueue

ATTACH_RETRY_NS: Final = 250_000_000
# Newcomers look their prefix up shortly before a lane can be theirs: earlier, their pins would only
# fill the pool.
LOOKUPS_AHEAD: Final = 4
SNAPSHOT_PART_BLOCKS: Final = 4096


class Superseded(InvariantError):
    """Another scheduler has attached with a higher epoch: this one must go."""


class EngineState(StrEnum):
    DETACHED = "detached"
    READY = "ready"


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of one scheduler; 0 for `max_model_len` means the worker's.

    incarnation: an id that no other run of this scheduler has.
    """

    engine: str
    scheduler_id: str
    incarnation: str
    model: str
    max_num_seqs: int
    max_num_batched_tokens: int
    max_waiting_seqs: int
    max_model_len: int = 0
    prefix_caching: bool = True


class SchedulerCore:
    """See the module. `wake_at_ns` is when `tick` is wanted next."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.state = EngineState.DETACHED
        self.generation = 0
        self.epoch = 0
        self.epoch_seen = 0
        self.roster = Roster()
        self.waiting = WaitingQueue()
        self.pipeline = Pipeline()
        self.reclaim = Reclaim()
        self.updates = UpdateLog(config.engine)
        self.lanes = LaneTable(1, 1)
        self.lease = self._no_lease()
        self.planner = Planner(self.lanes, self.lease, self.waiting, config.max_num_batched_tokens)
        self.max_model_len = 0
        self.draining = False
        self.num_preemptions = 0
        self.num_steps = 0
        self.num_step_seqs = 0
        self.num_prefix_queries = 0
        self.num_prefix_hits = 0
        self.num_prompt_tokens = 0
        self.num_output_tokens = 0
        self._leaving: list[int] = []
        self._attach_at_ns = 0
        self._attaching = False
        self._attempt = 1
        self._reset = False
        self._stalled = False
        self._effects: list[Effect] = []

    # ---- entry

    def handle(self, event: Event, now_ns: int) -> list[Effect]:
        """Take one event -> what is to be done about it. Raises InvariantError where this scheduler
        must stop.
        """
        self._stalled = False
        self._dispatch(event, now_ns)
        return self._settle(now_ns)

    def tick(self, now_ns: int) -> list[Effect]:
        """Time has passed: retries, give-ups, deadlines, and the next plan when it is due."""
        if self.state is EngineState.DETACHED:
            self._attach(now_ns)
        else:
            self._give_up_late(now_ns)
            if now_ns >= self.pipeline.poll_at_ns:
                self._poll(now_ns)
        for seq in self.roster.expired(now_ns):
            self._finish(seq, FinishReason.ERROR, ErrorCode.DEADLINE_EXCEEDED, "deadline exceeded")
        self.roster.forget_old(now_ns)
        return self._settle(now_ns)

    @property
    def wake_at_ns(self) -> int | None:
        """When `tick` is wanted, or None where only an event can change anything."""
        times = [self.roster.next_deadline_ns]
        if self.state is EngineState.DETACHED:
            times.append(NEVER_NS if self._attaching else self._attach_at_ns)
        else:
            times.append(self.pipeline.poll_at_ns)
            times.extend(opened.give_up_ns for opened in self.lease.lookups.values())
            if self.lease.open_lease is not None:
                times.append(self.lease.open_lease.give_up_ns)
            if not self._stalled:
                times.append(self.pipeline.may_publish_at_ns())
        earliest = min(times)
        return None if earliest >= NEVER_NS else earliest

    def _dispatch(self, event: Event, now_ns: int) -> None:
        match event:
            case StepResult():
                self._on_result(event, now_ns)
            case Submitted():
                self._on_submit(event.message, event.reply, now_ns)
            case AbortAsked():
                self._on_abort(event.message, event.reply)
            case LookupReply():
                self._on_lookup(event)
            case LeaseReply():
                self._on_lease(event)
            case Attached():
                self._on_attached(event, now_ns)
            case PollReply():
                self._on_poll(event, now_ns)
            case WorkerSilent():
                self._on_silence(event, now_ns)
            case Beat():
                self._on_beat(event)
            case DrainAsked():
                self.draining = True

    def _settle(self, now_ns: int) -> list[Effect]:
        """After every event: plan if it is time, then say what changed, in the order in which peers
        need it.
        """
        if self.state is EngineState.READY:
            self._ask_lookups(now_ns)
            self._plan_when_due(now_ns)
            self.lease.shed()
            delta = self.lease.flush()
            if delta is not None:
                self._effects.append(delta)
            ask = self.lease.ask_lease(now_ns, self.pipeline.next_step_id)
            if ask is not None:
                self._effects.append(ask)
        self._effects.extend(self.updates.flush(self.generation, self.epoch))
        effects, self._effects = self._effects, []
        return effects

    # ---- sequences come and go

    def _on_submit(self, message: SubmitSequence, reply: str, now_ns: int) -> None:
        known = self.roster.find(message.seq_id)
        if known is not None:
            self._resend(known, message)
            self._effects.append(Reply(reply, SubmitReply(seq_id=message.seq_id, epoch=self.epoch)))
            return
        code, text = self._refusal(message)
        if code is None:
            seq = self.roster.admit(message, now_ns)
            self.num_prompt_tokens += seq.num_prompt_tokens
            self.updates.admission_index(seq.admission_id)
            self.waiting.add(seq)
        self._effects.append(
            Reply(
                reply,
                SubmitReply(seq_id=message.seq_id, epoch=self.epoch, code=code, message=text),
            )
        )

    def _refusal(self, message: SubmitSequence) -> tuple[ErrorCode | None, str]:
        """Why the sequence cannot be taken, or (None, "")."""
        if self.state is EngineState.DETACHED:
            return ErrorCode.NO_WORKER, "the engine has no worker at this moment"
        if self.draining:
            return ErrorCode.DRAINING, "the engine is being stopped"
        num_prompt, num_accepted = len(message.prompt) // 4, len(message.accepted) // 4
        total = num_prompt + message.max_tokens
        if num_prompt == 0 or num_accepted >= message.max_tokens:
            return ErrorCode.INVALID_REQUEST, "nothing to compute"
        if total > self.max_model_len:
            return (
                ErrorCode.CONTEXT_LENGTH_EXCEEDED,
                f"prompt ({num_prompt}) + max_tokens ({message.max_tokens}) = {total} tokens; "
                f"the engine's max_model_len is {self.max_model_len}",
            )
        if never_fits(total, self.lease.block_size, self.lease.num_usable):
            return (
                ErrorCode.NEVER_FITS,
                f"prompt ({num_prompt}) + max_tokens ({message.max_tokens}) need more KV blocks than the whole pool "
                f"has ({self.lease.num_usable} blocks of {self.lease.block_size} tokens)",
            )
        if len(self.waiting) >= self.config.max_waiting_seqs:
            return (
                ErrorCode.QUEUE_FULL,
                f"{len(self.waiting)} sequences wait already (max_waiting_seqs)",
            )
        return None, ""

    def _resend(self, seq: Sequence, message: SubmitSequence) -> None:
        """A known sequence, submitted again: its admission has missed something, or is a new one."""
        seq.admission_id, seq.tag = message.admission_id, message.tag
        index = self.updates.admission_index(seq.admission_id)
        if seq.lane != NO_LANE:
            self.lanes.admission[seq.lane] = index
            self.lanes.tag[seq.lane] = seq.tag
        offset = len(message.accepted) // 4
        output = self.lanes.known_token_ids(seq)[seq.num_prompt_tokens :]
        self.updates.resend(seq, offset, output)
        ending = self.roster.ending(seq)
        if ending is not None:
            self.updates.add_finished(seq, *ending)

    def _on_abort(self, message: AbortSequences, reply: str) -> None:
        for seq_id in message.seq_ids:
            seq = self.roster.find(seq_id)
            if seq is None:
                continue
            if seq.status is not SequenceStatus.FINISHED:
                self._finish(seq, FinishReason.ABORT)
            self.roster.forget(seq)
        self._effects.append(Reply(reply, AbortReply(epoch=self.epoch)))

    def _finish(
        self,
        seq: Sequence,
        reason: FinishReason,
        code: ErrorCode | None = None,
        message: str = "",
    ) -> None:
        """End `seq`, wherever it stands; its blocks go back when no step in flight names them."""
        if seq.lane != NO_LANE:
            self._vacate(seq)
        elif seq.status is SequenceStatus.WAITING:
            self._drop_lookup(seq)
            self.waiting.remove(seq)
        seq.move(SequenceStatus.FINISHED)
        self.roster.finish(seq, (reason, code, message))
        self.updates.add_finished(seq, reason, code, message)
        if seq.num_in_flight == 0:
            self._blocks_back(seq)

    def _vacate(self, seq: Sequence) -> None:
        lane = seq.lane
        self.pipeline.depart(seq, lane)
        self.lanes.leave(lane)
        self._leaving.append(lane)

    def _preempt(self, seq: Sequence) -> None:
        self._vacate(seq)
        seq.move(SequenceStatus.PREEMPTED)
        seq.num_preemptions += 1
        self.num_preemptions += 1
        if seq.num_in_flight == 0:
            self._blocks_back(seq)

    def _blocks_back(self, seq: Sequence) -> None:
        """No step names `seq` any more: what it held returns, and a preempted one waits anew."""
        assert seq.lane == NO_LANE and seq.num_in_flight == 0
        self.lease.release(seq)
        self.reclaim.returned(seq)
        seq.num_computed_tokens = 0
        seq.looked_up = False
        if seq.status is SequenceStatus.PREEMPTED:
            seq.move(SequenceStatus.WAITING)
            self.waiting.add(seq)

    # ---- steps

    def _plan_when_due(self, now_ns: int) -> None:
        while not self._stalled and now_ns >= self.pipeline.may_publish_at_ns():
            self._vacate_full()
            step = self.planner.fill(self.pipeline.next_step_id, self.updates.index)
            if len(step.lanes):
                self._publish(step, now_ns)
            freed = self._reclaim_blocks() or self._unpin_for_head()
            if not len(step.lanes) and not freed:
                # Nothing can run before something else happens; the plan would be empty.
                assert not step.joins and not step.appended
                self._stalled = True

    def _vacate_full(self) -> None:
        """Lanes whose every token is planned leave now; their last result is still to come."""
        lanes = self.lanes
        for lane in (lanes.active & (lanes.tokens >= lanes.limit)).nonzero()[0].tolist():
            seq = lanes.occupant(lane)
            self._vacate(seq)
            seq.move(SequenceStatus.DRAINING)

    def _publish(self, step: Step, now_ns: int) -> None:
        plan = StepPlan(
            generation=self.generation,
            epoch=self.epoch,
            number=step.step_id,
            step_id=step.step_id,
            reset=self._reset,
            leave=pack(self._leaving),
            join=step.joins,
            chunk_lanes=pack([lane for lane, _ in step.chunks]),
            chunk_tokens=pack([count for _, count in step.chunks]),
            hold=pack(step.held),
            append_lanes=pack([lane for lane, _ in step.appended]),
            append_blocks=pack([block for _, block in step.appended]),
        )
        self._reset = False
        self._leaving = []
        for seq in step.started:
            self.updates.add_started(seq)
        self.pipeline.publish(step, plan, now_ns)
        self._effects.append(plan)

    def _on_result(self, result: StepResult, now_ns: int) -> None:
        if not self._is_ours(result.generation, result.epoch):
            return
        steps = self.pipeline.steps
        if not steps or result.step_id < steps[0].step_id:
            return
        if result.step_id > steps[0].step_id:
            # The result before it was lost: ask for it; this one comes again by the same way.
            self._poll(now_ns)
            return
        period_ns = now_ns - self.pipeline.last_result_ns
        step = self.pipeline.finish(result.elapsed_us, result.waited_us, now_ns)
        for seq, reason, code, message in apply_result(
            step, result, self.lanes, self.lease, self.updates
        ):
            self._finish(seq, reason, code, message)
        for seq in step.departed.values():
            holds = seq.block_ids or seq.status is SequenceStatus.PREEMPTED
            if seq.num_in_flight == 0 and holds:
                self._blocks_back(seq)
        self.num_steps += 1
        self.num_step_seqs += len(step.lanes)
        self.num_output_tokens += len(result.token_ids) // 4
        self._effects.append(self._step_event(step, result, period_ns))

    def _step_event(self, step: Step, result: StepResult, period_ns: int) -> StepEvent:
        return StepEvent(
            engine=self.config.engine,
            epoch=self.epoch,
            step_id=step.step_id,
            num_seqs=len(step.lanes),
            num_decode_tokens=step.num_decodes,
            num_prefill_tokens=step.num_tokens - step.num_decodes,
            num_waiting=len(self.waiting),
            num_running=self.lanes.num_active,
            num_preemptions=self.num_preemptions,
            num_blocks_held=self.lease.num_held,
            num_blocks_total=self.lease.num_usable,
            plan_bytes=0,
            scheduler_us=0,
            elapsed_us=result.elapsed_us,
            period_us=period_ns // 1000,
        )

    # ---- blocks

    def _reclaim_blocks(self) -> bool:
        """A running sequence lacks a block and the ledger has none: drop an idle pin, else preempt
        -> True if done.

        A ledger that is silent for two steps counts as one that has none (DESIGN section 6).
        """
        opened = self.lease.open_lease
        silent = opened is not None and self.pipeline.next_step_id - opened.step_id >= 2
        if not self.planner.starved or self.reclaim.under_way:
            return False
        if not (self.lease.exhausted or silent):
            return False
        pinned = [seq for seq in self.waiting if seq.block_ids]
        if pinned:
            self._unpin(pinned[-1])
            return True
        seq = self.reclaim.choose(self.lanes)
        if seq is None:
            return False
        self.reclaim.begin(seq)
        self._preempt(seq)
        return True

    def _unpin_for_head(self) -> bool:
        """Nothing runs and the next sequence does not fit: what those behind it have pinned must
        not stop it.
        """
        if self.lanes.num_active or self.pipeline.steps:
            return False
        pinned = [seq for seq in list(self.waiting)[1:] if seq.block_ids]
        for seq in pinned:
            self._unpin(seq)
        return bool(pinned)

    def _unpin(self, seq: Sequence) -> None:
        self.lease.release(seq)
        seq.num_computed_tokens = 0

    def _ask_lookups(self, now_ns: int) -> None:
        if not (self.config.prefix_caching and self.lease.bound):
            return
        for seq in self.waiting.head(self.lanes.num_free + LOOKUPS_AHEAD):
            if seq.block_ids or seq.looked_up or not seq.reads_cache:
                continue
            seq.looked_up = True
            ask = self.lease.ask_lookup(seq, seq.token_ids[: seq.num_tokens], now_ns)
            if ask is not None:
                self.waiting.begin_lookup(seq)
                self._effects.append(ask)
                self.num_prefix_queries += len(ask.token_ids) // 4

    def _on_lookup(self, reply: LookupReply) -> None:
        if not self._is_ours(
            reply.generation, reply.epoch, known=reply.status is not KvStatus.STALE
        ):
            return
        hits = unpack(reply.block_ids)
        seq = self.lease.close_lookup(reply.number, hits)
        if seq is None:
            return
        self.waiting.end_lookup(seq)
        self.num_prefix_hits += len(hits) * self.lease.block_size

    def _drop_lookup(self, seq: Sequence) -> None:
        for number, opened in list(self.lease.lookups.items()):
            if opened.seq is seq:
                self.lease.give_up_lookup(number)
                self.waiting.end_lookup(seq)

    def _on_lease(self, reply: LeaseReply) -> None:
        if reply.status is KvStatus.STALE:
            self._on_stale_ledger(reply.epoch)
        elif self._is_ours(reply.generation, reply.epoch):
            if self.lease.on_lease(reply) and reply.status is KvStatus.NEED_SNAPSHOT:
                self._send_snapshot()

    def _on_stale_ledger(self, epoch: int) -> None:
        """The ledger knows a higher epoch: somebody else has, or had, this engine. Attach above it."""
        if epoch > self.epoch:
            self.epoch_seen = max(self.epoch_seen, epoch)
            self._detach()

    def _send_snapshot(self) -> None:
        for number in list(self.lease.lookups):
            self.waiting.end_lookup(self.lease.give_up_lookup(number))
        holders = [(seq, self.lanes.known_token_ids(seq)) for seq in self._holders()]
        self._effects.extend(self.lease.snapshot(holders, SNAPSHOT_PART_BLOCKS))

    def _give_up_late(self, now_ns: int) -> None:
        for number, opened in list(self.lease.lookups.items()):
            if now_ns >= opened.give_up_ns:
                self.waiting.end_lookup(self.lease.give_up_lookup(number))
                self._stalled = False
        opened_lease = self.lease.open_lease
        if opened_lease is not None and now_ns >= opened_lease.give_up_ns:
            self.lease.give_up_lease()
            self._stalled = False

    # ---- worker and epochs

    def _is_ours(self, generation: int, epoch: int, *, known: bool = True) -> bool:
        """True for a message of the attached generation and epoch. Raises Superseded on a higher
        epoch of it.
        """
        if self.state is EngineState.DETACHED or not known:
            return False
        if generation == self.generation and epoch > self.epoch:
            raise Superseded(f"epoch {epoch} has taken over from {self.epoch}")
        return generation == self.generation and epoch == self.epoch

    def _attach(self, now_ns: int) -> None:
        # One at a time: a second attach would raise the epoch over the first one's answer.
        if now_ns >= self._attach_at_ns and not self._attaching:
            self._attaching = True
            seen = max(self.epoch, self.epoch_seen)
            self._effects.append(
                Attach(
                    scheduler_id=self.config.scheduler_id,
                    attempt=self._attempt_id,
                    epoch_seen=seen,
                )
            )

    @property
    def _attempt_id(self) -> str:
        return f"{self.config.incarnation}-{self._attempt}"

    def _detach(self) -> None:
        """Everything that ran waits again: its KV belongs to an epoch or a worker that is gone."""
        self._attempt += 1
        self.pipeline.void()
        for seq in self.roster.live():
            if seq.lane != NO_LANE:
                self.lanes.leave(seq.lane)
            if seq.status in (SequenceStatus.RUNNING, SequenceStatus.DRAINING):
                seq.move(SequenceStatus.PREEMPTED)
            seq.num_in_flight = 0
            seq.block_ids.clear()
            seq.num_committed_blocks = seq.num_computed_tokens = 0
            seq.looked_up = False
            self.waiting.end_lookup(seq)
            if seq.status is SequenceStatus.PREEMPTED:
                seq.move(SequenceStatus.WAITING)
                self.waiting.add(seq)
        for seq in self.roster.logged():
            seq.block_ids.clear()
            seq.num_in_flight = 0
        self._leaving = []
        self.lease = self._no_lease()
        self.reclaim = Reclaim()
        self.state = EngineState.DETACHED
        self._attach_at_ns = 0
        self._effects.append(Note("detached", {"generation": self.generation, "epoch": self.epoch}))

    def _on_attached(self, attached: Attached, now_ns: int) -> None:
        self._attaching = False
        if self.state is EngineState.READY or attached.attempt != self._attempt_id:
            return
        self.generation, self.epoch = attached.generation, attached.epoch
        self.state = EngineState.READY
        self._reset = True
        self.pipeline = Pipeline()
        self.max_model_len = min(
            self.config.max_model_len or attached.max_model_len, attached.max_model_len
        )
        max_num_seqs = min(self.config.max_num_seqs, attached.max_num_seqs)
        self.lanes = LaneTable(max_num_seqs, self.max_model_len)
        self.lease = self._new_lease(attached, max_num_seqs)
        self.planner = Planner(
            self.lanes, self.lease, self.waiting, self.config.max_num_batched_tokens
        )
        # A new epoch numbers its updates anew: admissions resubmit what they have open when they
        # see it.
        self.updates = UpdateLog(self.config.engine)
        for seq in self.roster.live():
            self.updates.admission_index(seq.admission_id)
        self._send_snapshot()
        self._effects.append(
            Note(
                "attached",
                {
                    "generation": attached.generation,
                    "epoch": attached.epoch,
                    "num_blocks": attached.num_blocks,
                    "block_size": attached.block_size,
                    "max_num_seqs": max_num_seqs,
                    "max_model_len": self.max_model_len,
                },
            )
        )

    def _new_lease(self, attached: Attached, max_num_seqs: int) -> Lease:
        low_water = low_water_blocks(
            attached.num_blocks,
            attached.block_size,
            self.config.max_num_batched_tokens,
            max_num_seqs,
        )
        return Lease(
            self.config.engine,
            attached.generation,
            attached.epoch,
            num_blocks=attached.num_blocks,
            block_size=attached.block_size,
            low_water=low_water,
        )

    def _no_lease(self) -> Lease:
        return Lease(self.config.engine, 0, 0, num_blocks=2, block_size=1, low_water=1)

    def _poll(self, now_ns: int) -> None:
        if self.pipeline.steps:
            self.pipeline.polled(now_ns)
            self._effects.append(
                Poll(
                    generation=self.generation,
                    epoch=self.epoch,
                    step_id=self.pipeline.steps[0].step_id,
                )
            )

    def _on_poll(self, reply: PollReply, now_ns: int) -> None:
        if self.state is EngineState.DETACHED:
            return
        if reply.generation != self.generation:
            self.epoch_seen = max(self.epoch_seen, reply.epoch)
            self._detach()
        elif self._is_ours(reply.generation, reply.epoch):
            if reply.state is PollState.RESULT and reply.result is not None:
                self._on_result(reply.result, now_ns)
            elif reply.state is PollState.UNKNOWN:
                self._effects.extend(self.pipeline.plans_from(reply.step_id))

    def _on_silence(self, silence: WorkerSilent, now_ns: int) -> None:
        if self.state is EngineState.DETACHED:
            self._attaching = False
            self._attach_at_ns = now_ns + ATTACH_RETRY_NS
        elif silence.gone:
            self._detach()

    def _on_beat(self, beat: Beat) -> None:
        if beat.kind is ServiceKind.GPU_WORKER:
            self.epoch_seen = max(self.epoch_seen, beat.epoch)
            if self.state is EngineState.READY and beat.generation != self.generation:
                self._detach()
        elif beat.kind is ServiceKind.KV_STORE and self.state is EngineState.READY:
            for pool in beat.pools:
                if pool.engine == self.config.engine:
                    if pool.epoch > self.epoch:
                        self._on_stale_ledger(pool.epoch)
                    elif pool.need_snapshot:
                        self._send_snapshot()

    # ---- what others may ask

    def beat(self) -> Beat:
        """This scheduler's heartbeat."""
        lease = self.lease
        load = EngineLoad(
            model=self.config.model,
            ready=self.state is EngineState.READY and lease.bound,
            max_model_len=self.max_model_len,
            num_running=self.lanes.num_active,
            num_waiting=len(self.waiting),
            num_blocks_total=lease.num_usable if self.state is EngineState.READY else 0,
            num_blocks_held=lease.num_held,
            num_preemptions=self.num_preemptions,
            num_steps=self.num_steps,
            num_step_seqs=self.num_step_seqs,
            num_prefix_queries=self.num_prefix_queries,
            num_prefix_hits=self.num_prefix_hits,
            num_prompt_tokens=self.num_prompt_tokens,
            num_output_tokens=self.num_output_tokens,
        )
        marks = [StreamMark(name, number) for name, number in self.updates.last_numbers()]
        if self.state is EngineState.READY:
            marks.append(StreamMark(self.config.engine, lease.delta_number))
        return Beat(
            kind=ServiceKind.SCHEDULER,
            service_id=self.config.engine,
            generation=self.generation,
            epoch=self.epoch,
            streams=marks,
            engine=load,
        )

    def check_invariants(self) -> None:
        """DESIGN section 6, from the scheduler's side. Raises AssertionError."""
        self.lanes.check_invariants(self.lease.block_size)
        for seq in self._known():
            if seq.status is SequenceStatus.FINISHED and seq.num_in_flight == 0:
                assert not seq.block_ids, f"{seq.seq_id} is finished and still holds blocks"
            assert (seq.lane != NO_LANE) == (seq.status is SequenceStatus.RUNNING)
        self.lease.check_invariants(self._holders())

    def _known(self) -> list[Sequence]:
        """Every sequence that anything still names."""
        known = {seq.uid: seq for seq in (*self.roster.live(), *self.roster.logged())}
        for step in self.pipeline.steps:
            # A finished one may be acknowledged, and so forgotten, before its last step has ended.
            known.update((seq.uid, seq) for seq in step.departed.values())
        return list(known.values())

    def _holders(self) -> list[Sequence]:
        return [seq for seq in self._known() if seq.block_ids]
