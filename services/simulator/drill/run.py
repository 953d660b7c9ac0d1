"""A drill: meshes of its own, one after the other, each under load while faults come.

Invariants: the load has begun before the first fault and goes on after the last; a mesh is asked
for its books only when its streams have ended; its files stay where something went wrong.

Shell: processes, the clock.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from services.client import Client
from services.contracts.subjects import Subjects
from services.runtime.cluster import Cluster
from services.runtime.settings import Settings
from services.simulator.drill.books import read_books
from services.simulator.drill.cases import OVER_HTTP, draw_plan, model_prompts, stub_cases
from services.simulator.drill.checker import Books, Outcome, Stream
from services.simulator.drill.faults import Injector
from services.simulator.drill.load import Load, learn
from services.simulator.drill.schedule import Fault
from services.simulator.drill.watch import Watch

STUB: Final = "stub"
BEGIN_TIMEOUT_S: Final = 30.0
AFTERWARDS_S: Final = 0.5
"""How long the load goes on after the last fault is over."""

FIRST_FRAME_TIMEOUT_S: Final = 30.0
NEXT_FRAME_TIMEOUT_S: Final = 30.0
_POLL_S: Final = 0.02

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Mesh:
    """One cluster of a drill and what it has to bear. width: streams at once."""

    number: int
    settings: Settings
    faults: Sequence[Fault]
    width: int
    seed: int


@dataclass(frozen=True, slots=True)
class Found:
    """What one mesh has shown."""

    streams: list[Stream]
    outcomes: list[Outcome]
    books: Books
    unexpected_deaths: list[str]


def draw_settings(model: str, rng: random.Random, run_dir: Path) -> tuple[Settings, dict[str, Any]]:
    """A mesh for `model`, or for STUB, whose shape is drawn -> its settings, and what was drawn.

    The small pools are those in which sequences have to give way to each other.
    """
    drawn: dict[str, Any] = {
        "num_blocks": rng.choice([320, 640, 1024]),
        "host_blocks": rng.choice([0, 128]),
        "max_num_batched_tokens": rng.choice([128, 1024]),
        "max_model_len": 2048,
    }
    common: dict[str, Any] = {
        "num_admissions": 2,
        "fault_injection": "on",
        "run_dir": str(run_dir),
    }
    if model == STUB:
        drawn["step_ms"] = rng.choice([5.0, 10.0])
        return Settings(worker="stub", served_name=STUB, **common, **drawn), drawn
    return Settings(model=model, dtype="float32", **common, **drawn), drawn


async def run_mesh(mesh: Mesh, say: Say) -> Found:
    """Start it, load it, break it, and ask what is left. Raises Problem where it is given up."""
    watch = Watch()
    async with Cluster(mesh.settings, watch) as cluster:
        given_up = asyncio.ensure_future(cluster.wait())
        drill = asyncio.ensure_future(_drill(mesh, cluster, watch, say))
        try:
            await asyncio.wait({given_up, drill}, return_when=asyncio.FIRST_COMPLETED)
            if not drill.done():
                raise given_up.result()
            return drill.result()
        finally:
            given_up.cancel()
            drill.cancel()
            await asyncio.wait({given_up, drill})


async def _drill(mesh: Mesh, cluster: Cluster, watch: Watch, say: Say) -> Found:
    injector = Injector(cluster, watch, mesh.number)
    client = Client(
        cluster.nats_url,
        first_frame_timeout_s=FIRST_FRAME_TIMEOUT_S,
        next_frame_timeout_s=NEXT_FRAME_TIMEOUT_S,
    )
    async with client:
        load = await _prepare(mesh, client, cluster.http_url)
        load.begin(mesh.width)
        try:
            outcomes = await _break(mesh, load, injector, say)
            await load.end()
        finally:
            load.cancel()
    names = Subjects(mesh.settings.subject_prefix)
    books = await read_books(cluster.observer_url, names, mesh.settings.engine_id)
    expected = {id(seen) for seen in injector.expected_deaths}
    deaths = [
        f"{seen.event.service}: {seen.event.text}"
        for seen in watch.deaths
        if id(seen) not in expected
    ]
    return Found(load.streams, outcomes, books, deaths)


async def _prepare(mesh: Mesh, client: Client, http_url: str) -> Load:
    """A load whose right answers are known. A model's text does not name its tokens: NATS only."""
    name = mesh.settings.served_name
    if mesh.settings.worker == STUB:
        cases, http_share = stub_cases(mesh.seed), OVER_HTTP
    else:
        cases, http_share = await learn(client, name, model_prompts(mesh.seed)), 0.0
    return Load(client, http_url, name, lambda rng: draw_plan(rng, cases, http_share), mesh.seed)


async def _break(mesh: Mesh, load: Load, injector: Injector, say: Say) -> list[Outcome]:
    """All faults, in order; those that come together overlap."""
    await _until_streaming(load, mesh.width // 2)
    tasks: list[asyncio.Task[Outcome]] = []
    for fault in mesh.faults:
        if tasks and not fault.together:
            await asyncio.wait(tasks)
            await _until_streaming(load, 1)
        await asyncio.sleep(fault.gap_s)
        load.check()
        tasks.append(asyncio.create_task(_inject(fault, len(tasks), injector, say)))
    outcomes = [await task for task in tasks]
    await _until_streaming(load, 1)
    await asyncio.sleep(AFTERWARDS_S)
    return outcomes


async def _inject(fault: Fault, number: int, injector: Injector, say: Say) -> Outcome:
    outcome = await injector.inject(fault)
    sign = "" if outcome.verified else "  NOT VERIFIED"
    took = f"  back after {outcome.ready_s:.1f} s" if outcome.ready_s is not None else ""
    say(f"{number:4}  {fault.service:<12} {fault.label:<36} {outcome.evidence}{took}{sign}")
    return outcome


async def _until_streaming(load: Load, at_least: int) -> None:
    """Wait until so many new tokens' streams run; a mesh that never recovers ends the wait."""
    since_s, deadline_s = time.monotonic(), time.monotonic() + BEGIN_TIMEOUT_S
    while time.monotonic() < deadline_s:
        running = sum(1 for s in load.streams if not s.ended_s and s.last_s > since_s)
        if running >= at_least:
            return
        load.check()
        await asyncio.sleep(_POLL_S)


def split(faults: Sequence[Fault], most: int) -> list[list[Fault]]:
    """`faults` over as many meshes as it takes for `most` each."""
    num_meshes = -(-len(faults) // most)
    size = -(-len(faults) // num_meshes)
    return [list(faults[start : start + size]) for start in range(0, len(faults), size)]
