"""One buffer holds a step's arrays, each in its type, and gives them back."""

from __future__ import annotations

import dataclasses

import torch

from gpu_worker.inputs import StepInputs
from gpu_worker.staging import Staging, StepTensors, view_inputs
from tests.models.driver import Lane, step_inputs

CPU = torch.device("cpu")


def step(*counts: int) -> StepInputs:
    lanes = [Lane(list(range(n, n + 9)), 1, 0.5, seed=n, num_computed=0) for n in counts]
    for at, lane in enumerate(lanes):
        lane.blocks = [3 * at + 1, 3 * at + 2, 3 * at + 3]
    return step_inputs(list(zip(lanes, counts, strict=True)), [(0, lanes[0])], 4)


def columns(tensors: StepTensors) -> dict[str, torch.Tensor]:
    batch = {
        field.name: getattr(tensors.batch, field.name)
        for field in dataclasses.fields(tensors.batch)
    }
    return {
        **{name: value for name, value in batch.items() if isinstance(value, torch.Tensor)},
        "logits_rows": tensors.logits_rows,
        **tensors.draws._asdict(),
    }


def test_staged_arrays_are_those_that_are_viewed() -> None:
    staging = Staging(CPU, no_lane=7, num_words=8)
    # Odd numbers of everything, then a step for which the buffer has grown.
    for inputs in (step(3), step(1, 5, 9), step(1)):
        staging.stage(inputs)
        staged, viewed = staging.tensors(inputs), view_inputs(inputs)
        for name, expected in columns(viewed).items():
            found = columns(staged)[name]
            assert found.dtype == expected.dtype and torch.equal(found, expected), name
            assert found.data_ptr() % 16 == 0, name
        assert torch.equal(staging.table(inputs), viewed.batch.block_table)
        assert staged.batch.max_seqlen_k == viewed.batch.max_seqlen_k
        assert staged.input_lanes is not None and staged.output_lanes is not None
        assert staged.input_lanes.tolist() == [-1] * len(inputs.input_ids)
        assert staged.output_lanes.tolist() == [7]


def test_a_step_of_the_same_size_lies_where_the_one_before_lay() -> None:
    staging = Staging(CPU, no_lane=7)
    first, second = step(1, 1), step(1, 1)
    # A table of another width is the only thing that may differ.
    second = dataclasses.replace(second, block_table=second.block_table[:, :1])
    staging.stage(first)
    before = columns(staging.tensors(first))
    staging.stage(second)
    after = columns(staging.tensors(second))
    for name, tensor in before.items():
        assert tensor.data_ptr() == after[name].data_ptr(), name
