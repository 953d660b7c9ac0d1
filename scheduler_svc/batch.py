"""Who runs now, on what, and what is in flight: all that lives and dies with one epoch.

Invariants: at most two steps in flight; a lane's blocks go back only after every step in flight
that names them has ended; a running sequence is preempted only when the ledger has no block left,
or is silent for two steps, and nothing idle is pinned (DESIGN section 6); while a suspect runs
alone, steps go one by one, its own and the others' in turns.

Pure.
"""

from __future__ import annotations

from services.contracts.step import StepPlan, StepResult
from services.contracts.vectors import pack

from .lanes import LaneTable
from .lease import LEASE_MAX_SHARE, Lease, Pool, low_water_blocks, reserve_blocks
from .pipeline import Pipeline
from .planning import Experience, Planner, Shape, Step
from .policies import Policies
from .policies.queueing import next_in_line
from .reclaim import Reclaim
from .results import Ended, apply_result
from .sequence import NO_LANE, Sequence, SequenceStatus
from .suspects import InFlight
from .times import NEVER_NS
from .updates import UpdateLog
from .waiting import WaitingQueue

SILENT_STEPS = 2
# Steps between two looks at how fast blocks go.
RESERVE_EVERY = 64


class Batch:
    """See the module. `waiting` outlives the batch: what ran here waits there again."""

    def __init__(
        self,
        pool: Pool,
        shape: Shape,
        waiting: WaitingQueue,
        policies: Policies,
        experience: Experience,
    ) -> None:
        self.pool = pool
        self.waiting = waiting
        low_water = low_water_blocks(
            pool.num_blocks, pool.block_size, shape.max_num_batched_tokens, shape.max_num_seqs
        )
        self.lanes = LaneTable(shape.max_num_seqs, shape.max_model_len)
        self._low_water = low_water
        self.lease = Lease(pool, low_water)
        self.experience = experience
        self.planner = Planner(self.lanes, self.lease, waiting, shape, policies, experience)
        self.pipeline = Pipeline(experience.times)
        self.reclaim = Reclaim()
        self.num_preempted = 0
        self._leaving: list[int] = []
        self._reset = True
        self._stalled = False
        self._deferred: set[int] = set()
        self._tried_ns = -1
        self._alone_next = True
        self._closed = False

    # ---- time

    @property
    def wake_at_ns(self) -> int:
        """When a plan, a poll or a give-up is due, or NEVER_NS."""
        times = [self.pipeline.poll_at_ns]
        times.extend(opened.give_up_ns for opened in self.lease.lookups.values())
        if self.lease.open_lease is not None:
            times.append(self.lease.open_lease.give_up_ns)
        if not self._stalled:
            times.append(self._may_publish_at_ns())
        elif self._tried_ns < self.planner.group_due_ns():
            times.append(self.planner.group_due_ns())
        return min(times, default=NEVER_NS)

    def stir(self) -> None:
        """Something happened: a step that had nothing to run may have now."""
        self._stalled = False

    def close(self) -> None:
        """Plan nothing more; what is in flight is still to come."""
        self._closed = True

    def _may_publish_at_ns(self) -> int:
        # Two steps in flight would leave it open which of them a worker died of.
        waits = self._closed or (self.experience.suspects and self.pipeline.steps)
        return NEVER_NS if waits else self.pipeline.may_publish_at_ns

    # ---- sequences leave

    def vacate(self, seq: Sequence) -> None:
        """`seq` gives up its lane; steps in flight that name it are still to come."""
        lane = seq.lane
        self.pipeline.depart(seq, lane)
        self.lanes.leave(lane)
        self._leaving.append(lane)

    def preempt(self, seq: Sequence) -> None:
        self.vacate(seq)
        seq.move(SequenceStatus.PREEMPTED)
        seq.num_preemptions += 1
        self.num_preempted += 1
        self.return_blocks(seq)

    def return_blocks(self, seq: Sequence) -> None:
        """Once no step names `seq`: what it held goes back, and a preempted one waits anew."""
        if seq.num_in_flight or seq.lane != NO_LANE:
            return
        self._unpin(seq)
        self.reclaim.returned(seq)
        if seq.status is SequenceStatus.PREEMPTED:
            seq.move(SequenceStatus.WAITING)
            self.waiting.add(seq)
        elif seq.status is SequenceStatus.FINISHED:
            self._deferred.discard(seq.uid)

    # ---- steps

    def plans_due(self, now_ns: int, updates: UpdateLog) -> list[StepPlan]:
        """The plans to publish now: none, one, or two where nothing is in flight yet."""
        plans: list[StepPlan] = []
        self._tried_ns = now_ns
        if not self.lanes.num_active and not len(self.waiting):
            # What an idle scheduler hears are beats: filling a step that stays empty costs more.
            self.planner.rest()
            self._stalled = True
        while not self._stalled and now_ns >= self._may_publish_at_ns():
            self._vacate_full()
            step = self._fill(updates.index, now_ns)
            for seq in step.started:
                updates.add_started(seq)
            if len(step.lanes):
                plans.append(self._publish(step, now_ns))
            freed = self._relieve() or self._unpin_for_head()
            if not len(step.lanes) and not freed:
                # Nothing can run before something else happens; the plan would be empty.
                assert not step.joins and not step.append_lanes
                self._stalled = True
        return plans

    def _fill(self, admission_index: dict[str, int], now_ns: int) -> Step:
        """Suspects and the others take turns; where one side can compute nothing, the other may."""
        planner, suspects = self.planner, self.experience.suspects
        step_id = self.pipeline.next_step_id
        if not suspects:
            return planner.fill(step_id, admission_index, now_ns)
        turn_of_others = not self._alone_next
        self._alone_next = True
        if turn_of_others:
            step = planner.fill(step_id, admission_index, now_ns)
            if len(step.lanes):
                return step
        starved, shortage = False, 0
        for seq in suspects.alone:
            if self.waiting.is_passed_over(seq) or seq.num_in_flight:
                continue
            step = planner.fill_alone(step_id, seq, admission_index)
            if len(step.lanes):
                suspects.had_step(seq)
                self._alone_next = False
                return step
            starved, shortage = starved or planner.starved, shortage + self.lease.shortage
        step = planner.fill(step_id, admission_index, now_ns)
        planner.starved = planner.starved or starved
        self.lease.shortage += shortage
        return step

    def take_result(self, result: StepResult, now_ns: int, updates: UpdateLog) -> list[Ended]:
        """The oldest step's result -> sequences that it ends, which the caller finishes."""
        step = self.pipeline.finish(result.elapsed_us, result.waited_us, now_ns)
        self.lease.step_ended(step.step_id)
        if step.step_id % RESERVE_EVERY == 0:
            self._deepen_lease(step)
        ended = apply_result(step, result, self.lanes, self.lease, updates)
        for seq in self.experience.suspects.watched:
            self.experience.suspects.passed(seq, self._num_computed(seq))
        return ended

    def _deepen_lease(self, step: Step) -> None:
        """Short steps of many lanes take blocks fast: more spare ones then, of a large pool."""
        step_ns = self.experience.times.predict_ns(step.num_tokens, step.num_kv_tokens)
        reserve = reserve_blocks(self.lanes.num_active, step_ns, self.pool.block_size)
        most = (self.pool.num_blocks - 1) // LEASE_MAX_SHARE
        self.lease.low_water = max(self._low_water, min(reserve, most))

    def named_by(self, step: Step) -> list[Sequence]:
        """Those that `step`, which is under way, computes, in the order of its lanes."""
        return [step.departed.get(n) or self.lanes.occupant(n) for n in step.lanes.tolist()]

    def in_flight(self) -> list[InFlight]:
        """Who is named by a step under way, and which of its tokens they compute."""
        named: dict[int, InFlight] = {}
        for step in self.pipeline.steps:
            for seq, count in zip(self.named_by(step), step.counts.tolist(), strict=True):
                first = self._num_computed(seq)
                last = named[seq.uid].last if seq.uid in named else first
                named[seq.uid] = InFlight(seq, first, last + count)
        return list(named.values())

    def _num_computed(self, seq: Sequence) -> int:
        """Tokens of `seq` whose step's result has arrived."""
        if seq.lane == NO_LANE:
            return seq.num_computed_tokens
        return int(self.lanes.accepted_computed[seq.lane])

    def departed_blocks_back(self, step: Step) -> None:
        """After a step and the endings it brought: those that had left their lane may return."""
        for seq in step.departed.values():
            if seq.block_ids or seq.status is SequenceStatus.PREEMPTED:
                self.return_blocks(seq)

    def _vacate_full(self) -> None:
        """Lanes whose every token is planned leave now; their last result is still to come."""
        lanes = self.lanes
        for lane in (lanes.active & (lanes.tokens >= lanes.limit)).nonzero()[0].tolist():
            seq = lanes.occupant(lane)
            self.vacate(seq)
            seq.move(SequenceStatus.DRAINING)

    def _publish(self, step: Step, now_ns: int) -> StepPlan:
        copies_out, copies_in = self.lease.copies.publish(step.step_id)
        plan = StepPlan(
            generation=self.pool.generation,
            epoch=self.pool.epoch,
            number=step.step_id,
            step_id=step.step_id,
            decode=step.decode,
            reset=self._reset,
            leave=pack(self._leaving),
            join=step.joins,
            chunk_lanes=pack([lane for lane, _ in step.chunks]),
            chunk_tokens=pack([count for _, count in step.chunks]),
            hold=pack(step.held),
            append_lanes=pack(step.append_lanes),
            append_blocks=pack(step.append_blocks),
            copies_out=copies_out,
            copies_in=copies_in,
            ledger=self.lease.news_of_ledger(),
        )
        self._reset = False
        self._leaving = []
        self.pipeline.publish(step, plan, now_ns)
        return plan

    # ---- the ledger

    @property
    def recompute_block_us(self) -> int:
        """What one more block of tokens adds to a step, as far as steps have told; 0: not known."""
        size, times = self.pool.block_size, self.experience.times
        return (times.predict_ns(2 * size, 0) - times.predict_ns(size, 0)) // 1000

    def may_look_up(self, seq: Sequence) -> bool:
        """False while `seq` has had to give its blocks back and there is no room for all of it."""
        if seq.uid in self._deferred:
            needed = seq.num_blocks_for(seq.num_tokens, self.pool.block_size)
            if self.lanes.num_active and needed > self.lease.num_usable - self.lease.num_held:
                return False
            self._deferred.discard(seq.uid)
        return True

    def prepare_snapshot(self) -> None:
        """Give up what only the ledger's memory of this epoch would make good: blocks that wait for
        a copy which no plan carries.
        """
        self.lease.snapshot_due = True
        pending = self.lease.copies.pending_blocks
        for seq in self.waiting:
            if not pending.isdisjoint(seq.block_ids):
                self.lease.release(seq)
                seq.looked_up = False
        self.lease.copies.clear_pending()

    # ---- blocks are short

    def _relieve(self) -> bool:
        """A running sequence lacks a block and the ledger has none: unpin or preempt -> True."""
        if not self.planner.starved or self.reclaim.under_way:
            return False
        opened = self.lease.open_lease
        waited = 0 if opened is None else self.pipeline.next_step_id - opened.step_id
        if not self.lease.exhausted and waited < SILENT_STEPS:
            return False
        pinned = [seq for seq in self.waiting if seq.block_ids]
        if pinned:
            self._unpin(pinned[-1])
            return True
        seq = self.reclaim.choose(self.lanes.sequences)
        if seq is not None:
            self.preempt(seq)
        return seq is not None

    def _unpin_for_head(self) -> bool:
        """Nothing runs and the head does not fit: what those behind it pin must not stop it."""
        if self.lanes.num_active or self.pipeline.steps:
            return False
        queue, served = self.planner.policies.queue, self.experience.counters.served
        head = next(iter(next_in_line(queue, self.waiting.ready(), served)), None)
        if head is None or self.planner.has_room_for(head):
            return False
        pinned = [seq for seq in self.waiting if seq.block_ids and seq is not head]
        for seq in pinned:
            self._unpin(seq)
        return bool(pinned)

    def _unpin(self, seq: Sequence) -> None:
        """What it held goes back, and is looked up again when there is room: sooner, the pins would
        only take the blocks that were needed.
        """
        self.lease.release(seq)
        seq.looked_up = False
        self._deferred.add(seq.uid)
