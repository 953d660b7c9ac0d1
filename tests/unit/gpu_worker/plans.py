"""Plans for the mirror, with everything filled in but what a test is about."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gpu_worker.mirror import Mirror
from services.contracts.sampling import SamplingParams
from services.contracts.step import LaneJoin, StepPlan
from services.contracts.vectors import pack


def join(
    lane: int,
    token_ids: Sequence[int],
    block_ids: Sequence[int],
    *,
    computed: int = 0,
    prompt: int = 0,
    **sampling: Any,
) -> LaneJoin:
    return LaneJoin(
        lane=lane,
        token_ids=pack(token_ids),
        block_ids=pack(block_ids),
        num_computed_tokens=computed,
        num_prompt_tokens=prompt or len(token_ids),
        sampling=SamplingParams(**sampling),
    )


def plan(
    step_id: int = 1,
    *,
    joins: Sequence[LaneJoin] = (),
    chunks: dict[int, int] | None = None,
    append: Sequence[tuple[int, int]] = (),
    leave: Sequence[int] = (),
    hold: Sequence[int] = (),
    **more: Any,
) -> StepPlan:
    chunks = chunks or {}
    return StepPlan(
        generation=more.pop("generation", 1),
        epoch=more.pop("epoch", 1),
        number=step_id,
        step_id=step_id,
        join=list(joins),
        leave=pack(leave),
        chunk_lanes=pack(chunks.keys()),
        chunk_tokens=pack(chunks.values()),
        append_lanes=pack([lane for lane, _ in append]),
        append_blocks=pack([block for _, block in append]),
        hold=pack(hold),
        **more,
    )


def mirror(**more: Any) -> Mirror:
    shape = {"max_num_seqs": 4, "max_model_len": 128, "block_size": 16, "num_blocks": 32}
    return Mirror(**{**shape, **more})
