"""The scheduler's state machine: events in, effects out (`events.py`).

Invariants: one epoch is served, and nothing of another is believed; each sequence finishes once,
and stays in the log until its admission has said that it knows.

Pure: no clock, no bus; time is `now_ns`, monotonic.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from services.contracts.beats import Beat, EngineLoad, ServiceKind, StreamMark
from services.contracts.errors import ErrorCode
from services.contracts.kv import KvStatus, LeaseReply, LookupReply
from services.contracts.limits import MAX_PAYLOAD_BYTES
from services.contracts.public import FinishReason
from services.contracts.sequences import AbortReply, AbortSequences, SubmitReply, SubmitSequence
from services.contracts.step import Attached, Poll, PollReply, PollState, StepEvent, StepResult

from .ballots import Ballots
from .batch import Batch
from .events import (
    AbortAsked,
    DrainAsked,
    Effect,
    Event,
    Note,
    OfferAdoption,
    Reply,
    Submitted,
    WorkerSilent,
)
from .intake import EngineLimits, Refusal, refuse
from .lease import Pool
from .ledger_link import LedgerLink
from .ledger_talk import LedgerTalk
from .owners import BEAT_NS, Owners, next_part, offer
from .phases import PhaseLog
from .planning import Experience, Shape, Step
from .policies import Policies
from .policies.token_budget import default_budget
from .roster import Roster
from .sequence import NO_LANE, Sequence, SequenceStatus
from .step_memory import DOES_NOT_FIT
from .suspects import POISONED
from .times import NEVER_NS
from .totals import Totals
from .updates import UpdateLog
from .waiting import WaitingQueue
from .worker_link import WorkerLink


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of one scheduler; 0 for `max_model_len` means the worker's, 0 for
    `max_num_batched_tokens` what that needs.

    incarnation: an id that no other run of this scheduler has. max_join_bytes: of one plan.
    dp_group, dp_size: the data-parallel schedulers that vote on prefills, this one included.
    """

    engine: str
    scheduler_id: str
    incarnation: str
    model: str
    max_num_seqs: int
    max_num_batched_tokens: int
    max_waiting_seqs: int
    max_model_len: int = 0
    max_join_bytes: int = MAX_PAYLOAD_BYTES // 2
    prefix_caching: bool = True
    policies: Policies = field(default_factory=Policies)
    dp_group: str = ""
    dp_size: int = 1


