"""One step's plan: who advances by how much (DESIGN section 5).

The batch is rebuilt at every step (iteration-level, in-flight or continuous batching); long prompts
are cut to the token budget (chunked prefill), and their chunks ride along with the decodes
(piggybacked). Order: one token for each decoding lane; chunks of sequences that are still catching
up, oldest first; new sequences while lanes, the token budget and the KV margin allow. A lane
without its block is held, never waited for. What may differ is asked of `policies/`.

Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from services.contracts.step import LaneJoin, ScheduledRequests
from services.contracts.trace_context import is_sampled
from services.contracts.vectors import Int32Array

from .forgotten import Forgotten
from .lanes import NO_LANES, LaneIndices, LaneTable
from .lease import Lease
from .load import scheduled_requests
from .policies import Policies
from .policies.batching import Door, group_due_ns, may_join
from .policies.fit import watermark_blocks
from .policies.margin import OutputLengths
from .policies.queueing import TokenCounters, may_pass, next_in_line
from .policies.step_kind import DECODE, MIXED, PREFILL, Ballot, Kind, choose_kind, wants_prefill
from .policies.token_budget import adaptive_budget, step_target_ms
from .sequence import NO_LANE, Sequence, SequenceStatus
from .step_memory import StepMemory
from .step_time import StepTimeModel
from .suspects import Suspects
from .times import NEVER_NS
from .waiting import WaitingQueue


class Shape(NamedTuple):
    """Of one epoch: lanes, tokens of a sequence, tokens of a step, bytes of a plan's joins."""

    max_num_seqs: int
    max_model_len: int
    max_num_batched_tokens: int
    max_join_bytes: int


@dataclass(slots=True)
class Experience:
    """What is learned, whatever epoch it was: output lengths, step times, tokens by tenant, who was
    there when a worker died, what may be broken in the cache, and what its memory holds.
    """

    outputs: OutputLengths = field(default_factory=OutputLengths)
    times: StepTimeModel = field(default_factory=StepTimeModel)
    counters: TokenCounters = field(default_factory=TokenCounters)
    suspects: Suspects = field(default_factory=Suspects)
    forgotten: Forgotten = field(default_factory=Forgotten)
    memory: StepMemory = field(default_factory=StepMemory)


@dataclass(slots=True)
class Step:
    """What one step does, and the lane map that its result is read against.

    lanes, counts: that compute, and num_scheduled_tokens of each, int32; sampled: those that end
    with a token.
    append_lanes, append_blocks: pairs, in order.
    started: sequences that run for the first time.
    decode: whether lanes that it does not name advance. num_kv_tokens: that it reads, in all lanes.
    scheduled: the same for others to read.
    departed: sequences that left their lane while the step was under way, by lane.
    """

    step_id: int
    lanes: LaneIndices
    counts: Int32Array
    sampled: LaneIndices
    num_decodes: int
    chunks: list[tuple[int, int]]
    held: list[int]
    joins: list[LaneJoin]
    started: list[Sequence]
    append_lanes: list[int]
    append_blocks: list[int]
    scheduled: ScheduledRequests
    departed: dict[int, Sequence] = field(default_factory=dict)
    decode: bool = True
    num_kv_tokens: int = 0
    published_ns: int = 0
    started_ns: int = 0

    @property
    def num_tokens(self) -> int:
        if not self.chunks:
            return self.num_decodes
        return self.num_decodes + sum(count for _, count in self.chunks)


