"""What a plan computes, told from its diffs."""

from __future__ import annotations

import pytest

from services.contracts.errors import InvariantError
from services.contracts.sampling import SamplingParams
from services.contracts.step import LaneJoin, StepPlan
from services.contracts.vectors import pack
from services.simulator.capacity.lane_tracker import LaneTracker
from services.simulator.capacity.step_time import StepLoad


def _join(lane: int, owner: int, length: int, computed: int = 0) -> LaneJoin:
    return LaneJoin(
        lane=lane,
        token_ids=pack([owner, *[1] * (length - 1)]),
        num_computed_tokens=computed,
        num_prompt_tokens=length,
        sampling=SamplingParams(),
    )


def _plan(step_id: int, **fields: object) -> StepPlan:
    return StepPlan(generation=1, epoch=1, number=step_id, step_id=step_id, **fields)  # type: ignore[arg-type]


def test_the_worked_example_of_a_mixed_step() -> None:
    """Prompts of 5 and 3 tokens, and a sequence with 100 cached tokens and 2 new ones."""
    tracker = LaneTracker(4)
    scheduled = tracker.apply(
        _plan(
            1,
            join=[_join(0, 7, 5), _join(1, 8, 102, computed=100), _join(3, 9, 3)],
            chunk_lanes=pack([0, 1, 3]),
            chunk_tokens=pack([5, 2, 3]),
        )
    )
    assert scheduled.load == StepLoad(3, 0, 10, 5 + 102 + 3)
    assert scheduled.sampled.tolist() == [0, 1, 3]
    assert scheduled.owners.tolist() == [7, 8, 9]
    assert scheduled.lanes.tolist() == [0, 1, 3]
    assert scheduled.num_outputs.tolist() == [1, 1, 1]


def test_a_partial_chunk_samples_nothing_and_the_others_decode() -> None:
    tracker = LaneTracker(2)
    joins = [_join(0, 1, 2), _join(1, 2, 10)]
    lanes = pack([0, 1])
    first = tracker.apply(_plan(1, join=joins, chunk_lanes=lanes, chunk_tokens=pack([2, 4])))
    assert first.sampled.tolist() == [0]
    second = tracker.apply(_plan(2, chunk_lanes=pack([1]), chunk_tokens=pack([6])))
    assert second.load == StepLoad(2, 1, 6, 3 + 10)
    assert second.sampled.tolist() == [0, 1]
    third = tracker.apply(_plan(3))
    assert third.load == StepLoad(2, 2, 0, 4 + 11)
    assert third.sampled_owners.tolist() == [1, 2]
    assert third.num_outputs.tolist() == [3, 2]


def test_held_lanes_stand_still_and_left_ones_are_gone() -> None:
    tracker = LaneTracker(3)
    joins = [_join(lane, lane, 1) for lane in range(3)]
    ones = pack([1, 1, 1])
    tracker.apply(_plan(1, join=joins, chunk_lanes=pack([0, 1, 2]), chunk_tokens=ones))
    held = tracker.apply(_plan(2, leave=pack([0]), hold=pack([1])))
    assert held.lanes.tolist() == [2]
    assert tracker.apply(_plan(3)).lanes.tolist() == [1, 2]


def test_a_plan_without_decodes_moves_its_chunks_alone() -> None:
    tracker = LaneTracker(2)
    tracker.apply(_plan(1, join=[_join(0, 0, 1)], chunk_lanes=pack([0]), chunk_tokens=pack([1])))
    prefill = _plan(
        2, decode=False, join=[_join(1, 1, 4)], chunk_lanes=pack([1]), chunk_tokens=pack([4])
    )
    assert tracker.apply(prefill).load == StepLoad(1, 0, 4, 4)


def test_contradictions_are_found() -> None:
    tracker = LaneTracker(2)
    first = _plan(1, join=[_join(0, 0, 8)], chunk_lanes=pack([0]), chunk_tokens=pack([3]))
    tracker.apply(first)
    with pytest.raises(InvariantError, match="still catching up"):
        tracker.apply(_plan(2))
    with pytest.raises(InvariantError, match="taken"):
        tracker.apply(first)
    with pytest.raises(InvariantError, match="nobody knows"):
        tracker.apply(
            _plan(
                3, reset=True, join=[_join(1, 0, 2)], chunk_lanes=pack([1]), chunk_tokens=pack([3])
            )
        )
