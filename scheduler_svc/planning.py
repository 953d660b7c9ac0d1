"""One step's plan: who advances by how much (DESIGN section 5).

Order: one token for each decoding lane; chunks of sequences that are still catching up, oldest
first; new sequences while lanes, the token budget and the KV margin allow. A lane without its block
is held, never waited for.

Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from services.contracts.step import LaneJoin
from services.contracts.vectors import Int32Array

from .lanes import LaneTable
from .lease import Lease
from .policy import may_join
from .sequence import Sequence, SequenceStatus
from .waiting import WaitingQueue


class Shape(NamedTuple):
    """Of one epoch: lanes, tokens of a sequence, tokens of a step, bytes of a plan's joins."""

    max_num_seqs: int
    max_model_len: int
    max_num_batched_tokens: int
    max_join_bytes: int


@dataclass(slots=True)
class Step:
    """What one step does, and the lane map that its result is read against.

    lanes, counts: int32, lanes that compute and num_scheduled_tokens of each; sampled: those that
    end with a token.
    started: sequences that run for the first time.
    departed: sequences that left their lane while the step was under way, by lane.
    """

    step_id: int
    lanes: Int32Array
    counts: Int32Array
    sampled: Int32Array
    num_decodes: int
    chunks: list[tuple[int, int]]
    held: list[int]
    joins: list[LaneJoin]
    started: list[Sequence]
    appended: list[tuple[int, int]]
    departed: dict[int, Sequence] = field(default_factory=dict)
    published_ns: int = 0
    started_ns: int = 0

    @property
    def num_tokens(self) -> int:
        return self.num_decodes + sum(count for _, count in self.chunks)


