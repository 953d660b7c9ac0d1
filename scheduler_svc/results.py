"""A step's result, read against the lane map of its plan.

Pure.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

import numpy as np

from services.contracts.errors import ErrorCode, InvariantError
from services.contracts.public import FinishReason
from services.contracts.step import StepResult
from services.contracts.vectors import Int32Array, pack, unpack

from .lanes import LaneIndices, LaneTable
from .lease import Lease
from .planning import Step
from .sequence import Sequence, SequenceStatus
from .updates import UpdateLog

Ended: TypeAlias = tuple[Sequence, FinishReason, ErrorCode | None, str]

_NUMERICS = "the model produced logits that are not finite"


def apply_result(
    step: Step, result: StepResult, lanes: LaneTable, lease: Lease, updates: UpdateLog
) -> list[Ended]:
    """Accept the step's tokens, commit the blocks it filled -> sequences that it ends.

    Raises InvariantError where the worker's lanes are not the plan's: the mirror has lost its way.
    """
    here, token_ids = step.sampled, unpack(result.token_ids)
    if len(here) != len(token_ids) or result.lanes != pack(here):
        raise InvariantError(f"step {step.step_id} sampled lanes that its plan does not name")
    failed = set(unpack(result.failed).tolist())
    _logprobs(step, result, lanes, updates)
    ended: list[Ended] = []
    if step.departed or failed:
        ended.extend(_departed(step, result, lease, updates))
        ended.extend(_failures(step, lanes, failed))
        stays = ~np.isin(here, [*step.departed, *failed])
        here, token_ids = here[stays], token_ids[stays]
    _accept(lanes, here, token_ids, updates)
    _commit(step, lanes, lease, failed)
    ended.extend(_endings(lanes, here, token_ids))
    return ended


def _failures(step: Step, lanes: LaneTable, failed: set[int]) -> Iterator[Ended]:
    for lane in sorted(failed - step.departed.keys()):
        yield lanes.occupant(lane), FinishReason.ERROR, ErrorCode.NUMERICS, _NUMERICS


def _accept(lanes: LaneTable, here: LaneIndices, token_ids: Int32Array, updates: UpdateLog) -> None:
    offsets = lanes.accept(here, token_ids) - lanes.prompt_tokens[here]
    updates.add_column(lanes.admission[here], lanes.tag[here], offsets, token_ids)


def _commit(step: Step, lanes: LaneTable, lease: Lease, failed: set[int]) -> None:
    """Blocks whose last slot this step wrote, but for lanes whose KV may not be finite."""
    here, counts = step.lanes, step.counts
    if step.departed:
        stays = ~np.isin(here, list(step.departed))
        here, counts = here[stays], counts[stays]
    computed = lanes.accepted_computed[here] + counts
    lanes.accepted_computed[here] = computed
    fresh = computed // lease.block_size - lanes.committed_blocks[here]
    if failed:
        fresh[np.isin(here, list(failed))] = 0
    _commit_next(here[fresh == 1], lanes, lease)
    if not step.chunks:
        # A decode fills one block at most.
        return
    for lane in here[fresh > 1].tolist():
        seq, row = lanes.occupant(lane), lanes.token_ids[lane]
        last = int(lanes.accepted_computed[lane]) // lease.block_size
        for block in range(int(lanes.committed_blocks[lane]), last):
            lease.commit(seq, block, row)
        lanes.committed_blocks[lane] = last


def _commit_next(full: LaneIndices, lanes: LaneTable, lease: Lease) -> None:
    """One more block of each of the lanes `full`, all gathered at once."""
    if not len(full):
        return
    indices = lanes.committed_blocks[full]
    tokens = lanes.block_tokens(full, indices, lease.block_size)
    lease.commit_one_each(lanes.occupants(full), indices.tolist(), tokens)
    lanes.committed_blocks[full] = indices + 1


def _endings(lanes: LaneTable, here: LaneIndices, token_ids: Int32Array) -> Iterator[Ended]:
    stopped = lanes.stopped(here, token_ids)
    full = lanes.accepted_tokens[here] >= lanes.limit[here]
    for index in (stopped | full).nonzero()[0].tolist():
        reason = FinishReason.STOP if stopped[index] else FinishReason.LENGTH
        yield lanes.occupant(int(here[index])), reason, None, ""


def _departed(step: Step, result: StepResult, lease: Lease, updates: UpdateLog) -> Iterator[Ended]:
    """Sequences that left their lane meanwhile: a preempted or draining one keeps its token, a
    finished one does not.
    """
    tokens = dict(
        zip(unpack(result.lanes).tolist(), unpack(result.token_ids).tolist(), strict=True)
    )
    failed = set(unpack(result.failed).tolist())
    counts = dict(zip(step.lanes.tolist(), step.counts.tolist(), strict=True))
    for lane, seq in step.departed.items():
        seq.num_in_flight -= 1
        if seq.status is SequenceStatus.FINISHED:
            continue
        seq.num_computed_tokens += counts[lane]
        if lane in failed:
            yield seq, FinishReason.ERROR, ErrorCode.NUMERICS, _NUMERICS
            continue
        _commit_departed(seq, lease)
        if lane not in tokens:
            continue
        updates.add_tokens(seq, seq.num_output_tokens, np.array([tokens[lane]], dtype=np.int32))
        seq.append(tokens[lane])
        if seq.is_stop(tokens[lane]):
            yield seq, FinishReason.STOP, None, ""
        elif seq.num_tokens >= seq.max_total_tokens:
            yield seq, FinishReason.LENGTH, None, ""


def _commit_departed(seq: Sequence, lease: Lease) -> None:
    last = seq.num_computed_tokens // lease.block_size
    for block in range(seq.num_committed_blocks, last):
        lease.commit(seq, block, seq.token_ids)
    seq.num_committed_blocks = max(seq.num_committed_blocks, last)


def _logprobs(step: Step, result: StepResult, lanes: LaneTable, updates: UpdateLog) -> None:
    """Before tokens are accepted: the offset of a sampled token is the number accepted so far."""
    for entry in result.logprobs:
        seq = step.departed.get(entry.lane) or lanes.occupant(entry.lane)
        if entry.lane in step.departed:
            if seq.status is not SequenceStatus.FINISHED:
                updates.add_logprobs(seq, seq.num_output_tokens, entry.logprobs)
            continue
        offset = int(lanes.accepted_tokens[entry.lane] - lanes.prompt_tokens[entry.lane])
        updates.add_logprobs(seq, offset, entry.logprobs)
    for prompt in result.prompt_logprobs:
        seq = step.departed.get(prompt.lane) or lanes.occupant(prompt.lane)
        if seq.status is not SequenceStatus.FINISHED:
            updates.add_prompt_logprobs(seq, prompt.first, prompt.logprobs)
