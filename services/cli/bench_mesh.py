"""`streetcar bench mesh`: fills every lane of a stub worker and measures the steps.

Invariant: only steps count in which every lane decodes and nothing else happens; the figures are
the scheduler's own, one StepEvent per step, next to what the client saw arrive and what the kernel
says of each process.

Shell: processes, the bus, the public client.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from services.cli.ledger_stop import LedgerStop
from services.cli.usage import Usage, usage_of
from services.runtime.problem import Problem
from services.runtime.settings import Settings, load

if TYPE_CHECKING:
    from services.client import Client
    from services.contracts.step import StepEvent
    from services.runtime.cluster import Cluster

PROMPT_TOKENS: Final = 16
WARM_UP_S: Final = 1.0
FILL_TIMEOUT_S: Final = 60.0
END_TIMEOUT_S: Final = 5.0
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
    frame_gaps: list[float] = field(default_factory=list)
    opened: float = 0.0

    def add(self, step: StepEvent, now: float) -> None:
        steady = step.num_decode_tokens == self.lanes and step.num_prefill_tokens == 0
        if not steady:
            return
        self.steady_since = self.steady_since or now
        if now - self.steady_since >= WARM_UP_S:
            self.opened = self.opened or now
            self.steps.append(step)

    def add_frame(self, num_tokens: int, gap_s: float) -> None:
        """`gap_s`: since the frame before it of the same request."""
        if self.opened:
            self.client_tokens += num_tokens
            self.frame_gaps.append(gap_s)


def bench_settings(lanes: int, step_ms: float, seconds: float) -> Settings:
    """A stub worker, answers longer than the measurement, and blocks enough that no sequence is
    ever preempted.
    """
    max_tokens = int((seconds + WARM_UP_S) * 1000 / max(step_ms, 0.5)) + _SLACK_STEPS
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


async def measure(
    cluster: Cluster, settings: Settings, seconds: float, stop: LedgerStop | None = None
) -> dict[str, Any]:
    """The figures of `seconds` steady seconds. Raises Problem where there are none."""
    from services.cli.bus import connect
    from services.cli.requests import connected
    from services.contracts.codec import Decoder
    from services.contracts.step import StepEvent
    from services.contracts.subjects import Subjects

    decoder = Decoder(StepEvent)
    window = _Window(settings.max_num_seqs)
    max_tokens = settings.max_model_len - PROMPT_TOKENS

    async def on_step(message: Any) -> None:
        step = decoder.decode(message.data)
        window.add(step, time.monotonic())
        if stop is not None:
            stop.add(step)

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
            pids = {**cluster.pids, "client": os.getpid()}
            before, steps_before = usage_of(pids), len(window.steps)
            if stop is None:
                await _unless_one_ends(tasks, asyncio.sleep(seconds))
            else:
                await _unless_one_ends(tasks, stop.run(cluster.pids["kv_store"], seconds))
            spent_s, after = time.monotonic() - window.opened, usage_of(pids)
            num_steps = len(window.steps) - steps_before
            stopped = {} if stop is None else {"ledger_stopped": stop.figures()}
            return _figures(window, spent_s) | _usage(before, after, num_steps) | stopped
        finally:
            await _end(tasks)


async def _end(tasks: list[asyncio.Task[None]]) -> None:
    """Cancel the answers. nats-py may lose the cancel of one, and the measurement is done: the end
    of the mesh ends it as well.
    """
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks, timeout=END_TIMEOUT_S)


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
    last = time.monotonic()
    async for frame in frames:
        now = time.monotonic()
        window.add_frame(len(frame["token_ids"]), now - last)
        last = now


def _figures(window: _Window, spent_s: float) -> dict[str, Any]:
    import numpy as np

    if len(window.steps) < MIN_STEPS:
        cause = f"{len(window.steps)} steady steps; {MIN_STEPS} are needed"
        raise Problem("E406", "Too few steps", cause=cause, fix="more --seconds")
    period = np.array([step.period_us for step in window.steps]) / 1000.0
    planning = np.array([step.scheduler_us for step in window.steps])
    size = np.array([step.plan_bytes for step in window.steps])
    p50, p99 = np.percentile(period, [50, 99])
    gap_p50, gap_p99 = np.percentile(window.frame_gaps or [0.0], [50, 99]) * 1000.0
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
        "frame_gap_ms": {"p50": round(float(gap_p50), 1), "p99": round(float(gap_p99), 1)},
    }


def _usage(
    before: Mapping[str, Usage], after: Mapping[str, Usage], num_steps: int
) -> dict[str, Any]:
    """Of each process over the measurement; empty where the system does not tell."""
    cpu = {
        name: round((usage.cpu_s - before[name].cpu_s) * 1e6 / max(1, num_steps))
        for name, usage in after.items()
    }
    memory = {
        name: [round(before[name].memory_mib, 1), round(usage.memory_mib, 1)]
        for name, usage in after.items()
    }
    return {"cpu_us_per_step": cpu, "memory_mib": memory}