class Planner:
    """Fills steps from lanes, queue and lease; owns the order of those that are still catching up.

    starved: in the last step a running sequence lacked a block.
    """

    def __init__(self, lanes: LaneTable, lease: Lease, waiting: WaitingQueue, shape: Shape) -> None:
        self.lanes = lanes
        self.lease = lease
        self.waiting = waiting
        self.max_num_batched_tokens = shape.max_num_batched_tokens
        self.max_join_bytes = shape.max_join_bytes
        self.catching_up: list[Sequence] = []
        self.starved = False
        self._held: list[int] = []
        self._appended: list[tuple[int, int]] = []
        self._joins: list[LaneJoin] = []
        self._chunks: list[tuple[int, int]] = []
        self._started: list[Sequence] = []

    def fill(self, step_id: int, admission_index: dict[str, int]) -> Step:
        """Advance the planned columns by one step -> the step (which may hold everything and
        compute nothing).
        """
        self._held, self._appended, self._joins, self._chunks = [], [], [], []
        self._started = []
        self.lease.shortage = 0
        self.starved = False
        decodes = self._decoding_lanes()
        budget = self.max_num_batched_tokens - len(decodes)
        budget -= self._continue_chunks(budget)
        self._admit(budget, admission_index)
        return self._advance(step_id, decodes)

    # ---- 1. decodes

    def _decoding_lanes(self) -> Int32Array:
        """Lanes one token behind that have a slot for it; the others of them are held."""
        lanes = self.lanes
        decoding = lanes.active & (lanes.tokens - lanes.computed == 1)
        lacking = np.flatnonzero(decoding & (lanes.computed == lanes.capacity))
        if len(lacking):
            seqs = [lanes.occupant(int(lane)) for lane in lacking]
            if len(seqs) > len(self.lease.spare):
                seqs.sort(key=lambda seq: seq.order)
            for seq in seqs:
                if not self._grow(seq, 1):
                    decoding[seq.lane] = False
                    self._held.append(seq.lane)
        return np.flatnonzero(decoding).astype(np.int32)

    # ---- 2. sequences that are still catching up

    def _continue_chunks(self, budget: int) -> int:
        """Give each its chunk, oldest first -> tokens given."""
        given = 0
        behind = []
        for seq in self.catching_up:
            lane = seq.lane
            if lane < 0 or self.lanes.tokens[lane] - self.lanes.computed[lane] == 1:
                continue
            behind.append(seq)
            chunk = self._chunk(seq, budget - given)
            if chunk:
                self._chunks.append((lane, chunk))
                given += chunk
            else:
                self._held.append(lane)
        self.catching_up = behind
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
            self._appended.extend((seq.lane, block_id) for block_id in seq.block_ids[-taken:])
            self.lanes.capacity[seq.lane] += taken * self.lease.block_size
        return taken

    # ---- 3. new sequences

    def _admit(self, budget: int, admission_index: dict[str, int]) -> None:
        join_bytes = 0
        for seq in self.waiting.ready():
            if budget <= 0 or not self.lanes.num_free or not self._fits(seq):
                break
            # Joins carry whole prompts: a plan with many long ones must stay below the bus limit.
            join_bytes += 4 * seq.num_tokens
            too_many_bytes = bool(self._joins) and join_bytes > self.max_join_bytes
            if too_many_bytes or not self._has_first_slot(seq):
                break
            self.waiting.remove(seq)
            budget -= self._join(seq, budget, admission_index[seq.admission_id])

    def _fits(self, seq: Sequence) -> bool:
        lease, block_size = self.lease, self.lease.block_size
        owed = sum(
            other.num_blocks_for(other.num_tokens + 1, block_size) - len(other.block_ids)
            for other in self.catching_up
            if other.lane >= 0
        )
        # The token it samples needs a slot too, unless it is its last.
        tokens = min(seq.num_tokens + 1, seq.max_total_tokens - 1)
        needed = seq.num_blocks_for(tokens, block_size) - len(seq.block_ids)
        free = lease.num_usable - lease.num_held - max(0, owed)
        return may_join(needed, free, lease.num_usable, self.lanes.num_active)

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
        num_computed = seq.num_computed_tokens
        lane = self.lanes.join(seq, admission, self.lease.block_size)
        appended = len(self._appended)
        chunk = self._chunk(seq, budget)
        assert chunk > 0
        # Blocks that a joiner takes travel with its join.
        del self._appended[appended:]
        self._joins.append(
            LaneJoin(
                lane=lane,
                token_ids=seq.token_ids[: seq.num_tokens].astype("<i4", copy=False).tobytes(),
                block_ids=np.asarray(seq.block_ids, dtype="<i4").tobytes(),
                num_computed_tokens=num_computed,
                num_prompt_tokens=seq.num_prompt_tokens,
                sampling=seq.sampling,
            )
        )
        self._chunks.append((lane, chunk))
        self.catching_up.append(seq)
        self.catching_up.sort(key=lambda other: other.order)
        return chunk

    # ---- the step

    def _advance(self, step_id: int, decodes: Int32Array) -> Step:
        """Move the planned columns: every computed token, and one more known token for every lane
        that caught up.
        """
        lanes = self.lanes
        lanes.computed[decodes] += 1
        lanes.tokens[decodes] += 1
        computing, counts, sampled = decodes, np.ones(len(decodes), dtype=np.int32), decodes
        if self._chunks:
            chunk_lanes = np.array([lane for lane, _ in self._chunks], dtype=np.int32)
            chunk_counts = np.array([count for _, count in self._chunks], dtype=np.int32)
            lanes.computed[chunk_lanes] += chunk_counts
            caught_up = chunk_lanes[lanes.computed[chunk_lanes] == lanes.tokens[chunk_lanes]]
            lanes.tokens[caught_up] += 1
            computing = np.concatenate([decodes, chunk_lanes])
            counts = np.concatenate([counts, chunk_counts])
            sampled = np.sort(np.concatenate([decodes, caught_up]))
        return Step(
            step_id=step_id,
            lanes=computing,
            counts=counts,
            sampled=sampled,
            num_decodes=len(decodes),
            chunks=self._chunks,
            held=self._held,
            joins=self._joins,
            started=self._started,
            appended=self._appended,
        )
