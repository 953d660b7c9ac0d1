"""From plan to result: the worker's state machine around a model, without clock or bus.

Plans are idempotent by (generation, epoch, step_id): a duplicate is ignored, a gap is waited out
(the scheduler polls), another epoch's plan is dropped. The last results are kept, so that a poll
can give one again. After a step for which there is no memory no step of its epoch runs, because
each plan counts on those before it.

Pure: the model is whatever has `execute(StepInputs) -> StepOutputs` and can copy blocks; it raises
MemoryError where it has none.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from gpu_worker.inputs import CopyLists, StepInputs, StepOutputs, TokenLogprobs
from services.contracts.limits import KEPT_PLANS
from services.contracts.sequences import Logprobs
from services.contracts.step import (
    Attach,
    Attached,
    LaneLogprobs,
    LanePromptLogprobs,
    Poll,
    PollReply,
    PollState,
    StepPlan,
    StepResult,
)
from services.contracts.vectors import pack

from .mirror import Mirror, Scheduled, Target


class Model(Protocol):
    def execute(self, inputs: StepInputs) -> StepOutputs: ...

    def copy_blocks(self, copies: CopyLists) -> None: ...


@dataclass(frozen=True, slots=True)
class EngineShape:
    """What this worker can hold: lanes, tokens of a sequence, blocks in the pool and in host
    memory, and its model's vocabulary. copy_block_us: measured, 0 where unknown.
    """

    max_num_seqs: int
    max_model_len: int
    block_size: int
    num_blocks: int
    vocab_size: int
    host_blocks: int = 0
    copy_block_us: int = 0


class Executor:
    """Plans in, results out, one at a time.

    admit: may be called while a step runs; run: by the thread that computes; the caller keeps the
    two apart. step_tokens: of the step that runs, or ran last. ledger: whose books say what lies in
    the blocks, for a scheduler that is new.
    """

    def __init__(self, model: Model, generation: int, shape: EngineShape) -> None:
        self._model = model
        self._mirror = Mirror(
            max_num_seqs=shape.max_num_seqs,
            max_model_len=shape.max_model_len,
            block_size=shape.block_size,
            num_blocks=shape.num_blocks,
            host_blocks=shape.host_blocks,
        )
        self.shape = shape
        self.generation = generation
        self.epoch = 0
        self.last_queued = 0
        self.last_done = 0
        self.step_tokens = 0
        self.ledger = ""
        self.dropped: Counter[str] = Counter()
        self._results: OrderedDict[int, StepResult] = OrderedDict()
        self._attached: Attached | None = None
        self._void_epoch = 0

    # ---- who may speak

    def attach(self, request: Attach) -> Attached:
        """A new epoch, above all seen. The caller has dropped queued plans and no step runs."""
        if self._attached is not None and self.is_repeated(request):
            return self._attached
        self.epoch = max(self.epoch, request.epoch_seen) + 1
        self.last_queued = self.last_done = 0
        self._results.clear()
        self._attached = Attached(
            attempt=request.attempt,
            generation=self.generation,
            epoch=self.epoch,
            num_blocks=self.shape.num_blocks,
            block_size=self.shape.block_size,
            max_num_seqs=self.shape.max_num_seqs,
            max_model_len=self.shape.max_model_len,
            vocab_size=self.shape.vocab_size,
            host_blocks=self.shape.host_blocks,
            copy_block_us=self.shape.copy_block_us,
            ledger=self.ledger,
        )
        return self._attached

    def is_repeated(self, request: Attach) -> bool:
        """The present owner asks again: what it has queued since the first answer stands."""
        return self._attached is not None and self._attached.attempt == request.attempt

    def admit(self, plan: StepPlan) -> bool:
        """True where `plan` is the next one to queue; else it is counted and dropped."""
        if (plan.generation, plan.epoch) != (self.generation, self.epoch):
            self.dropped["stale_plan"] += 1
        elif plan.step_id <= self.last_queued:
            self.dropped["duplicate_plan"] += 1
        elif plan.step_id > self.last_queued + 1:
            self.dropped["plan_gap"] += 1
        else:
            self.last_queued = plan.step_id
            return True
        return False

    def poll(self, request: Poll) -> PollReply:
        state = PollState.UNKNOWN
        result = self._results.get(request.step_id)
        if result is not None:
            state = PollState.RESULT
        elif self.last_done < request.step_id <= self.last_queued:
            state = PollState.RUNNING
        return PollReply(
            generation=self.generation,
            epoch=self.epoch,
            step_id=request.step_id,
            state=state,
            result=result,
        )

    # ---- the step

    def run(self, plan: StepPlan) -> StepResult:
        """Apply, compute, sample; durations are the caller's to add. Raises InvariantError on a
        plan that cannot be.
        """
        self.ledger = plan.ledger or self.ledger
        if plan.epoch != self._void_epoch:
            try:
                return self._compute(plan)
            except MemoryError:
                pass
        return self.give_up(plan)

    def give_up(self, plan: StepPlan) -> StepResult:
        """The result of a step for which there is no memory; nor does any later one of its epoch
        run.
        """
        self._void_epoch = plan.epoch
        return StepResult(
            generation=plan.generation,
            epoch=plan.epoch,
            number=plan.number,
            step_id=plan.step_id,
            out_of_memory=True,
        )

    def _compute(self, plan: StepPlan) -> StepResult:
        scheduled = self._mirror.apply(plan)
        copies = self._mirror.copies(plan)
        if copies is not None:
            self._model.copy_blocks(copies)
        inputs, targets = self._mirror.inputs(scheduled)
        self.step_tokens = len(inputs.input_ids)
        outputs = self._model.execute(inputs)
        self._mirror.accept(scheduled, outputs.token_ids)
        return self._result(plan, scheduled, outputs, targets)

    def remember(self, result: StepResult) -> None:
        """Keep `result` for polls; one of an epoch before, which ended while an attach waited, is
        nobody's any more.
        """
        if result.epoch != self.epoch:
            return
        self.last_done = result.step_id
        self._results[result.step_id] = result
        while len(self._results) > KEPT_PLANS:
            self._results.popitem(last=False)

    def _result(
        self,
        plan: StepPlan,
        scheduled: Scheduled,
        outputs: StepOutputs,
        targets: list[Target],
    ) -> StepResult:
        lanes = scheduled.sampled_lanes
        return StepResult(
            generation=plan.generation,
            epoch=plan.epoch,
            number=plan.number,
            step_id=plan.step_id,
            lanes=pack(lanes),
            token_ids=pack(outputs.token_ids),
            failed=pack(lanes[~outputs.finite]),
            logprobs=[
                LaneLogprobs(lane, _columns([entry]))
                for lane, entry in zip(lanes.tolist(), outputs.logprobs, strict=True)
                if entry is not None
            ],
            prompt_logprobs=[
                LanePromptLogprobs(target.lane, target.first, _columns([e for e in entries if e]))
                for target, entries in zip(targets, outputs.prompt_logprobs, strict=True)
                if all(entry is not None for entry in entries)
            ],
        )


def _columns(entries: list[TokenLogprobs]) -> Logprobs:
    return Logprobs(
        np.array([entry.chosen_logprob for entry in entries], dtype="<f4").tobytes(),
        pack(np.concatenate([entry.ids for entry in entries])),
        np.concatenate([entry.values for entry in entries]).astype("<f4").tobytes(),
    )
