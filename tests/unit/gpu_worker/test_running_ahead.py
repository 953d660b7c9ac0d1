"""A step that begins before the one before it has ended: the same results, in the same order."""

from __future__ import annotations

import asyncio
import random
import threading

import pytest

from gpu_worker import service as module
from gpu_worker.executor import Begun, EngineShape, Executor
from gpu_worker.inputs import StepInputs
from gpu_worker.service import EXIT_HUNG
from gpu_worker.step_clock import TimedStep
from gpu_worker.watchdog import StepTimes
from services.contracts import codec
from services.contracts.step import Attach, StepPlan, StepResult
from services.contracts.vectors import unpack
from services.runtime.bus import Delivery
from tests.unit.gpu_worker.asynchronous import AsynchronousModel, SpottyModel
from tests.unit.gpu_worker.plans import join, plan
from tests.unit.gpu_worker.random_plans import RandomPlans
from tests.unit.gpu_worker.rig import deliver, worker

SHAPE = EngineShape(
    max_num_seqs=4, max_model_len=16, block_size=4, num_blocks=24, vocab_size=512, host_blocks=3
)


def asynchronous() -> tuple[Executor, AsynchronousModel]:
    model = AsynchronousModel(SpottyModel(SHAPE), SHAPE.max_num_seqs)
    return Executor(model, 1, SHAPE, model), model


def first(**more: object) -> StepPlan:
    return plan(1, reset=True, joins=[join(0, [1, 2, 3], [1], **more)], chunks={0: 3})


def run_ahead(
    executor: Executor, plans: list[StepPlan], rng: random.Random
) -> tuple[list[StepResult], int]:
    """Results, and how many steps began before the one before them had ended."""
    results: list[StepResult] = []
    begun: list[Begun] = []
    ahead = 0
    for each in plans:
        while begun and (not executor.can_begin(each) or rng.random() < 0.2):
            results.append(executor.finish(begun.pop(0)))
        ahead += bool(begun)
        begun.append(executor.begin(each))
    return results + [executor.finish(step) for step in begun], ahead


def test_random_plans_give_equal_results_both_ways() -> None:
    """Rows that are not finite, penalties and log-probabilities included."""
    total = 0
    for seed in range(25):
        source = RandomPlans(seed, SHAPE)
        plans = [source.next() for _ in range(40)]
        plain = SpottyModel(SHAPE)
        executor = Executor(plain, 1, SHAPE)
        expected = [executor.run(each) for each in plans]
        shadow = SpottyModel(SHAPE)
        model = AsynchronousModel(shadow, SHAPE.max_num_seqs)
        results, ahead = run_ahead(Executor(model, 1, SHAPE, model), plans, random.Random(seed))
        assert results == expected, f"seed {seed}"
        assert shadow.counted == plain.counted, f"seed {seed}"
        assert any(unpack(result.failed).size for result in results)
        total += ahead
    assert total > 150, "too few steps ran ahead for this to mean something"


def test_without_a_device_one_step_begins_at_a_time() -> None:
    executor = Executor(SpottyModel(SHAPE), 1, SHAPE)
    executor.begin(first())
    assert not executor.runs_ahead and not executor.can_begin(plan(2))


def test_a_third_step_waits() -> None:
    executor, model = asynchronous()
    begun = executor.begin(first())
    assert executor.can_begin(plan(2))
    executor.begin(plan(2, append=[(0, 2)]))
    assert not executor.can_begin(plan(3)) and model.max_begun == 2
    executor.finish(begun)
    assert executor.can_begin(plan(3))


@pytest.mark.parametrize(
    "sampling", [{"presence_penalty": 0.5}, {"num_logprobs": 0}, {"num_prompt_logprobs": 1}]
)
def test_what_needs_the_host_waits_for_the_step_before(sampling: dict[str, float]) -> None:
    executor, _ = asynchronous()
    executor.begin(first())
    newcomer = plan(2, joins=[join(1, [4, 5], [2], **sampling)], chunks={1: 2}, hold=[0])
    assert not executor.can_begin(newcomer)
    assert not executor.can_begin(plan(2, copies_out=bytes(8)))
    executor, _ = asynchronous()
    executor.begin(first(**sampling))
    # Once its prompt is scored, such a lane needs nothing more.
    assert executor.can_begin(plan(2)) == ("num_prompt_logprobs" in sampling)


def test_a_lane_that_is_joined_anew_keeps_its_own_tokens() -> None:
    executor, _ = asynchronous()
    begun = executor.begin(first())
    anew = plan(2, leave=[0], joins=[join(0, [7, 8, 9, 10], [2])], chunks={0: 3})
    executor.begin(anew)
    old = executor.finish(begun)
    assert unpack(old.lanes).tolist() == [0]
    assert executor._mirror.rows.token_ids[0, :4].tolist() == [7, 8, 9, 10]


def test_no_memory_to_begin_leaves_the_step_before_its_result() -> None:
    executor, model = asynchronous()
    model.full_at_submit = {2}
    one, two = executor.begin(first()), executor.begin(plan(2, append=[(0, 2)]))
    assert not executor.finish(one).out_of_memory
    assert two.num_tokens == 1
    three = executor.begin(plan(3))
    assert executor.finish(two).out_of_memory and executor.finish(three).out_of_memory
    executor.attach(Attach("scheduler-0", "again", 1))
    again = plan(1, epoch=2, reset=True, joins=first().join, chunks={0: 3})
    assert not executor.run(again).out_of_memory


