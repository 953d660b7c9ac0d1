"""The worker's copy of the lanes: applies plan diffs, and knows what they leave out: positions and
last tokens.

A step may be built before the tokens of the one before are known: lanes that wait for theirs are
fed on the device.

Decides nothing. A plan that contradicts the lanes means that worker and scheduler have lost each
other: it raises InvariantError, the worker stops, and a new generation begins.

Pure: numpy only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from gpu_worker.inputs import (
    Bools,
    CopyLists,
    PenaltyBatch,
    PromptLogprobRequest,
    SamplingBatch,
    StepInputs,
)
from gpu_worker.token_counts import TokenCounts
from services.contracts.errors import InvariantError
from services.contracts.step import LaneJoin, StepPlan
from services.contracts.vectors import Int32Array, unpack

from .rows import Rows

# Numpy's own index type: any other is converted at each gather, which costs more than the gather.
Indices: TypeAlias = npt.NDArray[np.intp]

_NONE: Final[Indices] = np.zeros(0, dtype=np.intp)


@dataclass(frozen=True, slots=True)
class Scheduled:
    """What a plan asks for, row by row: decodes first, then chunks in the plan's order.

    lanes: [B]; counts: int32 [B]; sampled: [S], rows (not lanes) that end with a token, in
    ascending lane order.
    """

    lanes: Indices
    counts: Int32Array
    num_decodes: int
    sampled: Indices

    @property
    def sampled_lanes(self) -> Indices:
        return self.lanes[self.sampled]


class Target(NamedTuple):
    """Whose prompt's log-probabilities: of its tokens from position `first` on."""

    lane: int
    first: int


class Awaited(NamedTuple):
    """What a step under way samples: of lanes [S], for positions int32 [S].

    stays: bool [S] - False once the lane is no longer that sequence's
    """

    lanes: Indices
    positions: Int32Array
    stays: Bools


