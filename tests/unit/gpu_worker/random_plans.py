"""Plans that a scheduler could send, drawn from a seed, without knowing what is sampled."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from gpu_worker.executor import EngineShape
from services.contracts.step import LaneJoin, StepPlan
from services.contracts.vectors import pack
from tests.unit.gpu_worker.plans import join, plan

SAMPLINGS: list[dict[str, float | int]] = [
    *[{}] * 6,
    {"repetition_penalty": 1.5},
    {"num_logprobs": 1},
    {"num_prompt_logprobs": 0},
]


@dataclass
class _Lane:
    tokens: int
    computed: int
    blocks: list[int] = field(default_factory=list)


class RandomPlans:
    """Joins, endings, lanes joined anew at once, chunks, holds, and copies."""

    def __init__(self, seed: int, shape: EngineShape) -> None:
        self._rng = random.Random(seed)
        self._shape = shape
        self._lanes: dict[int, _Lane] = {}
        self._free = list(range(1, shape.num_blocks))
        self._step_id = 0

    def next(self) -> StepPlan:
        self._step_id += 1
        leave = [lane for lane in self._lanes if self._ends(lane)]
        for lane in leave:
            self._free.extend(self._lanes.pop(lane).blocks)
        self._rng.shuffle(self._free)
        joins = [self._join(lane) for lane in range(self._shape.max_num_seqs) if self._begins(lane)]
        chunks, hold, append = self._schedule()
        return plan(
            self._step_id,
            reset=self._step_id == 1,
            leave=leave,
            joins=joins,
            chunks=chunks,
            hold=hold,
            append=append,
            **self._copies(),
        )

    def _ends(self, lane: int) -> bool:
        full = self._lanes[lane].tokens >= self._shape.max_model_len
        return full or self._rng.random() < 0.15

    def _begins(self, lane: int) -> bool:
        return lane not in self._lanes and self._rng.random() < 0.5

    def _join(self, lane: int) -> LaneJoin:
        token_ids = [self._rng.randrange(512) for _ in range(self._rng.randint(1, 9))]
        self._lanes[lane] = _Lane(len(token_ids), 0)
        return join(lane, token_ids, [], **self._rng.choice(SAMPLINGS))

    def _schedule(self) -> tuple[dict[int, int], list[int], list[tuple[int, int]]]:
        chunks: dict[int, int] = {}
        hold: list[int] = []
        append: list[tuple[int, int]] = []
        for lane, state in self._lanes.items():
            behind = state.tokens - state.computed
            count = self._rng.randint(1, behind)
            if self._rng.random() < 0.15:
                hold.append(lane)
                continue
            if behind > 1 or self._rng.random() < 0.1:
                chunks[lane] = count
            state.computed += count
            state.tokens += state.computed == state.tokens
            while len(state.blocks) * self._shape.block_size < state.computed:
                state.blocks.append(self._free.pop())
                append.append((lane, state.blocks[-1]))
        return chunks, hold, append

    def _copies(self) -> dict[str, bytes]:
        """Of any block, and back into one that nobody has: it is written before it is read."""
        if self._rng.random() < 0.8 or not self._free:
            return {}
        slot = self._rng.randrange(self._shape.host_blocks)
        block = self._rng.randrange(1, self._shape.num_blocks)
        return {
            "copies_out": pack([block, slot]),
            "copies_in": pack([slot, self._rng.choice(self._free)]),
        }
