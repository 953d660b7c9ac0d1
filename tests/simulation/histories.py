"""Runs seeds of the simulator on both cores and counts what happened, so that coverage can be
claimed.
"""

from __future__ import annotations

import multiprocessing
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple

from services.contracts.step import StepPlan
from services.contracts.vectors import unpack
from services.simulator.check import Check
from services.simulator.replay import failure_text
from services.simulator.world import FAILURES, Report, World

CHUNK = 5
PROCESSES = 2


class History(NamedTuple):
    """`failure`: what broke, and how to see it again; "" where all is well."""

    report: Report | None
    seen: Counter[str]
    failure: str


class Seen(Check):
    """Counts what only the plans show."""

    name = "seen"

    def __init__(self, world: Any) -> None:
        super().__init__(world)
        self.counts: Counter[str] = Counter()

    def planned(self, node: Any, plan: StepPlan) -> None:
        counts = self.counts
        counts["reset"] += plan.reset
        counts["hold"] += len(unpack(plan.hold))
        counts["append"] += len(unpack(plan.append_lanes))
        left = set(unpack(plan.leave).tolist())
        counts["lane left and taken in one plan"] += sum(j.lane in left for j in plan.join)
        counts["joined with cached tokens"] += sum(j.num_computed_tokens > 0 for j in plan.join)
        joining = {join.lane for join in plan.join}
        counts["later chunk"] += len(set(unpack(plan.chunk_lanes).tolist()) - joining)


class WatchedWorld(World):
    def open(self) -> None:
        self.seen = Seen(self)
        self.checks.append(self.seen)


def history(seed: int) -> History:
    world = WatchedWorld(seed)
    try:
        report = world.run()
    except FAILURES as error:
        return History(None, world.seen.counts, failure_text(world, error))
    world.seen.counts["stale or repeated plan"] += sum(
        sum(node.executor.dropped.values()) for node in world.nodes if node.role == "worker"
    )
    return History(report, world.seen.counts, "")


def histories(seeds: Iterable[int]) -> Iterator[History]:
    """In order, computed by two processes."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(PROCESSES, mp_context=context) as pool:
        yield from pool.map(history, seeds, chunksize=CHUNK)
