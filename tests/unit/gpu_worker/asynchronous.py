"""A model that is asynchronous by construction: a step that is submitted has computed nothing until
it is collected, so whoever needs its tokens before that has not got them.
"""

from __future__ import annotations

import dataclasses
from collections import deque

import numpy as np

from gpu_worker.executor import EngineShape
from gpu_worker.inputs import CopyLists, PenaltyBatch, StepInputs, StepOutputs
from gpu_worker.shadow import ShadowModel


class SpottyModel(ShadowModel):
    """Some of its rows are not finite. counted: what each step was told for penalties."""

    def __init__(self, shape: EngineShape) -> None:
        super().__init__(
            num_blocks=shape.num_blocks,
            block_size=shape.block_size,
            vocab_size=shape.vocab_size,
            host_blocks=shape.host_blocks,
        )
        self.counted: list[list[object] | None] = []

    def execute(self, inputs: StepInputs) -> StepOutputs:
        outputs = super().execute(inputs)
        finite = outputs.token_ids % 11 != 0
        self.counted.append(_listed(inputs.penalties))
        return dataclasses.replace(
            outputs, finite=finite, token_ids=np.where(finite, outputs.token_ids, 0)
        )


def _listed(penalties: PenaltyBatch | None) -> list[object] | None:
    return None if penalties is None else [column.tolist() for column in penalties]


class AsynchronousModel:
    """`model` behind a queue of steps and copies, of which none runs before a step is collected.

    Checks that at most two steps are in it, that they are collected in order and once, and that
    what is copied on behalf of a step runs between its neighbours. max_begun: the most steps seen.
    full: ids of submissions, from 1, which find no memory when submitted, or when collected.
    """

    def __init__(self, model: ShadowModel, num_lanes: int) -> None:
        self._model = model
        self._last_tokens = np.zeros(num_lanes, dtype=np.int32)
        self._queue: deque[StepInputs | CopyLists] = deque()
        self._outputs: deque[tuple[StepInputs, StepOutputs]] = deque()
        self.full_at_submit: set[int] = set()
        self.full_at_collect: set[int] = set()
        self.num_submitted = self.num_collected = self.max_begun = 0

    def execute(self, inputs: StepInputs) -> StepOutputs:
        raise AssertionError("a step is computed while the host waits")

    def copy_blocks(self, copies: CopyLists) -> None:
        self._queue.append(copies)

    def submit(self, inputs: StepInputs) -> StepInputs:
        self.num_submitted += 1
        if self.num_submitted in self.full_at_submit:
            self.num_submitted -= 1
            self.full_at_submit.clear()
            raise MemoryError
        self.max_begun = max(self.max_begun, self.num_submitted - self.num_collected)
        assert self.max_begun <= 2, "a third step is queued"
        self._queue.append(inputs)
        return inputs

    def wait(self, submitted: StepInputs) -> None:
        """It is always about to end."""

    def collect(self, submitted: StepInputs) -> StepOutputs:
        self.num_collected += 1
        while self._queue:
            work = self._queue.popleft()
            if isinstance(work, CopyLists):
                self._model.copy_blocks(work)
                continue
            assert work is submitted, "steps are collected in order"
            if self.num_collected in self.full_at_collect:
                raise MemoryError
            return self._compute(work)
        raise AssertionError("the step was never submitted, or is collected twice")

    def _compute(self, inputs: StepInputs) -> StepOutputs:
        fed, kept = inputs.input_lanes, inputs.output_lanes
        if fed is not None:
            assert inputs.penalties is None, "penalties count tokens that are not known"
            token_ids = np.where(fed >= 0, self._last_tokens[fed], inputs.input_ids)
            inputs = dataclasses.replace(inputs, input_ids=token_ids)
        outputs = self._model.execute(inputs)
        assert kept is not None
        self._last_tokens[kept] = outputs.token_ids
        return outputs
