"""A worker's service without a bus: plans are handed in, results are kept."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

from gpu_worker.executor import Executor
from gpu_worker.service import WorkerService
from services.contracts import codec
from services.contracts.step import Attach, StepPlan, StepResult
from services.runtime.bus import Delivery
from services.runtime.telemetry.recorder import Recorder


class Bus:
    """Keeps what is published; `subjects` in order."""

    def __init__(self) -> None:
        self.subjects: list[str] = []
        self.results: list[StepResult] = []

    async def publish(self, subject: str, payload: bytes) -> None:
        self.subjects.append(subject)
        if subject == "result":
            self.results.append(codec.Decoder(StepResult).decode(payload))


@contextlib.asynccontextmanager
async def worker(
    executor: Executor, died: asyncio.Future[int], let_go: Callable[[], None]
) -> AsyncIterator[tuple[WorkerService, Bus]]:
    """Attached, and started; let_go: ends what its model still computes."""
    bus = Bus()
    executor.attach(Attach("scheduler-0", "attempt", 0))
    plain: Any = bus
    service = WorkerService(executor, plain, "result", Recorder("w"), die=died.set_result)
    service.start()
    tasks = [asyncio.create_task(service.send()), asyncio.create_task(service.watch())]
    try:
        yield service, bus
    finally:
        let_go()
        service.stop()
        await asyncio.to_thread(service.runner.join, 20)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


def deliver(service: WorkerService, message: StepPlan) -> None:
    service.on_plan(Delivery("plan", codec.encode(message), "", {}))
