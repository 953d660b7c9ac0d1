"""Plan diffs applied to lanes, and the packed inputs, to the number."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from gpu_worker.mirror import Mirror, Scheduled, Target
from services.contracts.errors import InvariantError
from services.contracts.step import StepPlan
from services.contracts.vectors import pack
from tests.unit.gpu_worker.plans import join, mirror, plan


def step(lanes: Mirror, diff: StepPlan, token: int = 9) -> Scheduled:
    """Apply, and let every sampled row get `token`."""
    scheduled = lanes.apply(diff)
    lanes.inputs(scheduled)
    lanes.accept(lanes.advance(scheduled), np.full(len(scheduled.sampled), token, dtype=np.int32))
    return scheduled


def test_the_worked_example_of_the_design() -> None:
    """Prompts of 5 and 3 tokens, and 2 new tokens after 100 cached ones, as three chunks."""
    lanes = mirror()
    cached = list(range(200, 302))
    diff = plan(
        joins=[
            join(0, [1, 2, 3, 4, 5], [9]),
            join(1, cached, [1, 2, 3, 4, 5, 6, 7], computed=100),
            join(2, [6, 7, 8], [8]),
        ],
        chunks={0: 5, 1: 2, 2: 3},
    )
    scheduled = lanes.apply(diff)
    inputs, _ = lanes.inputs(scheduled)
    assert np.diff(inputs.cu_seqlens_q).tolist() == [5, 2, 3]
    assert inputs.seqlens_k.tolist() == [5, 102, 3]
    assert inputs.cu_seqlens_q.tolist() == [0, 5, 7, 10]
    assert np.cumsum([0, *inputs.seqlens_k]).tolist() == [0, 5, 107, 110]
    assert inputs.positions.tolist() == [0, 1, 2, 3, 4, 100, 101, 0, 1, 2]
    assert inputs.input_ids.tolist() == [1, 2, 3, 4, 5, 300, 301, 6, 7, 8]
    # Position 100 is slot 4 of the seventh block: 7 x 16 + 4.
    assert inputs.slot_mapping.tolist() == [144, 145, 146, 147, 148, 116, 117, 128, 129, 130]
    assert inputs.block_table.tolist() == [
        [9, 0, 0, 0, 0, 0, 0],
        [1, 2, 3, 4, 5, 6, 7],
        [8, 0, 0, 0, 0, 0, 0],
    ]
    assert inputs.logits_rows.tolist() == [4, 6, 9]
    assert inputs.num_decodes == 0
    assert inputs.sampling.position.tolist() == [5, 102, 3]


def test_decodes_come_first_then_chunks_in_the_plans_order() -> None:
    lanes = mirror()
    step(lanes, plan(joins=[join(2, [1, 2], [5])], chunks={2: 2}), token=33)
    scheduled = lanes.apply(
        plan(2, joins=[join(0, [6, 7, 8], [6]), join(1, [4] * 20, [7, 8])], chunks={1: 18, 0: 3})
    )
    assert scheduled.lanes.tolist() == [2, 1, 0]
    assert scheduled.counts.tolist() == [1, 18, 3] and scheduled.num_decodes == 1
    # Sampled: lane 0 (row 2) and lane 2 (row 0), in lane order; lane 1 is still catching up.
    assert scheduled.sampled.tolist() == [2, 0] and scheduled.sampled_lanes.tolist() == [0, 2]
    inputs, _ = lanes.inputs(scheduled)
    assert inputs.cu_seqlens_q.tolist() == [0, 1, 19, 22]
    assert inputs.seqlens_k.tolist() == [3, 18, 3]
    assert inputs.input_ids[0] == 33 and inputs.positions[0] == 2
    assert inputs.slot_mapping[0] == 5 * 16 + 2
    assert inputs.logits_rows.tolist() == [21, 0]


def test_a_chunked_prompt_goes_on_where_it_stopped() -> None:
    lanes = mirror(block_size=4)
    step(lanes, plan(joins=[join(0, list(range(10)), [3])], chunks={0: 4}))
    scheduled = lanes.apply(plan(2, chunks={0: 4}, append=[(0, 7)]))
    inputs, _ = lanes.inputs(scheduled)
    assert inputs.positions.tolist() == [4, 5, 6, 7]
    assert inputs.slot_mapping.tolist() == [28, 29, 30, 31]
    assert not len(scheduled.sampled)
    lanes.accept(lanes.advance(scheduled), np.zeros(0, dtype=np.int32))
    scheduled = step(lanes, plan(3, chunks={0: 2}, append=[(0, 2)]), token=99)
    assert scheduled.sampled_lanes.tolist() == [0]
    inputs, _ = lanes.inputs(lanes.apply(plan(4)))
    assert inputs.input_ids.tolist() == [99] and inputs.positions.tolist() == [10]
    assert inputs.slot_mapping.tolist() == [2 * 4 + 2]
    assert inputs.block_table.tolist() == [[3, 7, 2]]


def test_held_lanes_stand_still() -> None:
    lanes = mirror()
    step(lanes, plan(joins=[join(0, [1], [1]), join(1, [2], [2])], chunks={0: 1, 1: 1}))
    assert step(lanes, plan(2, hold=[0])).lanes.tolist() == [1]
    scheduled = step(lanes, plan(3))
    assert scheduled.lanes.tolist() == [0, 1]
    assert lanes.rows.tokens[:2].tolist() == [3, 4]


def test_decode_false_lets_only_chunks_run() -> None:
    lanes = mirror()
    step(lanes, plan(joins=[join(0, [1], [1])], chunks={0: 1}))
    scheduled = lanes.apply(plan(2, joins=[join(1, [2], [2])], chunks={1: 1}, decode=False))
    assert scheduled.lanes.tolist() == [1]


def test_a_lane_left_and_taken_in_one_plan_is_a_new_sequence() -> None:
    lanes = mirror(block_size=4)
    step(lanes, plan(joins=[join(0, [1] * 9, [1, 2, 3])], chunks={0: 9}))
    scheduled = lanes.apply(plan(2, leave=[0], joins=[join(0, [5, 6], [4])], chunks={0: 2}))
    inputs, _ = lanes.inputs(scheduled)
    assert inputs.input_ids.tolist() == [5, 6] and inputs.seqlens_k.tolist() == [2]
    assert inputs.block_table.tolist() == [[4]]


def test_stale_blocks_of_the_lane_before_read_as_the_null_block() -> None:
    lanes = mirror(block_size=4)
    step(lanes, plan(joins=[join(0, [1] * 9, [1, 2, 3])], chunks={0: 9}))
    step(lanes, plan(2, leave=[0], joins=[join(0, [5], [4]), join(1, [6] * 9, [5, 6, 7])],
                     chunks={0: 1, 1: 9}))  # fmt: skip
    inputs, _ = lanes.inputs(lanes.apply(plan(3)))
    assert inputs.block_table.tolist() == [[4, 0, 0], [5, 6, 7]]


def test_a_reset_empties_every_lane() -> None:
    lanes = mirror()
    step(lanes, plan(joins=[join(0, [1], [1]), join(3, [2], [2])], chunks={0: 1, 3: 1}))
    scheduled = lanes.apply(plan(1, reset=True, joins=[join(3, [7], [2])], chunks={3: 1}))
    assert scheduled.lanes.tolist() == [3]


def test_the_last_token_of_the_model_length_is_reported_and_never_computed() -> None:
    lanes = mirror(max_model_len=3)
    scheduled = step(lanes, plan(joins=[join(0, [1, 2, 3], [1])], chunks={0: 3}))
    assert scheduled.sampled_lanes.tolist() == [0]
    assert lanes.rows.token_ids[0].tolist() == [1, 2, 3]


def test_sampling_follows_the_lane() -> None:
    lanes = mirror()
    scheduled = lanes.apply(
        plan(
            joins=[
                join(1, [1, 2], [1], temperature=0.5, top_k=7, seed=2**64 - 1, num_logprobs=3),
                join(0, [3], [2]),
            ],
            chunks={1: 2, 0: 1},
        )
    )
    sampling = lanes.inputs(scheduled)[0].sampling
    assert sampling.temperature.tolist() == [0.0, 0.5] and sampling.top_k.tolist() == [0, 7]
    assert sampling.seed.tolist() == [0, 2**64 - 1] and sampling.num_logprobs.tolist() == [-1, 3]
    assert sampling.position.tolist() == [1, 2]


def _penalties(lanes: Mirror, scheduled: Scheduled) -> dict[int, dict[int, int]]:
    """Counts by row and token, of what the sampled rows have."""
    batch = lanes.inputs(scheduled)[0].penalties
    assert batch is not None
    found: dict[int, dict[int, int]] = {}
    for row, token, count in zip(batch.rows, batch.token_ids, batch.counts, strict=True):
        found.setdefault(int(row), {})[int(token)] = int(count)
    return found


def test_penalties_count_the_lanes_that_ask_and_a_lane_that_comes_back() -> None:
    lanes = mirror()
    asked = {"presence_penalty": 0.5, "repetition_penalty": 1.25}
    joins = [join(0, [3], [1]), join(2, [7, 7, 8], [2], **asked)]
    scheduled = step(lanes, plan(joins=joins, chunks={0: 1, 2: 3}), 8)
    assert scheduled.sampled_lanes.tolist() == [0, 2]
    scheduled = lanes.apply(plan(2))
    assert _penalties(lanes, scheduled) == {1: {7: 0, 8: 1}}
    batch = lanes.inputs(scheduled)[0].penalties
    assert batch is not None and batch.factors.tolist() == [[1.0, 0.0, 0.0], [1.25, 0.5, 0.0]]
    lanes.accept(lanes.advance(scheduled), np.array([5, 9], dtype=np.int32))
    # Preempted, and back in another lane with its output among its tokens.
    back = join(1, [7, 7, 8, 8, 9], [3], prompt=3, **asked)
    scheduled = lanes.apply(plan(3, leave=[2], joins=[back], chunks={1: 5}))
    assert _penalties(lanes, scheduled) == {1: {7: 0, 8: 1, 9: 1}}
    # Its lane is another's now, which asks for nothing.
    lanes.accept(lanes.advance(scheduled), np.array([5, 9], dtype=np.int32))
    scheduled = lanes.apply(plan(4, leave=[1], joins=[join(1, [4], [3])], chunks={1: 1}))
    assert lanes.inputs(scheduled)[0].penalties is None


def test_prompt_logprobs_cover_the_prompt_once_across_chunks() -> None:
    lanes = mirror()
    prompt = [10, 11, 12, 13, 14]
    diff = plan(joins=[join(0, prompt, [1], num_prompt_logprobs=1)], chunks={0: 3})
    scheduled = lanes.apply(diff)
    inputs, targets = lanes.inputs(scheduled)
    assert targets == [Target(0, 1)]
    assert inputs.prompt_logprobs[0].target_ids.tolist() == [11, 12, 13]
    lanes.accept(lanes.advance(scheduled), np.zeros(0, dtype=np.int32))
    scheduled = lanes.apply(plan(2, chunks={0: 2}))
    inputs, targets = lanes.inputs(scheduled)
    assert targets == [Target(0, 4)]
    request = inputs.prompt_logprobs[0]
    assert (request.first_row, request.num_rows, request.target_ids.tolist()) == (0, 1, [14])
    lanes.accept(lanes.advance(scheduled), np.array([9], dtype=np.int32))
    assert lanes.inputs(lanes.apply(plan(3)))[1] == []


ONE = [join(0, [1, 2], [1])]


@pytest.mark.parametrize(
    "diff",
    [
        plan(leave=[1]),
        plan(leave=[99]),
        plan(leave=[-1]),
        plan(joins=[*ONE, *ONE], chunks={0: 2}),
        plan(joins=[join(4, [1], [1])], chunks={4: 1}),
        plan(joins=[join(0, [], [1])]),
        plan(joins=[join(0, [1, 2], [1], computed=2)], chunks={0: 1}),
        plan(joins=[join(0, [1] * 129, [1])], chunks={0: 1}),
        plan(joins=[join(0, [1], [0])], chunks={0: 1}),
        plan(joins=[join(0, [1], [32])], chunks={0: 1}),
        plan(joins=[join(0, [1], list(range(1, 10)))], chunks={0: 1}),
        plan(append=[(1, 5)]),
        plan(append=[(99, 5)]),
        plan(joins=ONE, chunks={0: 3}),
        plan(joins=ONE, chunks={0: 0}),
        plan(joins=ONE, chunks={0: -1}),
        plan(joins=ONE),
        plan(joins=ONE, chunks={1: 1}),
        plan(joins=ONE, chunks={99: 1}),
        plan(joins=ONE, chunks={-4: 2}),
        plan(joins=ONE, chunks={0: 2}, hold=[99]),
        plan(joins=[join(0, [1] * 17, [1])], chunks={0: 17}),
        msgspec.structs.replace(
            plan(joins=ONE), chunk_lanes=pack([0, 0]), chunk_tokens=pack([1, 1])
        ),
        msgspec.structs.replace(plan(joins=ONE), chunk_lanes=pack([0]), chunk_tokens=pack([1, 1])),
        msgspec.structs.replace(plan(joins=ONE, chunks={0: 2}), append_lanes=pack([0])),
    ],
    ids=lambda diff: f"leave {len(diff.leave)} join {len(diff.join)} chunk {len(diff.chunk_lanes)}",
)
def test_a_plan_that_cannot_be_stops_the_worker(diff: StepPlan) -> None:
    with pytest.raises(InvariantError, match="contradicts"):
        mirror().apply(diff)
