"""The worker on the bus: plans in, results out; the model runs in a thread of its own, so the bus
always answers.

Shell. One runner thread does all that touches lanes and tensors, in the order in which it is asked.
Where the device computes on its own, another one waits for it, and asks the runner to end the step.
"""

from __future__ import annotations

import asyncio
import faulthandler
import os
import sys
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import msgspec

from services.contracts import codec
from services.contracts.beats import Beat, ServiceKind, WorkerLoad
from services.contracts.limits import KEPT_PLANS
from services.contracts.step import Attach, Attached, Poll, StepPlan, StepResult
from services.runtime.bus import Bus, Delivery, Endpoint
from services.runtime.failpoints import failpoint
from services.runtime.incoming import Incoming
from services.runtime.log import get_logger, report_progress, report_ready
from services.runtime.service import (
    beat_forever,
    connect,
    run_until_left,
    say_leaving,
    subjects,
    unless_stopped,
)
from services.runtime.settings import Settings
from services.runtime.telemetry.recorder import Recorder, new_trace_id
from services.runtime.telemetry.sharing import telemetry

from .build_executor import build_executor
from .executor import Executor
from .job_thread import JobThread
from .step_clock import TimedStep
from .step_spans import TracedLanes, step_span
from .watchdog import StepTimes

# The runner's Python sections must not keep the bus waiting for the default 5 ms.
SWITCH_INTERVAL_S: Final = 0.0005
WATCH_PERIOD_S: Final = 0.5
# This process was itself stopped so long: what ran meanwhile is not judged.
ASLEEP_NS: Final = 2_000_000_000
EXIT_HUNG: Final = 70

_plan = codec.Decoder(StepPlan)
_attach = codec.Decoder(Attach)
_poll = codec.Decoder(Poll)


class WorkerService:
    """`ended`: resolves with what broke the runner. die: ends the process at once."""

    def __init__(
        self,
        executor: Executor,
        bus: Bus,
        result_subject: str,
        recorder: Recorder,
        die: Callable[[int], object] = os._exit,
    ) -> None:
        loop = asyncio.get_running_loop()
        self._executor = executor
        self._bus = bus
        self._result_subject = result_subject
        self._recorder = recorder
        self._traced = TracedLanes()
        self._log = get_logger("gpu_worker")
        self._ticket = 0
        self._leaving = False
        self._die = die
        self._times = StepTimes()
        self._began_ns = 0
        self._last_end_ns = 0
        self._under_way: deque[TimedStep] = deque()
        self._outbox: asyncio.Queue[tuple[str, codec.Message]] = asyncio.Queue()
        self._loop = loop
        self.ended: asyncio.Future[None] = loop.create_future()
        self.runner = JobThread("runner", loop, self._broke)
        self._waiter = JobThread("waiter", loop, self._broke) if executor.runs_ahead else None
        self._incoming = Incoming("gpu_worker")

    def start(self) -> None:
        self.runner.start()
        if self._waiter is not None:
            self._waiter.start()

    def stop(self) -> None:
        self.runner.stop()
        if self._waiter is not None:
            self._waiter.stop()

    def _broke(self, error: BaseException) -> None:
        if not self.ended.done():
            self.ended.set_exception(error)

    # ---- in

    def on_plan(self, delivery: Delivery) -> None:
        plan = self._incoming.decoded(_plan, delivery)
        if plan is None or self._leaving or not self._executor.admit(plan):
            return
        # The scheduler has at most two steps in flight; a flood of plans is nobody's that we know.
        assert self._executor.last_queued - self._executor.last_done <= KEPT_PLANS
        ticket, queued_ns = self._ticket, time.monotonic_ns()
        self.runner.submit(lambda: self._step(plan, ticket, queued_ns))

    def on_attach(self, delivery: Delivery) -> None:
        request = self._incoming.decoded(_attach, delivery)
        if request is None or self._leaving:
            return
        if not self._executor.is_repeated(request):
            # Plans that are queued and not begun belong to the epoch before: their ticket is out
            # of date.
            self._ticket += 1
        self.runner.submit(lambda: self._attach(request, delivery.reply))

    def on_poll(self, delivery: Delivery) -> None:
        request = self._incoming.decoded(_poll, delivery)
        if request is not None:
            self._put(delivery.reply, self._executor.poll(request))

    # ---- the runner's thread

    def _step(self, plan: StepPlan, ticket: int, queued_ns: int) -> None:
        if ticket != self._ticket:
            return
        while not self._executor.can_begin(plan):
            self._finish_first()
        step = self._begin(plan, queued_ns)
        if self._waiter is None:
            self._finish_first()
        else:
            self._waiter.submit(lambda: self._wait(step))

    def _begin(self, plan: StepPlan, queued_ns: int) -> TimedStep:
        began_ns = time.monotonic_ns()
        if not self._under_way:
            self._began_ns = began_ns
        links = self._traced.links(plan)
        failpoint("worker.before_forward")
        starved = failpoint("worker.no_memory")
        begun = self._executor.give_up(plan) if starved else self._executor.begin(plan)
        step = TimedStep(plan, begun, links, queued_ns, began_ns, time.monotonic_ns())
        self._under_way.append(step)
        return step

    def _finish_first(self) -> None:
        """Wait for the step that began first, and let its result out."""
        step = self._under_way[0]
        result = self._executor.finish(step.begun)
        end_ns, last_end_ns = time.monotonic_ns(), self._last_end_ns
        self._under_way.popleft()
        # The next one could not start before.
        self._began_ns = end_ns if self._under_way else 0
        self._last_end_ns = end_ns
        result = msgspec.structs.replace(
            result,
            elapsed_us=(end_ns - step.start_ns(last_end_ns)) // 1000,
            waited_us=step.waited_ns(last_end_ns) // 1000,
        )
        self._loop.call_soon_threadsafe(self._finished, result, step.begun.num_tokens)
        if step.links:
            span = step_span(step.plan, result, step.links, new_trace_id(), end_ns)
            self._loop.call_soon_threadsafe(self._recorder.record, span)

    def _finish_all(self) -> None:
        while self._under_way:
            self._finish_first()

    def _finish_through(self, step: TimedStep) -> None:
        """`step` has ended; it may have been finished before this was heard."""
        while step in self._under_way:
            self._finish_first()

    def _attach(self, request: Attach, reply: str) -> None:
        self._finish_all()
        attached = self._executor.attach(request)
        if failpoint("worker.after_attach"):
            return
        self._loop.call_soon_threadsafe(self._attached, attached, reply)

    # ---- the waiter's thread

    def _wait(self, step: TimedStep) -> None:
        self._executor.wait(step.begun)
        self.runner.submit(lambda: self._finish_through(step))

    # ---- out

    def _finished(self, result: StepResult, num_tokens: int) -> None:
        self._executor.remember(result)
        if result.out_of_memory:
            self._log.error("out_of_memory", step_id=result.step_id, num_tokens=num_tokens)
        else:
            self._times.observe(num_tokens, result.elapsed_us * 1000)
        if not failpoint("worker.after_forward"):
            self._put(self._result_subject, result)

    def _attached(self, attached: Attached, reply: str) -> None:
        self._log.info("attached", generation=attached.generation, epoch=attached.epoch)
        self._put(reply, attached)

    def _put(self, subject: str, message: codec.Message) -> None:
        if subject:
            self._outbox.put_nowait((subject, message))

    async def send(self) -> None:
        """Publish what comes; bounded by what peers ask, which is bounded in flight."""
        while True:
            subject, message = await self._outbox.get()
            await self._bus.publish(subject, codec.encode(message))
            if isinstance(message, StepResult):
                failpoint("worker.after_result")
            self._outbox.task_done()

    async def leave(self) -> None:
        """Begin no step any more, end those that have begun, and let their results out."""
        self._leaving = True
        self._ticket += 1
        ended = asyncio.Event()

        def last_job() -> None:
            self._finish_all()
            self._loop.call_soon_threadsafe(ended.set)

        self.runner.submit(last_job)
        await ended.wait()
        await self._outbox.join()

    async def watch(self) -> None:
        """End the process where a step does not end: only another one can go on."""
        checked_ns = time.monotonic_ns()
        awake_ns = checked_ns
        while True:
            await asyncio.sleep(WATCH_PERIOD_S)
            now_ns, began_ns = time.monotonic_ns(), self._began_ns
            if now_ns - checked_ns > ASLEEP_NS:
                awake_ns = now_ns
            checked_ns = now_ns
            limit_ns = self._times.limit_ns(self._executor.step_tokens)
            if began_ns and now_ns - max(began_ns, awake_ns) > limit_ns:
                self._log.error(
                    "step_hangs",
                    step_id=self._executor.last_done + 1,
                    num_tokens=self._executor.step_tokens,
                    elapsed_s=(now_ns - began_ns) / 1e9,
                    limit_s=limit_ns / 1e9,
                )
                faulthandler.dump_traceback()
                self._die(EXIT_HUNG)


