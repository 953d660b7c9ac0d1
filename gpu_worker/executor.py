"""From plan to result: the worker's state machine around a model, without clock or bus.

Plans are idempotent by (generation, epoch, step_id): a duplicate is ignored, a gap is waited out
(the scheduler polls), another epoch's plan is dropped. The last results are kept, so that a poll
can give one again. After a step for which there is no memory no step of its epoch runs, because
each plan counts on those before it. Steps end in the order in which they begin; where the device
computes on its own, a second one may begin before the first has ended.

Pure: the model is whatever has `execute(StepInputs) -> StepOutputs` and can copy blocks; it raises
MemoryError where it has none.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from gpu_worker.inputs import CopyLists, StepInputs, StepOutputs, TokenLogprobs
from services.contracts.limits import KEPT_PLANS, MAX_STEPS_IN_FLIGHT
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

from .mirror import Awaited, Mirror, Target


class Model(Protocol):
    def execute(self, inputs: StepInputs) -> StepOutputs: ...

    def copy_blocks(self, copies: CopyLists) -> None: ...


class Device(Protocol):
    """Computes on its own, in order: `submit` returns while the step is still to run. At most two
    steps are on it. `wait` returns when one has ended, and may be called from any thread.
    """

    def submit(self, inputs: StepInputs) -> Any: ...

    def wait(self, submitted: Any) -> None: ...

    def collect(self, submitted: Any) -> StepOutputs: ...


class _Work(NamedTuple):
    awaited: Awaited
    targets: list[Target]
    submitted: Any


@dataclass(frozen=True, slots=True, eq=False)
class Begun:
    """A step that has begun, of so many tokens; work: None where there is no memory for it."""

    plan: StepPlan
    num_tokens: int = 0
    work: _Work | None = None


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
    """Plans in, results out, in order; one at a time, or with a `device` two.

    admit: may be called while a step runs; begin, finish and run: by the thread that computes; the
    caller keeps the two apart. step_tokens: of the step that runs, or ran last. ledger: whose books
    say what lies in the blocks, for a scheduler that is new.
    """

    def __init__(
        self, model: Model, generation: int, shape: EngineShape, device: Device | None = None
    ) -> None:
        self._model = model
        self._mirror = Mirror(
            max_num_seqs=shape.max_num_seqs,
            max_model_len=shape.max_model_len,
            block_size=shape.block_size,
            num_blocks=shape.num_blocks,
            host_blocks=shape.host_blocks,
            ahead=device is not None,
        )
        self._device = device
        self._begun: deque[Begun] = deque()
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
        self._void_from = (0, 0)

    # ---- who may speak

    def attach(self, request: Attach) -> Attached:
        """A new epoch, above all seen. The caller has dropped queued plans and no step runs."""
        assert not self._begun, "a step of the epoch before still runs"
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

    @property
    def runs_ahead(self) -> bool:
        """Whether a step may begin before the one before it has ended."""
        return self._device is not None

    def run(self, plan: StepPlan) -> StepResult:
        """Apply, compute, sample; durations are the caller's to add. Raises InvariantError on a
        plan that cannot be.
        """
        return self.finish(self.begin(plan))

    def can_begin(self, plan: StepPlan) -> bool:
        """Whether `plan` may begin now, or has to wait until the step before it is finished."""
        if not self._begun:
            return True
        room = self.runs_ahead and len(self._begun) < MAX_STEPS_IN_FLIGHT
        return room and not self._mirror.needs_tokens(plan)

    def begin(self, plan: StepPlan) -> Begun:
        """Apply `plan`, and give the device its step; without a device it is computed by finish."""
        assert not self._begun or self.can_begin(plan)
        self.ledger = plan.ledger or self.ledger
        if self._is_void(plan):
            return self.give_up(plan)
        num_tokens = 0
        try:
            scheduled = self._mirror.apply(plan)
            copies = self._mirror.copies(plan)
            if copies is not None:
                self._model.copy_blocks(copies)
            inputs, targets = self._mirror.inputs(scheduled)
            num_tokens = len(inputs.input_ids)
            if not self._begun:
                self.step_tokens = num_tokens
            submitted = inputs if self._device is None else self._device.submit(inputs)
        except MemoryError:
            return self.give_up(plan, num_tokens)
        work = _Work(self._mirror.advance(scheduled), targets, submitted)
        self._begun.append(Begun(plan, num_tokens, work))
        return self._begun[-1]

    def give_up(self, plan: StepPlan, num_tokens: int = 0) -> Begun:
        """Begin a step for which there is no memory; nor does any later one of its epoch run."""
        self._void(plan)
        self._begun.append(Begun(plan, num_tokens))
        return self._begun[-1]

    def wait(self, begun: Begun) -> None:
        """Return when the device has done its part of `begun`; from any thread."""
        if self._device is not None and begun.work is not None:
            self._device.wait(begun.work.submitted)

    def finish(self, begun: Begun) -> StepResult:
        """The result of the step that began first, once it is there."""
        assert self._begun[0] is begun, "steps end in the order in which they begin"
        outputs = None
        if begun.work is not None:
            try:
                outputs = self._outputs(begun.work.submitted)
            except MemoryError:
                self._void(begun.plan)
        self._begun.popleft()
        if self._begun:
            self.step_tokens = self._begun[0].num_tokens
        # One that was computed after a step that failed has read what was not there.
        if begun.work is None or outputs is None or self._is_void(begun.plan):
            return _out_of_memory(begun.plan)
        self._mirror.accept(begun.work.awaited, outputs.token_ids)
        return self._result(begun.plan, begun.work, outputs)

    def _outputs(self, submitted: Any) -> StepOutputs:
        if self._device is None:
            return self._model.execute(submitted)
        return self._device.collect(submitted)

    def _void(self, plan: StepPlan) -> None:
        if not self._is_void(plan):
            self._void_from = (plan.epoch, plan.step_id)

    def _is_void(self, plan: StepPlan) -> bool:
        epoch, first = self._void_from
        return plan.epoch == epoch and plan.step_id >= first

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

    def _result(self, plan: StepPlan, work: _Work, outputs: StepOutputs) -> StepResult:
        lanes = work.awaited.lanes
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
                for target, entries in zip(work.targets, outputs.prompt_logprobs, strict=True)
                if all(entry is not None for entry in entries)
            ],
        )


def _out_of_memory(plan: StepPlan) -> StepResult:
    return StepResult(
        generation=plan.generation,
        epoch=plan.epoch,
        number=plan.number,
        step_id=plan.step_id,
        out_of_memory=True,
    )


def _columns(entries: list[TokenLogprobs]) -> Logprobs:
    return Logprobs(
        np.array([entry.chosen_logprob for entry in entries], dtype="<f4").tobytes(),
        pack(np.concatenate([entry.ids for entry in entries])),
        np.concatenate([entry.values for entry in entries]).astype("<f4").tobytes(),
    )
