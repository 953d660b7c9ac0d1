"""The shadow model is the simulator's witness: whatever is wrong in the inputs changes its
token.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from gpu_worker.inputs import StepInputs
from gpu_worker.shadow import ShadowModel, expected_token_ids
from tests.unit.gpu_worker.plans import join, mirror, plan

PROMPT = [5, 6, 7, 8, 9, 10]


def model(*, verify: bool = True) -> ShadowModel:
    return ShadowModel(num_blocks=32, block_size=4, vocab_size=512, verify=verify)


def inputs_of(chunk: int = 6) -> StepInputs:
    lanes = mirror(block_size=4)
    return lanes.inputs(lanes.apply(plan(joins=[join(0, PROMPT, [3, 9])], chunks={0: chunk})))[0]


@pytest.mark.parametrize("verify", [True, False])
def test_tokens_are_those_of_the_definition(verify: bool) -> None:
    shadow, lanes = model(verify=verify), mirror(block_size=4)
    diffs = [plan(joins=[join(0, PROMPT, [3, 9, 5])], chunks={0: 6})]
    diffs += [plan(step_id) for step_id in range(2, 6)]
    got: list[int] = []
    for diff in diffs:
        scheduled = lanes.apply(diff)
        outputs = shadow.execute(lanes.inputs(scheduled)[0])
        lanes.accept(lanes.advance(scheduled), outputs.token_ids)
        got += outputs.token_ids.tolist()
    assert got == expected_token_ids(np.array(PROMPT, np.int32), 5, 512)


def test_chunks_do_not_change_them() -> None:
    shadow, lanes = model(), mirror(block_size=4)
    for step_id, chunk in enumerate([1, 2, 3], 1):
        joins = [join(0, PROMPT, [3, 9])] if step_id == 1 else []
        scheduled = lanes.apply(plan(step_id, joins=joins, chunks={0: chunk}))
        outputs = shadow.execute(lanes.inputs(scheduled)[0])
        lanes.accept(lanes.advance(scheduled), outputs.token_ids)
    assert outputs.token_ids.tolist() == expected_token_ids(np.array(PROMPT, np.int32), 1, 512)


@pytest.mark.parametrize("name", ["slot_mapping", "positions", "block_table", "seqlens_k"])
def test_a_wrong_array_changes_the_token(name: str) -> None:
    right = inputs_of()
    wrong = getattr(right, name).copy()
    if name == "slot_mapping":
        wrong[:2] = wrong[1::-1].copy()
    elif name == "block_table":
        wrong = wrong[:, ::-1].copy()
    else:
        wrong[-1] -= 1
    broken = dataclasses.replace(right, **{name: wrong})
    honest = model().execute(right).token_ids.tolist()
    assert model().execute(broken).token_ids.tolist() != honest


def test_two_writers_of_one_slot_are_caught() -> None:
    right = inputs_of()
    broken = dataclasses.replace(right, slot_mapping=np.full(6, 40, dtype=np.int64))
    with pytest.raises(AssertionError, match="one slot"):
        model().execute(broken)


def test_the_null_block_is_never_written() -> None:
    right = inputs_of()
    broken = dataclasses.replace(right, slot_mapping=np.arange(6, dtype=np.int64))
    with pytest.raises(AssertionError, match="null block"):
        model().execute(broken)


def test_every_token_and_its_place_count() -> None:
    base = expected_token_ids(np.array(PROMPT, np.int32), 8, 512)
    for index in range(len(PROMPT)):
        changed = PROMPT.copy()
        changed[index] += 1
        assert expected_token_ids(np.array(changed, np.int32), 8, 512) != base
    assert expected_token_ids(np.array(PROMPT[::-1], np.int32), 8, 512) != base
