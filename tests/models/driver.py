"""A tiny scheduler for tests: runs sequences on a ModelRunner within a token budget.

Decodes first, then chunks, in the order given; blocks are handed out shuffled, so that nothing
works by their being neighbours.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np

from gpu_worker.inputs import (
    PenaltyBatch,
    SamplingBatch,
    StepInputs,
    StepOutputs,
    TokenLogprobs,
)
from gpu_worker.runner import ModelRunner
from gpu_worker.token_counts import TokenCounts


@dataclass(eq=False)
class Lane:
    """One sequence: its tokens so far, how many of them are in the cache, and its blocks."""

    tokens: list[int]
    num_wanted: int
    temperature: float = 0.0
    seed: int = 0
    num_logprobs: int = -1
    factors: tuple[float, float, float] = (1.0, 0.0, 0.0)
    num_prompt: int = 0
    num_computed: int = 0
    blocks: list[int] = field(default_factory=list)
    generated: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)

    @property
    def num_remaining(self) -> int:
        return len(self.tokens) - self.num_computed


class Driver:
    def __init__(self, runner: ModelRunner, budget: int) -> None:
        self._runner = runner
        self._budget = budget
        self._free = list(range(1, runner.num_blocks))
        random.Random(7).shuffle(self._free)
        self.num_steps = 0

    def run(self, lanes: list[Lane]) -> None:
        """Until every lane has generated what it wants."""
        while any(len(lane.generated) < lane.num_wanted for lane in lanes):
            live = [lane for lane in lanes if len(lane.generated) < lane.num_wanted]
            live.sort(key=lambda lane: lane.num_remaining != 1)
            budget = self._budget
            planned: list[tuple[Lane, int]] = []
            for lane in live:
                count = min(lane.num_remaining, budget)
                if count > 0:
                    planned.append((lane, count))
                    budget -= count
            planned.sort(key=lambda pair: pair[1] != 1)
            self._step(planned)
            for lane in live:
                if len(lane.generated) == lane.num_wanted:
                    self._free.extend(lane.blocks)

    def _step(self, planned: list[tuple[Lane, int]]) -> None:
        block_size = self._runner.block_size
        for lane, count in planned:
            while len(lane.blocks) * block_size < lane.num_computed + count:
                lane.blocks.append(self._free.pop())
        sampled = [
            (index, lane)
            for index, (lane, count) in enumerate(planned)
            if lane.num_computed + count == len(lane.tokens)
        ]
        inputs = step_inputs(planned, sampled, block_size)
        outputs = self._runner.execute(inputs)
        self.num_steps += 1
        self._apply(planned, [lane for _, lane in sampled], outputs)

    @staticmethod
    def _apply(planned: list[tuple[Lane, int]], sampled: list[Lane], outputs: StepOutputs) -> None:
        for lane, count in planned:
            lane.num_computed += count
        for row, lane in enumerate(sampled):
            assert outputs.finite[row]
            token = int(outputs.token_ids[row])
            lane.tokens.append(token)
            lane.generated.append(token)
            lane.logprobs.append(outputs.logprobs[row])


def step_inputs(
    planned: list[tuple[Lane, int]], sampled: list[tuple[int, Lane]], block_size: int
) -> StepInputs:
    ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    boundaries = [0]
    for lane, count in planned:
        span = range(lane.num_computed, lane.num_computed + count)
        ids.extend(lane.tokens[span.start : span.stop])
        positions.extend(span)
        slots.extend(lane.blocks[p // block_size] * block_size + p % block_size for p in span)
        boundaries.append(len(ids))
    table = np.zeros((len(planned), max(len(lane.blocks) for lane, _ in planned)), dtype=np.int32)
    for row, (lane, _) in enumerate(planned):
        table[row, : len(lane.blocks)] = lane.blocks
    lanes = [lane for _, lane in sampled]
    return StepInputs(
        input_ids=np.array(ids, dtype=np.int32),
        positions=np.array(positions, dtype=np.int32),
        slot_mapping=np.array(slots, dtype=np.int64),
        cu_seqlens_q=np.array(boundaries, dtype=np.int32),
        seqlens_k=np.array([lane.num_computed + n for lane, n in planned], dtype=np.int32),
        block_table=table,
        num_decodes=sum(count == 1 for _, count in planned),
        logits_rows=np.array([boundaries[i + 1] - 1 for i, _ in sampled], dtype=np.int32),
        sampling=sampling_batch(lanes),
        penalties=penalty_batch(lanes),
    )


def sampling_batch(lanes: list[Lane]) -> SamplingBatch:
    return SamplingBatch(
        temperature=np.array([lane.temperature for lane in lanes], dtype=np.float32),
        top_p=np.ones(len(lanes), dtype=np.float32),
        top_k=np.zeros(len(lanes), dtype=np.int32),
        min_p=np.zeros(len(lanes), dtype=np.float32),
        seed=np.array([lane.seed for lane in lanes], dtype=np.uint64),
        position=np.array([len(lane.tokens) for lane in lanes], dtype=np.int64),
        num_logprobs=np.array([lane.num_logprobs for lane in lanes], dtype=np.int32),
    )


def penalty_batch(lanes: list[Lane]) -> PenaltyBatch | None:
    held = [row for row, lane in enumerate(lanes) if lane.factors != (1.0, 0.0, 0.0)]
    if not held:
        return None
    columns = []
    for row in held:
        tokens = np.array(lanes[row].tokens, dtype=np.int32)
        columns.append(TokenCounts(tokens, lanes[row].num_prompt).columns())
    return PenaltyBatch(
        rows=np.repeat(np.array(held, dtype=np.int32), [len(ids) for ids, _ in columns]),
        token_ids=np.concatenate([ids for ids, _ in columns]),
        counts=np.concatenate([counts for _, counts in columns]),
        factors=np.array([lane.factors for lane in lanes], dtype=np.float32),
    )
