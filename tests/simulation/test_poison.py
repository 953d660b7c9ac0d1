"""A request that kills the worker ends as `poisoned` after its third death, and everybody else gets
the one right stream.
"""

from __future__ import annotations

import dataclasses
import random

import pytest

import services.simulator.world
from scheduler_svc.policies import Policies
from services.contracts.errors import ErrorCode
from services.simulator import options
from services.simulator.model import Mark
from services.simulator.options import FaultOptions, Options
from services.simulator.world import World

SEEDS = range(1, 13)
DEATHS_OF_A_POISON = 3
DEATHS_IN_COMPANY = 4
"""Two before each of its two trials; a death that it gets past, by the luck of an empty step,
begins the count again, and comes at most once for each token that it gets further.
"""


@pytest.fixture(autouse=True)
def _nothing_else_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """No fault but the poison; requests come together, and may go into one step."""

    def draw(rng: random.Random, seed: int) -> Options:
        drawn = options.draw(rng, seed)
        return dataclasses.replace(
            drawn,
            num_requests=max(4, drawn.num_requests),
            mean_arrival_ns=1,
            max_num_seqs=4,
            max_num_batched_tokens=512,
            policies=Policies(batching="dynamic", batch_size=4),
            num_prompts=0,
            shared_prefix=0,
            cancel=0.0,
            vanish=0.0,
            deadline=0.0,
            nan=0.0,
            poison=0.0,
            never_fits=0.0,
            faults=FaultOptions(restart_ns=100_000_000),
        )

    monkeypatch.setattr(services.simulator.world, "draw", draw)


class PoisonedWorld(World):
    """The first `num_marked` requests are `mark`ed from their first token on."""

    def __init__(self, seed: int, mark: Mark, num_marked: int) -> None:
        super().__init__(seed)
        for number in range(1, num_marked + 1):
            self.marks[number] = (mark, 0)


def _code(world: World, request_id: str) -> ErrorCode | None:
    ending = world.clients[request_id].ending
    assert ending is not None
    return ending.error.code if ending.error else None


def test_a_poison_dies_three_times_and_nobody_with_it() -> None:
    for seed in SEEDS:
        world = PoisonedWorld(seed, Mark.DEADLY, 1)
        report = world.run()
        assert _code(world, "r1") is ErrorCode.POISONED, f"seed {seed}"
        assert report.errors == {"poisoned": 1}, f"seed {seed}"
        assert report.starts["worker"] == 1 + DEATHS_OF_A_POISON, f"seed {seed}"


@pytest.mark.parametrize(
    ("mark", "num_marked"), [(Mark.DEADLY_TOGETHER, 2), (Mark.DEADLY_IN_COMPANY, 1)]
)
def test_what_kills_only_in_company_is_kept_apart(mark: Mark, num_marked: int) -> None:
    """Nobody is guilty, nobody is failed, and the worker deaths have an end."""
    deaths = 0
    for seed in SEEDS:
        world = PoisonedWorld(seed, mark, num_marked)
        report = world.run()
        assert not report.errors, f"seed {seed}: {report.errors}"
        limit = DEATHS_IN_COMPANY + world.options.max_output
        assert report.starts["worker"] <= 1 + limit, f"seed {seed}"
        deaths += report.starts["worker"] - 1
    assert deaths >= len(SEEDS) // 4