async def load(settings: Settings, generation: int) -> Executor:
    """``build_executor`` in a thread that ends.

    OpenMP keeps a team for each thread that has computed, and lets the members of all teams sleep
    at once when they are more than the cores: with a loader that stays, a step of one lane takes
    twice as long.
    """
    loader = ThreadPoolExecutor(1, "loader")
    try:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(loader, build_executor, settings, generation)
    finally:
        loader.shutdown(wait=False)


async def serve(settings: Settings, stopping: asyncio.Event) -> None:
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    report_progress(0.0, "starting")
    # Milliseconds since 1970: a generation only has to be higher than every one before it.
    generation = time.time_ns() // 1_000_000
    executor = await unless_stopped(stopping, load(settings, generation))
    names, engine = subjects(settings), settings.engine_id
    bus = await connect(settings, settings.worker_id, stopping)
    traces = telemetry(settings, ServiceKind.GPU_WORKER, settings.worker_id)
    service = WorkerService(executor, bus, names.result(engine), traces.recorder)
    await bus.subscribe(names.plan(engine), service.on_plan)
    await bus.serve(
        "streetcar-gpu-worker",
        "Streetcar: rank 0 of one engine's worker group",
        [
            Endpoint("attach", names.attach(engine), service.on_attach, queue=engine),
            Endpoint("poll", names.poll(engine), service.on_poll, queue=engine),
        ],
    )
    await traces.join(bus, names)
    await bus.flush()
    service.start()
    report_ready(id=settings.worker_id, engine=engine, num_blocks=settings.num_blocks)

    def beat() -> Beat:
        model = settings.served_name or settings.model
        return Beat(
            kind=ServiceKind.GPU_WORKER,
            service_id=settings.worker_id,
            generation=executor.generation,
            epoch=executor.epoch,
            worker=WorkerLoad(model, executor.last_done, settings.num_blocks),
        )

    subject = names.beat("gpu_worker", settings.worker_id)

    async def leave() -> None:
        await service.leave()
        await say_leaving(bus, subject, beat())

    try:
        await run_until_left(
            stopping,
            leave,
            *(service.send(), service.ended, service.watch()),
            *(beat_forever(bus, subject, beat), traces.share_forever()),
        )
    finally:
        service.stop()
        await traces.close()
        await bus.close()
