"""Plans in, results out: repeats, gaps, polls, and taking over."""

from __future__ import annotations

from gpu_worker.executor import EngineShape, Executor
from gpu_worker.inputs import StepInputs, StepOutputs
from gpu_worker.shadow import ShadowModel, expected_token_ids
from services.contracts.limits import KEPT_PLANS
from services.contracts.step import Attach, Poll, PollState, StepPlan
from services.contracts.vectors import unpack
from tests.unit.gpu_worker.plans import join, plan

SHAPE = EngineShape(max_num_seqs=4, max_model_len=128, block_size=16, num_blocks=32, vocab_size=512)


def executor(generation: int = 1) -> Executor:
    model = ShadowModel(num_blocks=32, block_size=16, vocab_size=512)
    return Executor(model, generation, SHAPE)


def attached() -> Executor:
    worker = executor()
    worker.attach(Attach("scheduler-0", "a1", 0))
    return worker


def first() -> StepPlan:
    return plan(reset=True, joins=[join(0, [1, 2, 3], [1, 2])], chunks={0: 3})


def test_attach_goes_above_every_epoch_seen() -> None:
    worker = executor(generation=7)
    answer = worker.attach(Attach("scheduler-0", "a1", 5))
    assert (answer.generation, answer.epoch, answer.attempt) == (7, 6, "a1")
    assert (answer.num_blocks, answer.block_size, answer.max_num_seqs) == (32, 16, 4)
    assert (answer.max_model_len, answer.vocab_size) == (128, 512)
    assert worker.attach(Attach("scheduler-1", "b1", 0)).epoch == 7


def test_a_repeated_attach_gets_the_same_answer() -> None:
    worker = executor()
    assert worker.attach(Attach("s", "a1", 0)) == worker.attach(Attach("s", "a1", 9))
    assert worker.epoch == 1


def test_plans_are_taken_in_order_and_once() -> None:
    worker = attached()
    assert not worker.admit(plan(2))
    assert worker.admit(plan(1)) and not worker.admit(plan(1)) and worker.admit(plan(2))
    assert not worker.admit(plan(3, epoch=2)) and not worker.admit(plan(3, generation=2))
    assert worker.dropped == {"plan_gap": 1, "duplicate_plan": 1, "stale_plan": 2}


def test_nothing_is_taken_before_an_attach() -> None:
    worker = executor()
    assert not worker.admit(plan(1))


def test_the_result_names_the_lanes_that_sampled() -> None:
    worker = attached()
    result = worker.run(first())
    assert (result.generation, result.epoch, result.step_id) == (1, 1, 1)
    assert unpack(result.lanes).tolist() == [0]
    expected = expected_token_ids(unpack(first().join[0].token_ids), 2, 512)
    assert unpack(result.token_ids).tolist() == expected[:1]
    result = worker.run(plan(2))
    assert unpack(result.token_ids).tolist() == expected[1:]
    assert not result.failed


def test_polls_tell_unknown_running_and_done() -> None:
    worker = attached()

    def poll(step_id: int) -> PollState:
        return worker.poll(Poll(1, 1, step_id)).state

    assert poll(1) is PollState.UNKNOWN
    worker.admit(first())
    assert poll(1) is PollState.RUNNING
    result = worker.run(first())
    assert poll(1) is PollState.RUNNING
    worker.remember(result)
    assert poll(1) is PollState.RESULT and worker.poll(Poll(1, 1, 1)).result == result
    assert poll(2) is PollState.UNKNOWN


def test_as_many_results_are_kept_as_the_scheduler_keeps_plans() -> None:
    worker = attached()
    worker.remember(worker.run(first()))
    for step_id in range(2, KEPT_PLANS + 3):
        worker.remember(worker.run(plan(step_id)))
    states = [worker.poll(Poll(1, 1, step_id)).state for step_id in range(1, KEPT_PLANS + 3)]
    assert states == [PollState.UNKNOWN] * 2 + [PollState.RESULT] * KEPT_PLANS


def test_an_attach_asked_again_leaves_what_is_queued() -> None:
    """Found by the simulator (seed 4928): the plan that waited was dropped, and the next one ran
    without it.
    """
    worker = attached()
    again = Attach("scheduler-0", "a1", 0)
    other = Attach("scheduler-0", "a2", 0)
    assert worker.attach(again) == worker.attach(again)
    assert worker.is_repeated(again) and not worker.is_repeated(other)
    worker.attach(other)
    assert worker.is_repeated(other) and not worker.is_repeated(again)


def test_a_step_that_ends_after_an_attach_is_nobodys() -> None:
    """The runner's thread may take the attach before the loop hears of the step before it."""
    worker = attached()
    worker.admit(first())
    result = worker.run(first())
    worker.attach(Attach("scheduler-1", "b1", 0))
    worker.remember(result)
    worker.admit(plan(1, epoch=2))
    assert worker.poll(Poll(1, 2, 1)).state is PollState.RUNNING


def test_a_new_epoch_forgets_the_old_one() -> None:
    worker = attached()
    worker.admit(first())
    worker.remember(worker.run(first()))
    worker.attach(Attach("scheduler-1", "b1", 0))
    reply = worker.poll(Poll(1, 1, 1))
    assert reply.state is PollState.UNKNOWN and reply.epoch == 2
    assert not worker.admit(plan(2)) and worker.admit(plan(1, epoch=2))


class TightModel(ShadowModel):
    """Has no memory while `is_full`."""

    is_full = False

    def execute(self, inputs: StepInputs) -> StepOutputs:
        if self.is_full:
            raise MemoryError
        return super().execute(inputs)


def test_after_a_step_without_memory_no_other_of_its_epoch_runs() -> None:
    model = TightModel(num_blocks=32, block_size=16, vocab_size=512)
    worker = Executor(model, 1, SHAPE)
    worker.attach(Attach("scheduler-0", "a1", 0))
    worker.run(first())
    model.is_full = True
    assert worker.admit(plan(1)) and worker.admit(plan(2)) and worker.admit(plan(3))
    result = worker.run(plan(2))
    assert result.out_of_memory and not result.lanes and not result.token_ids
    assert (result.generation, result.epoch, result.step_id) == (1, 1, 2)
    model.is_full = False
    assert worker.run(plan(3)).out_of_memory, "it counts on the one before"
    worker.remember(result)
    assert worker.poll(Poll(1, 1, 2)).result == result
    worker.attach(Attach("scheduler-0", "a2", 1))
    again = worker.run(plan(1, epoch=2, reset=True, joins=first().join, chunks={0: 3}))
    assert not again.out_of_memory and unpack(again.lanes).tolist() == [0]


def test_a_step_may_be_given_up_unasked() -> None:
    worker = attached()
    assert worker.finish(worker.give_up(first())).out_of_memory
    assert worker.run(plan(2)).out_of_memory