class Planner:
    """Fills steps from lanes, queue and lease; owns the order of those that are still catching up.

    starved: in the last step a running sequence lacked a block. held: lanes that it left out.
    votes: of the other schedulers of the data-parallel group, for prefill attempts.
    """

    def __init__(
        self, lanes: LaneTable, lease: Lease, waiting: WaitingQueue, shape: Shape,
        policies: Policies, experience: Experience,
    ) -> None:  # fmt: skip
        self.lanes = lanes
        self.lease = lease
        self.waiting = waiting
        self.shape = shape
        self.policies = policies
        self.experience = experience
        self.catching_up: list[Sequence] = []
        self.starved = False
        self.held: list[int] = []
        self.votes: tuple[bool, ...] = ()
        self._num_decode_steps = 0
        self._num_prefill_steps = 0
        self._group_left = 0
        self._append_lanes: list[int] = []
        self._append_blocks: list[int] = []
        self._joins: list[LaneJoin] = []
        self._chunks: list[tuple[int, int]] = []
        self._started: list[Sequence] = []
        self._ones: Int32Array = np.ones(lanes.num_lanes, dtype=np.int32)

    def fill(self, step_id: int, admission_index: dict[str, int], now_ns: int) -> Step:
        """Advance the planned columns by one step -> the step, which may compute nothing. Those
        that run alone stand still in it.
        """
        self._clear()
        kind = self._kind()
        decodes = self._decoding_lanes() if kind.decode else NO_LANES
        if not kind.prefill:
            self.held.extend(seq.lane for seq in self._behind())
        elif self.catching_up or len(self.waiting):
            budget = self._budget(decodes) - len(decodes)
            budget -= self._continue_chunks(budget)
            if kind.join:
                self._admit(budget, admission_index, now_ns)
        if not self._chunks and not kind.decode:
            # Nothing can prefill, for lack of lanes or blocks: what decodes does not wait for it.
            kind, decodes = DECODE, self._decoding_lanes()
        self._count(kind)
        return self._advance(step_id, decodes, kind)

    def fill_alone(self, step_id: int, seq: Sequence, admission_index: dict[str, int]) -> Step:
        """A step of `seq` and of nobody else; it computes nothing where `seq` finds no room."""
        self._clear()
        budget = self._most_tokens
        if seq.lane != NO_LANE:
            chunk = self._chunk(seq, budget)
            if chunk:
                self._chunks.append((seq.lane, chunk))
        elif self.lanes.num_free and self._fits(seq) and self._has_first_slot(seq):
            self.waiting.remove(seq)
            self._join(seq, budget, admission_index[seq.admission_id])
        return self._advance(step_id, NO_LANES, PREFILL)

    def rest(self) -> None:
        """There is nobody to plan for: nothing is lacking."""
        self._clear()

    def _clear(self) -> None:
        self.held, self._append_lanes, self._append_blocks = [], [], []
        self._joins, self._chunks, self._started = [], [], []
        self.lease.shortage = 0
        self.starved = False

    def _count(self, kind: Kind) -> None:
        """Steps in a row: of decodes since the last prefill, and of prefills."""
        if kind.decode:
            self._num_decode_steps += 1
            self._num_prefill_steps = 0
        else:
            self._num_decode_steps = 0
            self._num_prefill_steps += 1

    # ---- what kind of step, and how large

    @property
    def wants_prefill(self) -> bool:
        """This scheduler's vote in the group."""
        has_prefills = bool(self._behind()) or len(self.waiting) > 0
        usage = self.lease.num_held / max(1, self.lease.num_usable)
        return wants_prefill(self.policies, has_prefills, usage)

    def _kind(self) -> Kind:
        if self.policies.step_kind == "mixed":
            return MIXED
        lanes = self.lanes
        ballot = Ballot(
            has_decodes=bool(lanes.decoding.any()),
            has_begun=bool(self._behind()),
            has_waiting=len(self.waiting) > 0 and lanes.num_free > 0,
            num_decode_steps=self._num_decode_steps,
            num_prefill_steps=self._num_prefill_steps,
            wants=self.wants_prefill,
            votes=self.votes,
        )
        return choose_kind(self.policies, ballot)

    @property
    def _most_tokens(self) -> int:
        return min(self.shape.max_num_batched_tokens, self.experience.memory.ceiling)

    def _budget(self, decodes: LaneIndices) -> int:
        most = self._most_tokens
        if not self.policies.itl_target_ms:
            return most
        num_kv_tokens = int(self.lanes.computed[decodes].sum())
        target_ms = step_target_ms(self.policies.itl_target_ms, len(decodes))
        times = self.experience.times
        return adaptive_budget(target_ms, most, len(decodes), num_kv_tokens, times)

    # ---- 1. decodes

    def _decoding_lanes(self) -> LaneIndices:
        """Lanes one token behind that have a slot for it; the others of them are held, and so are
        those that run alone.
        """
        lanes, decoding = self.lanes, self.lanes.decoding
        if self.experience.suspects:
            alone = [seq.lane for seq in self.experience.suspects.alone if seq.lane != NO_LANE]
            decoding = decoding.copy()
            decoding[alone] = False
            self.held.extend(alone)
        decodes: LaneIndices = decoding.nonzero()[0]
        lacking = (decoding & (lanes.computed == lanes.capacity)).nonzero()[0]
        if not len(lacking):
            return decodes
        held = self._grow_or_hold(lacking)
        return decodes[~np.isin(decodes, held)] if held else decodes

    def _grow_or_hold(self, lacking: LaneIndices) -> list[int]:
        """One block for each of the lanes `lacking`; where there are too few, the first come
        first -> those that are held.
        """
        lanes, lease = self.lanes, self.lease
        seqs = lanes.occupants(lacking)
        if len(seqs) <= len(lease.spare):
            self._append_lanes.extend(lacking.tolist())
            self._append_blocks.extend(lease.take_one_each(seqs))
            lanes.capacity[lacking] += lease.block_size
            return []
        seqs.sort(key=lambda seq: seq.order)
        held = [seq.lane for seq in seqs if not self._grow(seq, 1)]
        self.held.extend(held)
        return held

    # ---- 2. sequences that are still catching up

    def _behind(self) -> list[Sequence]:
        """Those with more than one token to compute, oldest first."""
        lanes = self.lanes
        self.catching_up = [
            seq
            for seq in self.catching_up
            if seq.lane != NO_LANE and lanes.tokens[seq.lane] - lanes.computed[seq.lane] > 1
        ]
        if not self.experience.suspects:
            return self.catching_up
        return [seq for seq in self.catching_up if not seq.runs_alone]

    def _continue_chunks(self, budget: int) -> int:
        """Give each its chunk -> tokens given."""
        given = 0
        for seq in self._behind():
            chunk = self._chunk(seq, budget - given)
            if chunk:
                self._chunks.append((seq.lane, chunk))
                given += chunk
            else:
                self.held.append(seq.lane)
        return given

    def _chunk(self, seq: Sequence, budget: int) -> int:
        """num_scheduled_tokens of `seq` under `budget`, after taking the blocks for them."""
        lanes, lane = self.lanes, seq.lane
        computed = int(lanes.computed[lane])
        chunk = min(int(lanes.tokens[lane]) - computed, budget)
        if chunk <= 0:
            return 0
        lacking = seq.num_blocks_for(computed + chunk, self.lease.block_size) - len(seq.block_ids)
        if lacking > 0:
            self._grow(seq, lacking)
        return min(chunk, int(lanes.capacity[lane]) - computed)

    def _grow(self, seq: Sequence, num_blocks: int) -> int:
        taken = self.lease.take(seq, num_blocks)
        self.starved = self.starved or taken < num_blocks
        if taken:
            self._append_lanes.extend([seq.lane] * taken)
            self._append_blocks.extend(seq.block_ids[-taken:])
            self.lanes.capacity[seq.lane] += taken * self.lease.block_size
        return taken

    # ---- 3. new sequences

    def _admit(self, budget: int, admission_index: dict[str, int], now_ns: int) -> None:
        if not len(self.waiting) or budget <= 0:
            return
        # Where memory is short, each that runs is one that decodes.
        room = min(self._open_door(now_ns), self.experience.memory.ceiling - self.lanes.num_active)
        if room <= 0:
            return
        queue = self.policies.queue
        served = self.experience.counters.served
        passed: list[Sequence] = []
        join_bytes = 0
        for seq in next_in_line(queue, self.waiting.ready(), served):
            if budget <= 0 or not room or not self.lanes.num_free:
                break
            # Joins carry whole prompts: a plan with many long ones must stay below the bus limit.
            join_bytes += 4 * seq.num_tokens
            if self._joins and join_bytes > self.shape.max_join_bytes:
                break
            if seq.runs_alone or not self.has_room_for(seq):
                if not may_pass("fit" if seq.runs_alone else queue, seq):
                    break
                passed.append(seq)
                continue
            for other in passed:
                other.num_passed += 1
            self.waiting.remove(seq)
            budget -= self._join(seq, budget, admission_index[seq.admission_id])
            room -= 1
        self._group_left = room

    def _open_door(self, now_ns: int) -> int:
        """How many may join now. A static group that has begun to join is let in whole."""
        lanes = self.lanes
        if self.policies.batching == "continuous":
            return lanes.num_free
        if self._group_left and lanes.num_active:
            return self._group_left
        oldest_ns = min(seq.arrival_ns for seq in self.waiting)
        door = Door(lanes.num_active, lanes.num_lanes, len(self.waiting), now_ns - oldest_ns)
        return may_join(self.policies, door)

    def group_due_ns(self) -> int:
        """When a group leaves although it is not full, or NEVER_NS."""
        if self.policies.batching == "continuous" or not len(self.waiting):
            return NEVER_NS
        if self.lanes.num_active:
            return NEVER_NS
        due_ns = group_due_ns(self.policies, min(seq.arrival_ns for seq in self.waiting))
        return NEVER_NS if due_ns is None else due_ns

    def has_room_for(self, seq: Sequence) -> bool:
        """True where nothing but the policies keeps `seq` from joining."""
        return self._fits(seq) and self._has_first_slot(seq)

    def _fits(self, seq: Sequence) -> bool:
        """True where what it needs now is there, and the margin of what others will need is
        kept.
        """
        lease, block_size = self.lease, self.lease.block_size
        owed = sum(
            other.num_blocks_for(other.num_tokens + 1, block_size) - len(other.block_ids)
            for other in self.catching_up
            if other.lane != NO_LANE
        )
        # The token it samples needs a slot too, unless it is its last.
        tokens = min(seq.num_tokens + 1, seq.max_total_tokens - 1)
        needed = seq.num_blocks_for(tokens, block_size) - len(seq.block_ids)
        free = lease.num_usable - lease.num_held - max(0, owed)
        margin = watermark_blocks(lease.num_usable, self.lanes.num_active, self.policies.watermark)
        if needed + margin > free:
            return False
        return self.policies.margin == "watermark" or self._peak_fits(seq)

    def _peak_fits(self, seq: Sequence) -> bool:
        """True where all that run, and `seq`, are expected to stay within the pool to their end."""
        lanes = self.lanes
        running = np.flatnonzero(lanes.active)
        if not len(running) or not self.experience.outputs.has_learned:
            return True
        tokens = np.append(lanes.tokens[running], seq.num_tokens).astype(np.int32)
        limit = np.append(lanes.limit[running], seq.max_total_tokens).astype(np.int32)
        prompt = np.append(lanes.prompt_tokens[running], seq.num_prompt_tokens).astype(np.int32)
        # Shared prefixes are held once: count what is held, not what is named.
        block_size = self.lease.block_size
        named = int(lanes.capacity[running].sum()) + len(seq.block_ids) * block_size
        share = min(1.0, self.lease.num_held * block_size / max(1, named))
        held = (tokens * share).astype(np.int32)
        peak = self.experience.outputs.peak_tokens(held, tokens - prompt, limit - tokens)
        # Rounding up to whole blocks costs half a block each.
        peak += len(tokens) * block_size // 2
        return peak <= self.lease.num_usable * block_size

    def _has_first_slot(self, seq: Sequence) -> bool:
        if self.lease.spare or len(seq.block_ids) * self.lease.block_size > seq.num_computed_tokens:
            return True
        self.lease.shortage += 1
        return False

    def _join(self, seq: Sequence, budget: int, admission: int) -> int:
        """Give `seq` a lane and its first chunk -> tokens given."""
        if seq.num_cached_tokens < 0:
            seq.num_cached_tokens = seq.num_computed_tokens
            self._started.append(seq)
        seq.move(SequenceStatus.RUNNING)
        self.experience.counters.add(seq.salt, seq.num_tokens - seq.num_computed_tokens)
        num_computed = seq.num_computed_tokens
        lane = self.lanes.join(seq, admission, self.lease.block_size)
        appended = len(self._append_lanes)
        chunk = self._chunk(seq, budget)
        assert chunk > 0
        # Blocks that a joiner takes travel with its join.
        del self._append_lanes[appended:], self._append_blocks[appended:]
        self._joins.append(
            LaneJoin(
                lane=lane,
                token_ids=seq.token_ids[: seq.num_tokens].astype("<i4", copy=False).tobytes(),
                block_ids=np.asarray(seq.block_ids, dtype="<i4").tobytes(),
                num_computed_tokens=num_computed,
                num_prompt_tokens=seq.num_prompt_tokens,
                sampling=seq.sampling,
                traceparent=seq.traceparent if is_sampled(seq.traceparent) else "",
            )
        )
        self._chunks.append((lane, chunk))
        self.catching_up.append(seq)
        self.catching_up.sort(key=lambda other: other.order)
        return chunk

    # ---- the step

    def _advance(self, step_id: int, decodes: LaneIndices, kind: Kind) -> Step:
        """Move the planned columns: computed tokens, and a known one for each lane that caught
        up.
        """
        lanes = self.lanes
        # A decoding lane knows one token more than it has computed, before the step and after it.
        context = computed = lanes.tokens[decodes]
        lanes.computed[decodes] = computed
        lanes.tokens[decodes] = computed + 1
        num_chunk_kv_tokens = 0
        computing, counts, sampled = decodes, self._ones[: len(decodes)], decodes
        if self._chunks:
            chunk_lanes = np.array([lane for lane, _ in self._chunks], dtype=np.intp)
            chunk_counts = np.array([count for _, count in self._chunks], dtype=np.int32)
            computed = lanes.computed[chunk_lanes] + chunk_counts
            lanes.computed[chunk_lanes] = computed
            num_chunk_kv_tokens = int(computed.sum())
            caught_up = chunk_lanes[computed == lanes.tokens[chunk_lanes]]
            lanes.tokens[caught_up] += 1
            lanes.decoding[chunk_lanes] = lanes.tokens[chunk_lanes] - computed == 1
            computing = np.concatenate([decodes, chunk_lanes])
            counts = np.concatenate([counts, chunk_counts])
            sampled = np.sort(np.concatenate([decodes, caught_up]))
        scheduled = scheduled_requests(lanes, context, self._chunks)
        return Step(
            step_id=step_id,
            lanes=computing,
            counts=counts,
            sampled=sampled,
            num_decodes=len(decodes),
            chunks=self._chunks,
            held=self.held,
            joins=self._joins,
            started=self._started,
            append_lanes=self._append_lanes,
            append_blocks=self._append_blocks,
            decode=kind.decode,
            num_kv_tokens=scheduled.sum_decode_kv_tokens + num_chunk_kv_tokens,
            scheduled=scheduled,
        )
