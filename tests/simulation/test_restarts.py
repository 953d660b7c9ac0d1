"""Any one process may die at any time: every request still gets the one right stream.

The services of the simulation are killed in the middle of their work and start with nothing but
their settings, as a supervisor would start them.
"""

from __future__ import annotations

import dataclasses

import pytest

from kv_store.core import KvCore
from scheduler_svc.core import SchedulerCore
from services.contracts.errors import StreetcarError
from services.simulator.world import DOWN_TIMES_NS, World

SEEDS = range(1, 17)
KINDS = ("scheduler", "kv_store", "worker", "admission")
MAX_KILLS = 3
# A third death in the same few tokens is a poison's.
MAX_WORKER_KILLS = 2


class MortalWorld(World):
    """Kills one of `kinds` after some steps, three times at most."""

    def __init__(self, seed: int, kinds: tuple[str, ...]) -> None:
        super().__init__(seed)
        self.kinds = kinds
        self.kills = 0

    def step_done(self) -> None:
        super().step_done()
        if self.kills < MAX_KILLS and self.rng.random() < 0.1:
            kind = self.rng.choice(self.kinds)
            if kind == "worker" and self.worker.generation > MAX_WORKER_KILLS:
                return
            self.kills += 1
            self._kill(kind)

    def _kill(self, kind: str) -> None:
        if kind == "scheduler":
            old = self.scheduler.core.config
            config = dataclasses.replace(old, incarnation=f"sim-{self.kills}")
            self.scheduler.core = SchedulerCore(config)
            self.scheduler.start()
        elif kind == "kv_store":
            self.kv.core = KvCore("kv-0")
        elif kind == "worker":
            self.worker.restart()
        else:
            living = [node for node in self.admissions if node.alive]
            for node in living[:1]:
                node.die(self.rng.choice(DOWN_TIMES_NS))


@pytest.mark.parametrize("kind", KINDS)
def test_one_kind_dies_again_and_again(kind: str) -> None:
    assert _run((kind,)) >= len(SEEDS)


def test_anyone_dies() -> None:
    assert _run(KINDS) >= len(SEEDS)


def _run(kinds: tuple[str, ...]) -> int:
    """-> how many were killed."""
    kills = 0
    for seed in SEEDS:
        world = MortalWorld(seed, kinds)
        try:
            world.run()
        except (AssertionError, StreetcarError) as error:
            raise AssertionError(f"{error}\nseed {seed}, killing {kinds}") from error
        kills += world.kills
    return kills
