"""Runs a seed of the simulator and counts what happened in it, so that coverage can be claimed."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any

from scheduler_svc.events import SendUpdates
from services.contracts.errors import StreetcarError
from services.contracts.kv import KvSnapshot
from services.contracts.step import Poll, PollReply, PollState, StepPlan
from services.contracts.vectors import unpack
from services.simulator.world import Report, World


class WatchedWorld(World):
    """Counts, beside the report, what only the messages show."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.seen: Counter[str] = Counter()
        self._behind: dict[int, int] = {}
        self._watch_scheduler()

    def _watch_scheduler(self) -> None:
        scheduler: Any = self.scheduler
        perform, post = scheduler.perform, scheduler.post

        def watched_perform(effect: Any) -> None:
            match effect:
                case KvSnapshot():
                    self.seen["snapshot"] += 1
                case Poll():
                    self.seen["poll sent"] += 1
                case SendUpdates():
                    self.seen["stopped"] += sum(
                        end.reason == "stop" for end in effect.updates.finished
                    )
            perform(effect)

        def watched_post(event: Any) -> None:
            if isinstance(event, PollReply):
                self.seen[f"poll says {event.state}"] += 1
                self.seen["result by poll"] += event.state is PollState.RESULT
            post(event)

        scheduler.perform, scheduler.post = watched_perform, watched_post

    def saw_plan(self, plan: StepPlan) -> None:
        super().saw_plan(plan)
        self.seen["reset"] += plan.reset
        self.seen["hold"] += len(unpack(plan.hold))
        self.seen["append"] += len(unpack(plan.append_lanes))
        left = set(unpack(plan.leave).tolist())
        self.seen["lane left and taken in one plan"] += sum(j.lane in left for j in plan.join)
        self.seen["joined with cached tokens"] += sum(j.num_computed_tokens > 0 for j in plan.join)
        chunks = dict(
            zip(unpack(plan.chunk_lanes).tolist(), unpack(plan.chunk_tokens).tolist(), strict=True)
        )
        joining = {join.lane for join in plan.join}
        self.seen["later chunk"] += len(chunks.keys() - joining)


@cache
def history(seed: int) -> tuple[Report, Counter[str]]:
    """Report and counts of one seed; a failure names the seed and the command that replays it."""
    world = WatchedWorld(seed)
    try:
        report = world.run()
    except (AssertionError, StreetcarError) as error:
        raise AssertionError(f"{error}\nseed {seed}; replay it: make sim SEED={seed}") from error
    world.seen["stale or repeated plan"] += sum(world.worker.executor.dropped.values())
    return report, world.seen