def test_no_memory_at_the_end_of_a_step_voids_the_one_behind_it() -> None:
    executor, model = asynchronous()
    model.full_at_collect = {1}
    one, two = executor.begin(first()), executor.begin(plan(2, append=[(0, 2)]))
    assert executor.finish(one).out_of_memory and executor.finish(two).out_of_memory
    assert model.num_collected == 2, "what is on the device is taken off it"
    assert executor.run(plan(3)).out_of_memory


@pytest.mark.parametrize(
    ("times", "start", "waited"),
    [
        # queued, began, ready, the end of the step before
        ((1, 5, 6, 4), 5, 4),
        ((1, 5, 7, 9), 9, 2),
        ((1, 5, 11, 9), 9, 0),
    ],
)
def test_a_step_starts_when_the_device_is_free(
    times: tuple[int, int, int, int], start: int, waited: int
) -> None:
    queued, began, ready, last_end = times
    step = TimedStep(first(), Begun(first()), (), queued, began, ready)
    assert step.start_ns(last_end) == start and step.waited_ns(last_end) == waited


class Held(AsynchronousModel):
    """Its steps end when they are let go, in the order of `submitted`."""

    def __init__(self) -> None:
        super().__init__(SpottyModel(SHAPE), SHAPE.max_num_seqs)
        self.may_end = [threading.Event() for _ in range(4)]
        self.begins = [threading.Event() for _ in range(4)]
        self._order: list[StepInputs] = []

    def submit(self, inputs: StepInputs) -> StepInputs:
        self._order.append(inputs)
        submitted = super().submit(inputs)
        self.begins[len(self._order) - 1].set()
        return submitted

    def wait(self, submitted: StepInputs) -> None:
        at = next(at for at, inputs in enumerate(self._order) if inputs is submitted)
        assert self.may_end[at].wait(20)

    def collect(self, submitted: StepInputs):  # type: ignore[no-untyped-def]
        self.wait(submitted)
        return super().collect(submitted)

    def let_go(self) -> None:
        for event in self.may_end:
            event.set()

    async def begun(self, at: int) -> None:
        assert await asyncio.to_thread(self.begins[at].wait, 20)


def held() -> tuple[Held, Executor, asyncio.Future[int]]:
    model = Held()
    died: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    return model, Executor(model, 1, SHAPE, model), died


async def test_the_next_plan_begins_while_a_step_runs_and_results_come_as_steps_end() -> None:
    model, executor, died = held()
    async with worker(executor, died, model.let_go) as (service, bus), asyncio.timeout(20):
        deliver(service, first())
        await model.begun(0)
        deliver(service, plan(2, append=[(0, 2)]))
        await model.begun(1)
        assert not bus.results
        model.may_end[0].set()
        while not bus.results:
            await asyncio.sleep(0)
        assert [result.step_id for result in bus.results] == [1] and executor.last_done == 1
        deliver(service, plan(3))
        await model.begun(2)
        model.let_go()
        while len(bus.results) < 3:
            await asyncio.sleep(0)
        assert [result.step_id for result in bus.results] == [1, 2, 3]


async def test_a_plan_that_needs_tokens_begins_when_they_are_there() -> None:
    model, executor, died = held()
    async with worker(executor, died, model.let_go) as (service, bus), asyncio.timeout(20):
        deliver(service, first(presence_penalty=0.5))
        await model.begun(0)
        deliver(service, plan(2, append=[(0, 2)]))
        model.may_end[0].set()
        await model.begun(1)
        assert model.num_collected == 1 and model.max_begun == 1
        model.let_go()
        while len(bus.results) < 2:
            await asyncio.sleep(0)


async def test_an_attach_waits_for_both_steps_and_a_leaving_worker_lets_both_out() -> None:
    model, executor, died = held()
    async with worker(executor, died, model.let_go) as (service, bus), asyncio.timeout(20):
        deliver(service, first())
        deliver(service, plan(2, append=[(0, 2)]))
        await model.begun(1)
        attach = codec.encode(Attach("scheduler-1", "another", 0))
        service.on_attach(Delivery("attach", attach, "reply", {}))
        model.may_end[0].set()
        model.may_end[1].set()
        while "reply" not in bus.subjects:
            await asyncio.sleep(0)
        assert bus.subjects == ["result", "result", "reply"] and executor.epoch == 2
        again = first()
        deliver(service, plan(1, epoch=2, reset=True, joins=again.join, chunks={0: 3}))
        deliver(service, plan(2, epoch=2, append=[(0, 2)]))
        await model.begun(3)
        leaving = asyncio.create_task(service.leave())
        await asyncio.sleep(0)
        deliver(service, plan(3, epoch=2))
        model.let_go()
        await leaving
        assert [result.step_id for result in bus.results] == [1, 2, 1, 2]


async def test_the_second_step_is_watched_from_the_end_of_the_first() -> None:
    model, executor, died = held()
    async with worker(executor, died, model.let_go) as (service, bus), asyncio.timeout(20):
        deliver(service, first())
        await model.begun(0)
        before_ns = service._began_ns
        deliver(service, plan(2, append=[(0, 2)]))
        await model.begun(1)
        assert service._began_ns == before_ns and executor.step_tokens == 3
        model.may_end[0].set()
        while not bus.results:
            await asyncio.sleep(0)
        assert service._began_ns > before_ns and executor.step_tokens == 1


async def test_a_second_step_that_does_not_end_ends_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "WATCH_PERIOD_S", 0.01)
    monkeypatch.setattr(StepTimes, "limit_ns", lambda self, num_tokens: 50_000_000)
    model, executor, died = held()
    async with worker(executor, died, model.let_go) as (service, _), asyncio.timeout(20):
        model.may_end[0].set()
        deliver(service, first())
        deliver(service, plan(2, append=[(0, 2)]))
        assert await died == EXIT_HUNG