class SchedulerCore:
    """See the module."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.link = WorkerLink(config.scheduler_id, config.incarnation)
        self.ledger_link = LedgerLink()
        self.roster = Roster()
        self.waiting = WaitingQueue()
        self.totals = Totals()
        self.experience = Experience()
        self.ballots = Ballots(config.engine, config.dp_group, config.dp_size)
        self.owners = Owners()
        self.phases = PhaseLog(config.engine, config.incarnation)
        self.draining = False
        self.max_model_len = 0
        self.updates = UpdateLog(config.engine)
        self._begin_empty()
        self._offer_at_ns = 0
        self._offered_uid = 0
        self._effects: list[Effect] = []
        self._now_ns = 0

    # ---- entry

    def handle(self, event: Event, now_ns: int) -> list[Effect]:
        """Take one event -> what is to be done. Raises InvariantError where this scheduler must
        stop.
        """
        self.batch.stir()
        self._now_ns = now_ns
        self.roster.see_time(now_ns)
        self.phases.now_ns = now_ns
        self._dispatch(event, now_ns)
        return self._settle(now_ns)

    def tick(self, now_ns: int) -> list[Effect]:
        """Time has passed: retries, give-ups, deadlines, and the next plan when it is due."""
        self.phases.now_ns = now_ns
        attach = self.link.attach(now_ns)
        if attach is not None:
            self._effects.append(attach)
        if self.link.is_ready:
            # The time itself may be what was waited for: a group's patience is over.
            self.batch.stir()
            self.ledger.give_up_late(now_ns)
            if now_ns >= self.batch.pipeline.poll_at_ns:
                self._poll(now_ns)
        for seq in self.roster.expired(now_ns):
            self._finish(seq, FinishReason.ERROR, ErrorCode.DEADLINE_EXCEEDED, "deadline exceeded")
        self.roster.forget_old(now_ns)
        return self._settle(now_ns)

    @property
    def wake_at_ns(self) -> int | None:
        """When `tick` is wanted, or None where only an event can change anything."""
        batch_ns = self.batch.wake_at_ns if self.link.is_ready else NEVER_NS
        earliest = min(self.roster.next_deadline_ns, self.link.wake_at_ns, batch_ns)
        return None if earliest >= NEVER_NS else earliest

    def _dispatch(self, event: Event, now_ns: int) -> None:
        match event:
            case StepResult():
                self._on_result(event, now_ns)
            case Submitted():
                self._on_submit(event.message, event.reply, now_ns)
            case AbortAsked():
                self._on_abort(event.message, event.reply, now_ns)
            case LookupReply() | LeaseReply():
                self._on_ledger(event)
            case Attached():
                self._on_attached(event, now_ns)
            case PollReply():
                self._on_poll(event, now_ns)
            case WorkerSilent():
                if self.link.on_silence(gone=event.gone, now_ns=now_ns):
                    self._lose_worker()
            case Beat():
                self._on_beat(event, now_ns)
            case DrainAsked():
                self.draining = True
                self.batch.close()

    def _settle(self, now_ns: int) -> list[Effect]:
        """After every event: plan if it is time, then say what changed, in the order of need."""
        if self.link.is_ready:
            if self.batch.lease.snapshot_due:
                self._effects.extend(self.ledger.snapshot_if_due(self._known()))
            if not self.draining:
                self._effects.extend(self.ledger.lookups(now_ns))
            self.batch.planner.votes = self.ballots.votes(now_ns)
            self._plan(now_ns)
            self._effects.extend(self.ledger.news(now_ns, ask=not self.draining))
        self._effects.extend(self.updates.flush(self.link.generation, self.link.epoch))
        self._effects.extend(self.phases.take())
        effects, self._effects = self._effects, []
        return effects

    def _plan(self, now_ns: int) -> None:
        batch, num_preempted = self.batch, self.batch.num_preempted
        plans = batch.plans_due(now_ns, self.updates)
        self._effects.extend(plans)
        if plans:
            self.phases.planned(list(batch.pipeline.steps)[-len(plans) :], batch.lanes)
        if batch.num_preempted != num_preempted:
            self.phases.preempted()
        self.phases.held(batch.planner.held, batch.lanes)

    # ---- sequences come and go

    def _on_submit(self, message: SubmitSequence, reply: str, now_ns: int) -> None:
        refusal, owned_elsewhere = None, False
        self.owners.touch(message.admission_id, now_ns)
        known = self.roster.find(message.seq_id)
        if known is None:
            refusal = self._refusal(message)
            if refusal is None:
                self._admit(message, now_ns)
        elif self._may_take(known, message.admission_id, now_ns):
            self._resend(known, message)
        else:
            owned_elsewhere = True
        answer = SubmitReply(
            seq_id=message.seq_id,
            epoch=self.link.epoch,
            code=refusal.code if refusal else None,
            message=refusal.message if refusal else "",
            owned_elsewhere=owned_elsewhere,
            is_same=known is not None and known.envelope == message.envelope,
        )
        self._effects.append(Reply(reply, answer))

    def _refusal(self, message: SubmitSequence) -> Refusal | None:
        if self.draining:
            return Refusal(ErrorCode.DRAINING, "the engine's scheduler is being stopped")
        if not self.link.is_ready:
            return Refusal(ErrorCode.NO_WORKER, "the engine has no worker at this moment")
        lease = self.batch.lease
        limits = EngineLimits(
            self.max_model_len, lease.block_size, lease.num_usable, self.config.max_waiting_seqs
        )
        return refuse(message, limits, len(self.waiting))

    def _admit(self, message: SubmitSequence, now_ns: int) -> None:
        seq = self.roster.admit(message, now_ns)
        self.phases.admitted(seq)
        self.totals.num_prompt_tokens += seq.num_prompt_tokens
        if self.config.policies.queue == "fair":
            present = {other.salt for other in self.roster.live() if other is not seq}
            if seq.salt not in present:
                self.experience.counters.arrive(seq.salt, present)
        self.updates.admission_index(seq.admission_id)
        self.waiting.add(seq)
        if seq.num_output_tokens:
            self._end_if_over(seq)

    def _end_if_over(self, seq: Sequence) -> None:
        """Its admission has all of it, but heard the end from a scheduler that was replaced."""
        if seq.is_stop(int(seq.token_ids[seq.num_tokens - 1])):
            self._finish(seq, FinishReason.STOP)
        elif seq.num_tokens >= seq.max_total_tokens:
            self._finish(seq, FinishReason.LENGTH)

    def _resend(self, seq: Sequence, message: SubmitSequence) -> None:
        """Submitted again: its admission has missed something, or another one takes it over."""
        if seq.admission_id != message.admission_id:
            self.updates.add_moved(seq)
        seq.admission_id, seq.tag = message.admission_id, message.tag
        seq.envelope = message.envelope
        index = self.updates.admission_index(seq.admission_id)
        lanes = self.batch.lanes
        if seq.lane != NO_LANE:
            lanes.admission[seq.lane] = index
            lanes.tag[seq.lane] = seq.tag
        output = lanes.known_token_ids(seq)[seq.num_prompt_tokens :]
        self.updates.resend(seq, len(message.accepted) // 4, output)
        ending = self.roster.ending(seq)
        if ending is not None:
            self.updates.add_finished(seq, *ending)

    def _may_take(self, seq: Sequence, admission_id: str, now_ns: int) -> bool:
        """Whether `seq` is that admission's, or nobody's."""
        owner = seq.admission_id
        return owner == admission_id or self.owners.is_absent(owner, now_ns)

    def _on_abort(self, message: AbortSequences, reply: str, now_ns: int) -> None:
        for seq_id in message.seq_ids:
            seq = self.roster.find(seq_id)
            if seq is None or not self._may_take(seq, message.admission_id, now_ns):
                continue
            self._drop(seq)
        self._effects.append(Reply(reply, AbortReply(epoch=self.link.epoch)))

    def _find_owners(self, now_ns: int) -> None:
        """Offer what absent admissions had to the others; what nobody took for long, drop."""
        if now_ns < self._offer_at_ns:
            return
        self._offer_at_ns = now_ns + BEAT_NS
        gone = self.owners.forget_silent(now_ns)
        absent = self.owners.absent(now_ns)
        if not (gone or absent):
            return
        orphans = []
        for seq in (*self.roster.live(), *self.roster.logged()):
            if seq.admission_id in gone:
                self._drop(seq)
            elif seq.admission_id in absent and seq.envelope:
                orphans.append(seq)
        for admission_id in gone:
            self.updates.forget(admission_id)
        part = next_part(orphans, self._offered_uid, self.config.max_join_bytes)
        if part:
            self._offered_uid = part[-1].uid
            self._effects.append(OfferAdoption(offer(self.config.engine, part, now_ns)))

    def _drop(self, seq: Sequence) -> None:
        """Nobody wants to know its end."""
        if seq.status is not SequenceStatus.FINISHED:
            self._finish(seq, FinishReason.ABORT)
        self.roster.forget(seq)

    def _finish(
        self,
        seq: Sequence,
        reason: FinishReason,
        code: ErrorCode | None = None,
        message: str = "",
    ) -> None:
        """End `seq` wherever it stands; its blocks go back when no step in flight names them."""
        if seq.lane != NO_LANE:
            self.batch.vacate(seq)
        elif seq.status is SequenceStatus.WAITING:
            self.ledger.drop_lookup(seq)
            self.waiting.remove(seq)
        if code is ErrorCode.NUMERICS:
            self.ledger.forget(seq)
        seq.move(SequenceStatus.FINISHED)
        self.experience.suspects.forget(seq)
        self.experience.counters.add(seq.salt, seq.num_output_tokens)
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            self.experience.outputs.observe(seq.num_output_tokens)
        self.phases.ended(seq, reason)
        self.roster.finish(seq, (reason, code, message))
        self.updates.add_finished(seq, reason, code, message)
        self.batch.return_blocks(seq)

    # ---- steps

    def _on_result(self, result: StepResult, now_ns: int) -> None:
        if not self.link.owns(result.generation, result.epoch):
            return
        self.link.hear(now_ns)
        pipeline = self.batch.pipeline
        if not pipeline.steps or result.step_id < pipeline.steps[0].step_id:
            return
        step = pipeline.steps[0]
        if result.step_id > step.step_id:
            # The result before it was lost: ask for it; this one comes again by the same way.
            self._poll(now_ns)
            return
        if result.out_of_memory:
            self._on_out_of_memory(step)
            return
        self.experience.memory.fitted()
        period_ns = now_ns - pipeline.last_result_ns
        self.phases.arrived(step)
        for seq, reason, code, message in self.batch.take_result(result, now_ns, self.updates):
            self._finish(seq, reason, code, message)
        self.batch.departed_blocks_back(step)
        self.totals.num_steps += 1
        self.totals.num_step_seqs += len(step.lanes)
        self.totals.num_output_tokens += len(result.token_ids) // 4
        self._effects.append(self._step_event(step, result, period_ns))

    def _on_out_of_memory(self, step: Step) -> None:
        """Nothing of `step` has run, and the worker runs nothing more of this epoch: smaller steps
        in the next one.
        """
        memory, seqs = self.experience.memory, self.batch.named_by(step)
        unfit = memory.did_not_fit(step.num_tokens, seqs)
        note: dict[str, int | float | str] = {
            "num_tokens": step.num_tokens,
            "num_seqs": len(seqs),
            "num_kv_tokens": step.num_kv_tokens,
            "ceiling": memory.ceiling,
        }
        self._effects.append(Note("out_of_memory", note))
        self._detach()
        if unfit is not None and unfit.status is not SequenceStatus.FINISHED:
            self._finish(unfit, FinishReason.ERROR, ErrorCode.OUT_OF_MEMORY, DOES_NOT_FIT)

    def _step_event(self, step: Step, result: StepResult, period_ns: int) -> StepEvent:
        """`plan_bytes` and `scheduler_us` are the shell's to fill in."""
        return StepEvent(
            engine=self.config.engine,
            epoch=self.link.epoch,
            step_id=step.step_id,
            num_seqs=len(step.lanes),
            num_decode_tokens=step.num_decodes,
            num_prefill_tokens=step.num_tokens - step.num_decodes,
            num_waiting=len(self.waiting),
            num_running=self.batch.lanes.num_active,
            num_preemptions=self._num_preemptions,
            num_blocks_held=self.batch.lease.num_held,
            num_blocks_total=self.batch.lease.num_usable,
            plan_bytes=0,
            scheduler_us=0,
            elapsed_us=result.elapsed_us,
            period_us=period_ns // 1000,
            scheduled=step.scheduled,
            queued=self.waiting.load.queued_requests(),
        )

    # ---- the ledger

    def _on_ledger(self, reply: LookupReply | LeaseReply) -> None:
        if reply.status is KvStatus.STALE:
            self._on_stale_ledger(reply.generation, reply.epoch)
        elif not self.link.owns(reply.generation, reply.epoch):
            return
        elif isinstance(reply, LookupReply):
            self.ledger.on_lookup(reply)
        else:
            self.ledger.on_lease(reply)

    def _bind(self, now_ns: int) -> None:
        """Go over to another ledger where the present one is gone."""
        if not self.link.is_ready:
            return
        chosen = self.ledger_link.choose(now_ns)
        if chosen != self.batch.lease.ledger:
            self.ledger.bind(chosen)
            binding = self.batch.lease.binding
            self._effects.append(Note("bound", {"ledger": chosen, "binding": binding}))

    def _on_stale_ledger(self, generation: int, epoch: int) -> None:
        """The ledger knows a higher epoch: of this generation, which another scheduler has then
        taken over (raises Superseded), or of one that is gone. Attach above it.
        """
        self.link.owns(generation, epoch)
        if self.link.is_ready and epoch > self.link.epoch:
            self.link.see_epoch(epoch)
            self._detach()

    # ---- the worker

    def _on_attached(self, attached: Attached, now_ns: int) -> None:
        """A new epoch, with empty lanes and an empty lease; everything known waits."""
        if not self.link.on_attached(attached):
            return
        self.link.hear(now_ns)
        config = self.config
        longest = attached.max_model_len
        self.max_model_len = min(config.max_model_len or longest, longest)
        pool = Pool(
            config.engine,
            attached.generation,
            attached.epoch,
            attached.num_blocks,
            attached.block_size,
            attached.host_blocks,
            attached.copy_block_us,
            self.ledger_link.attached(attached.ledger, now_ns),
        )
        lanes = min(config.max_num_seqs, attached.max_num_seqs)
        budget = config.max_num_batched_tokens or default_budget(self.max_model_len, lanes)
        shape = Shape(lanes, self.max_model_len, budget, config.max_join_bytes)
        self._begin(pool, shape)
        self.experience.forgotten.attached(attached.generation)
        # A new epoch numbers its updates anew; admissions resubmit what they have open there.
        self.updates = UpdateLog(config.engine)
        for seq in self.roster.live():
            self.updates.admission_index(seq.admission_id)
        self.batch.lease.snapshot_due = True
        self.phases.attached(attached.generation, attached.epoch)
        note: dict[str, int | float | str] = {
            "generation": attached.generation,
            "epoch": attached.epoch,
            "num_blocks": attached.num_blocks,
            "max_num_seqs": lanes,
            "max_model_len": self.max_model_len,
        }
        self._effects.append(Note("attached", note))
        for seq in self.experience.suspects.attached(attached.generation):
            self._effects.append(Note("poisoned", {"seq_id": seq.seq_id, "token": seq.died_from}))
            self._finish(seq, FinishReason.ERROR, ErrorCode.POISONED, POISONED)

    def _lose_worker(self) -> None:
        """It is gone without having said that it leaves: whoever it computed may be the reason."""
        self.experience.suspects.worker_lost(self.link.generation, self.batch.in_flight())
        self._detach()

    def _detach(self) -> None:
        """Everything that ran waits again: its KV belongs to an epoch or a worker that is gone."""
        gone = {"generation": self.link.generation, "epoch": self.link.epoch}
        self.link.detach()
        self.totals.num_preemptions = self._num_preemptions
        for seq in self._known():
            self._uproot(seq)
        self.phases.detached()
        self._begin_empty()
        self._effects.append(Note("detached", dict(gone)))

    def _uproot(self, seq: Sequence) -> None:
        if seq.lane != NO_LANE:
            self.batch.lanes.leave(seq.lane)
        seq.num_in_flight = 0
        seq.block_ids.clear()
        seq.num_committed_blocks = seq.num_computed_tokens = 0
        seq.looked_up = False
        self.waiting.end_lookup(seq)
        if seq.status in (SequenceStatus.RUNNING, SequenceStatus.DRAINING):
            seq.move(SequenceStatus.PREEMPTED)
        if seq.status is SequenceStatus.PREEMPTED:
            seq.move(SequenceStatus.WAITING)
            self.waiting.add(seq)

    def _begin_empty(self) -> None:
        """Stands in while there is no worker: one lane, no blocks to take."""
        self._begin(Pool(self.config.engine, 0, 0, 2, 1), Shape(1, 1, 1, 1))

    def _begin(self, pool: Pool, shape: Shape) -> None:
        config = self.config
        self.batch = Batch(pool, shape, self.waiting, config.policies, self.experience)
        self.ledger = LedgerTalk(
            self.batch, self.waiting, self.totals, self.phases,
            prefix_caching=config.prefix_caching,
        )  # fmt: skip

    def _poll(self, now_ns: int) -> None:
        pipeline = self.batch.pipeline
        if pipeline.steps:
            pipeline.polled(now_ns)
            step_id = pipeline.steps[0].step_id
            self._effects.append(Poll(self.link.generation, self.link.epoch, step_id))

    def _on_poll(self, reply: PollReply, now_ns: int) -> None:
        if not self.link.is_ready:
            return
        self.link.hear(now_ns)
        if reply.generation != self.link.generation:
            self.link.see_epoch(reply.epoch)
            self._lose_worker()
        elif self.link.owns(reply.generation, reply.epoch):
            if reply.state is PollState.RESULT and reply.result is not None:
                self._on_result(reply.result, now_ns)
            elif reply.state is PollState.UNKNOWN:
                self._effects.extend(self.batch.pipeline.plans_from(reply.step_id))

    def _on_beat(self, beat: Beat, now_ns: int) -> None:
        # Beats come also where nothing else does, so the log of an idle scheduler ages too.
        self.roster.forget_old(now_ns)
        self.owners.hear(beat, now_ns)
        self._find_owners(now_ns)
        self.ledger_link.hear(beat, now_ns)
        self._bind(now_ns)
        if beat.kind is ServiceKind.GPU_WORKER:
            self._on_worker_beat(beat, now_ns)
        elif beat.kind is ServiceKind.SCHEDULER:
            self.ballots.hear(beat, now_ns)
        elif beat.kind is ServiceKind.KV_STORE and self.link.is_ready:
            for pool in beat.pools:
                if pool.engine == self.config.engine:
                    self._on_stale_ledger(pool.generation, pool.epoch)
                    mine = beat.service_id == self.batch.lease.ledger
                    if mine and pool.need_snapshot and self.link.is_ready:
                        self.batch.lease.snapshot_due = True

    def _on_worker_beat(self, beat: Beat, now_ns: int) -> None:
        self.link.see_epoch(beat.epoch)
        self.link.on_beat(beat.generation, now_ns)
        if not self.link.is_ready:
            return
        # Raises Superseded where another scheduler has attached to this worker.
        owned = self.link.owns(beat.generation, beat.epoch)
        # The last beats of the worker before this one may come late.
        if beat.generation > self.link.generation:
            self._lose_worker()
        elif beat.leaving and owned:
            self._detach()

    # ---- what others may ask

    @property
    def is_drained(self) -> bool:
        """Nothing is planned any more, and nothing is in flight."""
        return self.draining and not (self.link.is_ready and self.batch.pipeline.steps)

    @property
    def _num_preemptions(self) -> int:
        return self.totals.num_preemptions + self.batch.num_preempted

    @property
    def _is_serving(self) -> bool:
        return self.link.is_ready and not self.draining and not self.link.is_suspect(self._now_ns)

    def beat(self) -> Beat:
        """This scheduler's heartbeat."""
        lease, totals = self.batch.lease, self.totals
        load = EngineLoad(
            model=self.config.model,
            # Without its ledger it carries on from its lease, while there is one.
            ready=self._is_serving and (lease.bound or bool(lease.spare)),
            max_model_len=self.max_model_len,
            num_running=self.batch.lanes.num_active,
            num_waiting=len(self.waiting),
            num_blocks_total=lease.num_usable if self.link.is_ready else 0,
            num_blocks_held=lease.num_held,
            num_preemptions=self._num_preemptions,
            num_steps=totals.num_steps,
            num_step_seqs=totals.num_step_seqs,
            num_prefix_queries=totals.num_prefix_queries,
            num_prefix_hits=totals.num_prefix_hits,
            num_prompt_tokens=totals.num_prompt_tokens,
            num_output_tokens=totals.num_output_tokens,
            dp_group=self.config.dp_group,
            wants_prefill=self.link.is_ready and self.batch.planner.wants_prefill,
            num_blocks_spare=len(lease.spare),
            ledger=lease.ledger,
            binding=lease.binding,
        )
        marks = [StreamMark(name, number) for name, number in self.updates.last_numbers()]
        if self.link.is_ready:
            marks.append(StreamMark(self.config.engine, lease.delta_number))
        return Beat(
            kind=ServiceKind.SCHEDULER,
            service_id=self.config.engine,
            generation=self.link.generation,
            epoch=self.link.epoch,
            streams=marks,
            engine=load,
        )

    def check_invariants(self) -> None:
        """DESIGN section 6, from the scheduler's side. Raises AssertionError."""
        self.batch.lanes.check_invariants(self.batch.lease.block_size)
        known = self._known()
        for seq in known:
            if seq.status is SequenceStatus.FINISHED and seq.num_in_flight == 0:
                assert not seq.block_ids, f"{seq.seq_id} is finished and still holds blocks"
            assert (seq.lane != NO_LANE) == (seq.status is SequenceStatus.RUNNING)
        self.batch.lease.check_invariants(known)
        self.phases.check_invariants(self.roster.live())

    def _known(self) -> list[Sequence]:
        """Every sequence that anything still names."""
        known = {seq.uid: seq for seq in (*self.roster.live(), *self.roster.logged())}
        for step in self.batch.pipeline.steps:
            # One may be acknowledged, and so forgotten, before its last step has ended.
            known.update((seq.uid, seq) for seq in step.departed.values())
        return list(known.values())
