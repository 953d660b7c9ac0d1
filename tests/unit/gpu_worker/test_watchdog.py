"""How long a step may take, and what becomes of a worker whose step does not end or that leaves."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import NoReturn

import pytest

from gpu_worker import service as module
from gpu_worker.executor import EngineShape, Executor
from gpu_worker.inputs import StepInputs, StepOutputs
from gpu_worker.poison import PoisonedModel, WorkerDied
from gpu_worker.service import EXIT_HUNG, WorkerService
from gpu_worker.shadow import ShadowModel
from gpu_worker.watchdog import FIRST_STEP_LIMIT_S, SECOND_NS, StepTimes
from services.contracts import codec
from services.contracts.step import Attach
from services.runtime.bus import Delivery
from tests.unit.gpu_worker.plans import join, plan
from tests.unit.gpu_worker.rig import Bus, deliver, worker

SHAPE = EngineShape(max_num_seqs=2, max_model_len=64, block_size=4, num_blocks=16, vocab_size=512)


@pytest.mark.parametrize(
    ("seen", "num_tokens", "limit_s"),
    [
        ([], 1, FIRST_STEP_LIMIT_S),
        ([(1, 0.03)], 1, 10),
        ([(1, 2.0)], 1, 20),
        ([(128, 2.0)], 255, 20),
        ([(128, 2.0)], 512, 80),
        ([(1, 0.03), (128, 2.0)], 512, 80),
        ([(512, 2.0)], 1, 20),
        ([(1, 100.0), *[(1, 0.1)] * 60], 1, 10),
    ],
)
def test_the_limit(seen: list[tuple[int, float]], num_tokens: int, limit_s: float) -> None:
    times = StepTimes()
    for tokens, elapsed_s in seen:
        times.observe(tokens, round(elapsed_s * SECOND_NS))
    assert times.limit_ns(num_tokens) == limit_s * SECOND_NS


class _Stuck(ShadowModel):
    """Its steps end when they are let go."""

    def __init__(self) -> None:
        super().__init__(num_blocks=16, block_size=4, vocab_size=512)
        self.begun = threading.Event()
        self.go = threading.Event()

    def execute(self, inputs: StepInputs) -> StepOutputs:
        self.begun.set()
        assert self.go.wait(20)
        return super().execute(inputs)


def _worker(
    model: _Stuck, died: asyncio.Future[int]
) -> contextlib.AbstractAsyncContextManager[tuple[WorkerService, Bus]]:
    return worker(Executor(model, 1, SHAPE), died, model.go.set)


async def test_a_step_that_does_not_end_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WATCH_PERIOD_S", 0.01)
    monkeypatch.setattr(StepTimes, "limit_ns", lambda self, num_tokens: 50_000_000)
    died: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    async with _worker(_Stuck(), died) as (service, _), asyncio.timeout(20):
        await asyncio.sleep(0)
        assert not died.done(), "idle is not hung"
        deliver(service, plan(1, joins=[join(0, [1, 2], [1])], chunks={0: 2}, decode=False))
        assert await died == EXIT_HUNG


async def test_a_leaving_worker_ends_its_step_and_begins_no_other() -> None:
    model, died = _Stuck(), asyncio.get_running_loop().create_future()
    async with _worker(model, died) as (service, bus), asyncio.timeout(20):
        deliver(service, plan(1, joins=[join(0, [1, 2], [1])], chunks={0: 2}, decode=False))
        await asyncio.to_thread(model.begun.wait, 20)
        deliver(service, plan(2))
        leaving = asyncio.create_task(service.leave())
        await asyncio.sleep(0)
        deliver(service, plan(3))
        assert not leaving.done() and not bus.results
        model.go.set()
        await leaving
        assert [result.step_id for result in bus.results] == [1]


@pytest.mark.parametrize(("attempt", "steps"), [("attempt", [1, 2]), ("another", [1])])
async def test_only_an_attach_of_another_attempt_drops_what_is_queued(
    attempt: str, steps: list[int]
) -> None:
    """Found by the simulator (seed 4928): an answer that was late was asked for again, and the step
    between its two neighbours was left out.
    """
    model, died = _Stuck(), asyncio.get_running_loop().create_future()
    async with _worker(model, died) as (service, bus), asyncio.timeout(20):
        deliver(service, plan(1, joins=[join(0, [1, 2], [1])], chunks={0: 2}, decode=False))
        await asyncio.to_thread(model.begun.wait, 20)
        deliver(service, plan(2))
        again = codec.encode(Attach("scheduler-0", attempt, 0))
        service.on_attach(Delivery("attach", again, "", {}))
        model.go.set()
        await asyncio.to_thread(service.runner.stop)
        await asyncio.to_thread(service.runner.join, 20)
        while len(bus.results) < len(steps):
            await asyncio.sleep(0)
        assert [result.step_id for result in bus.results] == steps


def test_poison_kills_where_every_marker_is_computed() -> None:
    def die() -> NoReturn:
        raise WorkerDied

    model = ShadowModel(num_blocks=16, block_size=4, vocab_size=512)
    executor = Executor(PoisonedModel(model, [7, 8], die), 1, SHAPE)
    executor.run(plan(1, joins=[join(0, [1, 7], [1])], chunks={0: 2}, decode=False))
    both = [join(1, [8, 7], [2])]
    with pytest.raises(WorkerDied):
        executor.run(plan(2, joins=both, chunks={1: 2}, decode=False))
