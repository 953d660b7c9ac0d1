"""`streetcar bench`: what the mesh costs, with a worker that computes nothing.

Invariant: only steps count in which every lane decodes and nothing else happens; the figures are
the scheduler's own, one StepEvent per step, next to what the client saw arrive.

Shell: processes, the bus, the public client.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from cyclopts import App

from services.cli.output import ClusterReporter, print_json
from services.runtime.problem import Problem
from services.runtime.settings import Settings, load

if TYPE_CHECKING:
    from services.client import Client
    from services.contracts.step import StepEvent
    from services.runtime.cluster import Cluster

app = App(name="bench", help="Measure the mesh, its scheduler alone, or servers side by side.")
app.command("services.cli.bench_serve:serve", name="serve")

INTERRUPTED: Final = 130
PROMPT_TOKENS: Final = 16
WARM_UP_S: Final = 1.0
FILL_TIMEOUT_S: Final = 60.0
MIN_STEPS: Final = 20
_SLACK_STEPS: Final = 400
_BLOCK_SIZE: Final = 16
_FIRST_TOKEN_ID: Final = 100


@dataclass(slots=True)
class _Window:
    """The steady steps seen so far, and the tokens that reached the client meanwhile."""

    lanes: int
    steady_since: float = 0.0
    steps: list[StepEvent] = field(default_factory=list)
    client_tokens: int = 0
    opened: float = 0.0

    def add(self, step: StepEvent, now: float) -> None:
        steady = step.num_decode_tokens == self.lanes and step.num_prefill_tokens == 0
        if not steady:
            return
        self.steady_since = self.steady_since or now
        if now - self.steady_since >= WARM_UP_S:
            self.opened = self.opened or now
            self.steps.append(step)

    def add_tokens(self, number: int) -> None:
        if self.opened:
            self.client_tokens += number


@app.command
def mesh(
    *, lanes: int = 256, step_ms: float = 5.0, seconds: float = 10.0, json: bool = False
) -> int:
    """Fill every lane of a stub worker and measure the steps.

    Parameters
    ----------
    lanes
        Sequences that decode at once.
    step_ms
        How long the stub worker takes for a step.
    seconds
        How long to measure, after a second of warm-up.
    json
        Print the result as one object.
    """
    from services.cli.running import prepare, run_cluster
    from services.runtime.cluster import Cluster

    max_tokens = int((seconds + WARM_UP_S) * 1000 / max(step_ms, 0.5)) + _SLACK_STEPS
    settings = prepare(_settings(lanes, step_ms, max_tokens))

    async def work(cluster: Cluster) -> dict[str, Any]:
        return await _measure(cluster, settings, max_tokens, seconds)

    async def run() -> dict[str, Any] | None:
        return await run_cluster(Cluster(settings, ClusterReporter(quiet=json)), work)

    result = asyncio.run(run())
    if result is None:
        return INTERRUPTED
    if json:
        print_json(result)
        return 0
    for name, value in result.items():
        print(f"{name:<24} {value}")
    return 0


@app.command
def scheduler(lanes: int = 256, steps: int = 2000, *, json: bool = False) -> int:
    """What a steady decode step costs the scheduler alone, without bus and model.

    Parameters
    ----------
    lanes
        Sequences that decode, in random phases of their blocks of 16.
    steps
        How many steps to measure.
    json
        Print the result as one object.
    """
    from services.simulator.steady import measure

    figures = dataclasses.asdict(measure(lanes, steps))
    if json:
        print_json(figures)
        return 0
    for name, value in figures.items():
        print(f"{name:<26} {value}")
    return 0


def _settings(lanes: int, step_ms: float, max_tokens: int) -> Settings:
    """A stub worker, and blocks enough that no sequence is ever preempted."""
    blocks_each = -(-(PROMPT_TOKENS + max_tokens) // _BLOCK_SIZE) + 2
    budget = max(512, 2 * lanes)
    # The scheduler keeps spare blocks of its own, up to a quarter of the pool.
    num_blocks = 2 * lanes * blocks_each + 4 * budget
    return load(
        flags={
            "worker": "stub",
            "step_ms": float(step_ms),
            "max_num_seqs": lanes,
            "max_num_batched_tokens": budget,
            "max_waiting_seqs": max(1024, 2 * lanes),
            "block_size": _BLOCK_SIZE,
            "num_blocks": num_blocks,
            "max_model_len": PROMPT_TOKENS + max_tokens,
            "log_level": "warning",
        }
    )


async def _measure(
    cluster: Cluster, settings: Settings, max_tokens: int, seconds: float
) -> dict[str, Any]:
    from services.cli.bus import connect
    from services.cli.requests import connected
    from services.contracts.codec import Decoder
    from services.contracts.step import StepEvent
    from services.contracts.subjects import Subjects

    decoder = Decoder(StepEvent)
    window = _Window(settings.max_num_seqs)

    async def on_step(message: Any) -> None:
        window.add(decoder.decode(message.data), time.monotonic())

    async with (
        connect(cluster.observer_url) as bus,
        connected(cluster.nats_url, settings.subject_prefix) as client,
    ):
        steps = Subjects(settings.subject_prefix).steps(settings.engine_id)
        await bus.subscribe(steps, cb=on_step)
        tasks = [
            asyncio.create_task(_decode(client, settings.served_name, lane, max_tokens, window))
            for lane in range(settings.max_num_seqs)
        ]
        try:
            await _unless_one_ends(tasks, _wait_until_full(window))
            await _unless_one_ends(tasks, asyncio.sleep(seconds))
            return _figures(window, time.monotonic() - window.opened)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)


async def _unless_one_ends(
    tasks: list[asyncio.Task[None]], work: Coroutine[Any, Any, None]
) -> None:
    """Await `work`; an answer that ends meanwhile ends the measurement, with its reason."""
    working = asyncio.ensure_future(work)
    try:
        await asyncio.wait({working, *tasks}, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            if task.done():
                task.result()
                raise Problem("E406", "A lane ended early", cause="its answer was complete")
        working.result()
    finally:
        working.cancel()


async def _wait_until_full(window: _Window) -> None:
    deadline = time.monotonic() + FILL_TIMEOUT_S
    while not window.opened:
        if time.monotonic() > deadline:
            raise Problem(
                "E406",
                "Lanes do not fill",
                cause=f"after {FILL_TIMEOUT_S:g} s no step decoded all {window.lanes} lanes",
                fix="fewer --lanes, or a longer --step-ms",
            )
        await asyncio.sleep(0.05)


async def _decode(client: Client, model: str, lane: int, max_tokens: int, window: _Window) -> None:
    """One endless answer, read as fast as it comes; no two lanes share a prefix."""
    prompt = [_FIRST_TOKEN_ID + (lane * PROMPT_TOKENS + i) % 10_000 for i in range(PROMPT_TOKENS)]
    frames = client.generate(
        model, prompt_token_ids=prompt, max_tokens=max_tokens, ignore_eos=True, temperature=0.0
    )
    async for frame in frames:
        window.add_tokens(len(frame["token_ids"]))


def _figures(window: _Window, spent_s: float) -> dict[str, Any]:
    import numpy as np

    if len(window.steps) < MIN_STEPS:
        cause = f"{len(window.steps)} steady steps; {MIN_STEPS} are needed"
        raise Problem("E406", "Too few steps", cause=cause, fix="more --seconds")
    period = np.array([step.period_us for step in window.steps]) / 1000.0
    planning = np.array([step.scheduler_us for step in window.steps])
    size = np.array([step.plan_bytes for step in window.steps])
    p50, p99 = np.percentile(period, [50, 99])
    planning_p50, planning_p99 = np.percentile(planning, [50, 99])
    return {
        "lanes": window.lanes,
        "steps": len(window.steps),
        "seconds": round(spent_s, 3),
        "step_period_ms": {
            "mean": round(float(period.mean()), 4),
            "p50": round(float(p50), 4),
            "p99": round(float(p99), 4),
        },
        "scheduler_us_per_step": {
            "p50": round(float(planning_p50), 1),
            "p99": round(float(planning_p99), 1),
        },
        "plan_bytes": {"p50": int(np.percentile(size, 50)), "max": int(size.max())},
        "tokens_per_s": round(window.lanes * 1000.0 / float(period.mean()), 1),
        "client_tokens_per_s": round(window.client_tokens / spent_s, 1),
    }