class Mirror:
    """Lane state between steps. apply -> inputs -> advance -> (the step runs) -> accept; the next
    step may be applied and advanced before this one's tokens are accepted.

    ahead: whether that may be; then the device keeps the last token of every lane
    """

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        num_blocks: int,
        host_blocks: int = 0,
        ahead: bool = False,
    ) -> None:
        self._ahead = ahead
        self._awaited: Awaited | None = None
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.host_blocks = host_blocks
        self.max_model_len = max_model_len
        self.rows = Rows(max_num_seqs, max_model_len, -(-max_model_len // block_size))
        # Of lanes with penalties alone.
        self._counts: dict[int, TokenCounts] = {}

    # ---- the plan

    def needs_tokens(self, plan: StepPlan) -> bool:
        """Whether the step of `plan` is not to be built before the tokens of the one before are
        known: penalties count them; log-probabilities and copies make the host wait for the device,
        which would keep those tokens back for a step.
        """
        rows = self.rows
        scored = (rows.num_prompt_logprobs >= 0) & (rows.computed + 1 < rows.prompt_tokens)
        return bool(
            plan.copies_out
            or plan.copies_in
            or self._counts
            or any(
                join.sampling.penalises
                or join.sampling.num_logprobs >= 0
                or join.sampling.num_prompt_logprobs >= 0
                for join in plan.join
            )
            or (rows.active & (scored | (rows.num_logprobs >= 0))).any()
        )

    def apply(self, plan: StepPlan) -> Scheduled:
        """Membership and blocks as the plan says -> who computes how much."""
        rows = self.rows
        if plan.reset:
            rows.active[:] = False
            self._counts.clear()
            if self._awaited is not None:
                self._awaited.stays[:] = False
        for lane in self._lanes(plan.leave).tolist():
            _require(bool(rows.active[lane]), f"lane {lane} leaves but is empty")
            rows.active[lane] = False
            self._counts.pop(lane, None)
            if self._awaited is not None:
                self._awaited.stays[self._awaited.lanes == lane] = False
        for join in plan.join:
            self._join(join)
        lanes, blocks = unpack(plan.append_lanes), unpack(plan.append_blocks)
        _require(len(lanes) == len(blocks), "append columns differ in length")
        for lane, block_id in zip(lanes.tolist(), blocks.tolist(), strict=True):
            self._append_block(lane, block_id)
        return self._schedule(plan)

    def _lanes(self, vector: bytes) -> Indices:
        """[n] lanes, each of which exists and is named once."""
        if not vector:
            return _NONE
        lanes: Indices = unpack(vector).astype(np.intp)
        exist = (lanes >= 0) & (lanes < self.rows.num_lanes)
        _require(bool(exist.all()), "it names a lane that does not exist")
        _require(len(set(lanes.tolist())) == len(lanes), "it names a lane twice")
        return lanes

    def _join(self, join: LaneJoin) -> None:
        rows, lane = self.rows, join.lane
        _require(lane < rows.num_lanes, f"lane {lane} of {rows.num_lanes}")
        _require(not rows.active[lane], f"lane {lane} is joined twice")
        token_ids, block_ids = unpack(join.token_ids), unpack(join.block_ids)
        _require(
            0 <= join.num_computed_tokens < len(token_ids) <= self.max_model_len,
            f"lane {lane} joins with {len(token_ids)} tokens, {join.num_computed_tokens} computed",
        )
        rows.active[lane] = True
        rows.tokens[lane] = len(token_ids)
        rows.computed[lane] = join.num_computed_tokens
        rows.prompt_tokens[lane] = join.num_prompt_tokens
        rows.num_blocks[lane] = 0
        rows.token_ids[lane, : len(token_ids)] = token_ids
        # Behind a lane's own blocks the table must read as the null block.
        rows.block_table[lane] = 0
        rows.set_sampling(lane, join.sampling)
        if join.sampling.penalises:
            self._counts[lane] = TokenCounts(token_ids, join.num_prompt_tokens)
        for block_id in block_ids.tolist():
            self._append_block(lane, block_id)

    def _append_block(self, lane: int, block_id: int) -> None:
        rows = self.rows
        _require(
            0 <= lane < rows.num_lanes and bool(rows.active[lane]), f"block for empty lane {lane}"
        )
        _require(0 < block_id < self.num_blocks, f"block {block_id} is not in the pool")
        at = int(rows.num_blocks[lane])
        _require(at < rows.block_table.shape[1], f"lane {lane} has too many blocks")
        rows.block_table[lane, at] = block_id
        rows.num_blocks[lane] = at + 1

    def _schedule(self, plan: StepPlan) -> Scheduled:
        rows = self.rows
        chunk_lanes, chunk_tokens = self._lanes(plan.chunk_lanes), unpack(plan.chunk_tokens)
        _require(len(chunk_lanes) == len(chunk_tokens), "chunk columns differ in length")
        hold = self._lanes(plan.hold)
        decoding = rows.active.copy() if plan.decode else np.zeros_like(rows.active)
        _require(bool(rows.active[chunk_lanes].all()), "a chunk names an empty lane")
        decoding[chunk_lanes] = False
        decoding[hold] = False
        decodes: Indices = decoding.nonzero()[0]
        behind = rows.tokens[decodes] - rows.computed[decodes]
        _require(bool((behind == 1).all()), "a decode names a lane that is still catching up")
        lanes, counts = decodes, np.ones(len(decodes), dtype=np.int32)
        if len(chunk_lanes):
            lanes = np.concatenate([decodes, chunk_lanes])
            counts = np.concatenate([counts, chunk_tokens])
        after, tokens = rows.computed[lanes] + counts, rows.tokens[lanes]
        _require(bool((counts > 0).all()), "a chunk of no tokens")
        _require(bool((after <= tokens).all()), "a chunk goes past its lane's tokens")
        _require(
            bool((after <= rows.num_blocks[lanes] * self.block_size).all()), "a lane has no block"
        )
        sampled: Indices = (after == tokens).nonzero()[0]
        if len(chunk_lanes):
            sampled = sampled[np.argsort(lanes[sampled], kind="stable")]
        _require(bool((rows.tokens[lanes[sampled]] <= self.max_model_len).all()), "a lane is full")
        return Scheduled(lanes, counts, len(decodes), sampled)

    def copies(self, plan: StepPlan) -> CopyLists | None:
        """What is to be copied before `plan` computes, or None."""
        if not plan.copies_out and not plan.copies_in:
            return None
        out_pairs, in_pairs = unpack(plan.copies_out), unpack(plan.copies_in)
        _require(len(out_pairs) % 2 == len(in_pairs) % 2 == 0, "half a copy")
        lists = CopyLists(out_pairs[::2], out_pairs[1::2], in_pairs[::2], in_pairs[1::2])
        for blocks in (lists.out_blocks, lists.in_blocks):
            known = (blocks > 0) & (blocks < self.num_blocks)
            _require(bool(known.all()), "a copy names a block that is not in the pool")
        for slots in (lists.out_slots, lists.in_slots):
            known = (slots >= 0) & (slots < self.host_blocks)
            _require(bool(known.all()), "a copy names a host slot that does not exist")
        for written in (lists.out_slots, lists.in_blocks):
            _require(len(np.unique(written)) == len(written), "two copies write to one place")
        return lists

    # ---- the packed inputs

    def inputs(self, scheduled: Scheduled) -> tuple[StepInputs, list[Target]]:
        """The arrays of DESIGN section 5 for `scheduled`, packed, no padding.

        Targets: lane and first target position of each entry of `prompt_logprobs`.
        """
        rows, lanes, counts = self.rows, scheduled.lanes, scheduled.counts
        cu_seqlens_q, lane_of_token, positions = self._tokens(scheduled)
        seqlens_k = rows.computed[lanes] + counts
        width = -(-int(seqlens_k.max(initial=0)) // self.block_size)
        blocks = rows.block_table[lane_of_token, positions // self.block_size].astype(np.int64)
        sampled_lanes = lanes[scheduled.sampled]
        targets, requests = self._prompt_logprobs(scheduled, cu_seqlens_q)
        inputs = StepInputs(
            input_ids=rows.token_ids[lane_of_token, positions],
            positions=positions,
            slot_mapping=blocks * self.block_size + positions % self.block_size,
            cu_seqlens_q=cu_seqlens_q,
            seqlens_k=seqlens_k,
            block_table=rows.block_table[lanes, :width],
            num_decodes=scheduled.num_decodes,
            logits_rows=cu_seqlens_q[scheduled.sampled + 1] - 1,
            sampling=SamplingBatch(
                temperature=rows.temperature[sampled_lanes],
                top_p=rows.top_p[sampled_lanes],
                top_k=rows.top_k[sampled_lanes],
                min_p=rows.min_p[sampled_lanes],
                seed=rows.seed[sampled_lanes],
                position=rows.tokens[sampled_lanes].astype(np.int64),
                num_logprobs=rows.num_logprobs[sampled_lanes],
            ),
            prompt_logprobs=tuple(requests),
            input_lanes=self._input_lanes(lane_of_token),
            output_lanes=sampled_lanes.astype(np.int32) if self._ahead else None,
            penalties=self._penalties(sampled_lanes) if self._counts else None,
        )
        return inputs, targets

    def _input_lanes(self, lane_of_token: Indices) -> Int32Array | None:
        """[T]: lanes whose last token is not known yet, -1 where it is: such a lane computes just
        that token.
        """
        if self._awaited is None:
            return None
        lanes = self._awaited.lanes[self._awaited.stays]
        fed = np.full(self.rows.num_lanes, -1, dtype=np.int32)
        fed[lanes] = lanes
        return fed[lane_of_token]

    def _penalties(self, lanes: Indices) -> PenaltyBatch | None:
        """What the sampled lanes with penalties have already."""
        held = [row for row, lane in enumerate(lanes.tolist()) if lane in self._counts]
        if not held:
            return None
        columns = [self._counts[int(lanes[row])].columns() for row in held]
        sizes = [len(token_ids) for token_ids, _ in columns]
        return PenaltyBatch(
            rows=np.repeat(np.array(held, dtype=np.int32), sizes),
            token_ids=np.concatenate([token_ids for token_ids, _ in columns]),
            counts=np.concatenate([counts for _, counts in columns]),
            factors=self.rows.penalties[lanes],
        )

    def _tokens(self, scheduled: Scheduled) -> tuple[Int32Array, Indices, Int32Array]:
        """cu_seqlens_q int32 [B + 1]; lane and position int32 of each of the T packed tokens."""
        lanes, counts = scheduled.lanes, scheduled.counts
        computed = self.rows.computed[lanes]
        if scheduled.num_decodes == len(lanes):
            return np.arange(len(lanes) + 1, dtype=np.int32), lanes, computed
        cu_seqlens_q = np.zeros(len(lanes) + 1, dtype=np.int32)
        np.cumsum(counts, out=cu_seqlens_q[1:])
        row_of_token = np.repeat(np.arange(len(lanes)), counts)
        within = np.arange(cu_seqlens_q[-1], dtype=np.int32) - cu_seqlens_q[row_of_token]
        return cu_seqlens_q, lanes[row_of_token], computed[row_of_token] + within

    def _prompt_logprobs(
        self, scheduled: Scheduled, cu_seqlens_q: Int32Array
    ) -> tuple[list[Target], list[PromptLogprobRequest]]:
        """Chunks of prompts whose log-probabilities are wanted: every row whose next token is of
        the prompt.
        """
        rows = self.rows
        targets: list[Target] = []
        requests: list[PromptLogprobRequest] = []
        wanted = rows.num_prompt_logprobs[scheduled.lanes] >= 0
        for row in np.flatnonzero(wanted).tolist():
            lane = int(scheduled.lanes[row])
            first = int(rows.computed[lane]) + 1
            last = min(first + int(scheduled.counts[row]), int(rows.prompt_tokens[lane]))
            if first >= last:
                continue
            targets.append(Target(lane, first))
            requests.append(
                PromptLogprobRequest(
                    first_row=int(cu_seqlens_q[row]),
                    num_rows=last - first,
                    target_ids=rows.token_ids[lane, first:last].copy(),
                    num_logprobs=int(rows.num_prompt_logprobs[lane]),
                )
            )
        return targets, requests

    # ---- after the step

    def advance(self, scheduled: Scheduled) -> Awaited:
        """The step is under way: positions move on, and sampled lanes have one token more, which is
        not known yet.
        """
        rows = self.rows
        rows.computed[scheduled.lanes] += scheduled.counts
        lanes = scheduled.sampled_lanes
        at = rows.tokens[lanes]
        rows.tokens[lanes] = at + 1
        self._awaited = Awaited(lanes, at, np.ones(len(lanes), dtype=np.bool_))
        return self._awaited

    def accept(self, awaited: Awaited, token_ids: Int32Array) -> None:
        """The step has run: what it sampled becomes each lane's token, but for lanes that have
        left.
        """
        if self._awaited is awaited:
            self._awaited = None
        rows, lanes, at = self.rows, awaited.lanes, awaited.positions
        # A token at the very end of the model's length is the lane's last: it is reported, never
        # computed.
        fits = awaited.stays & (at < self.max_model_len)
        rows.token_ids[lanes[fits], at[fits]] = token_ids[fits]
        if self._counts:
            kept = zip(
                lanes[awaited.stays].tolist(), token_ids[awaited.stays].tolist(), strict=True
            )
            for lane, token_id in kept:
                if lane in self._counts:
                    self._counts[lane].add(token_id)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise InvariantError(f"plan contradicts the lanes: {message}")
