"""A request that kills the worker ends as `poisoned` after its third death, and everybody else gets
the one right stream.
"""

from __future__ import annotations

import dataclasses

import pytest

from scheduler_svc.policies import Policies
from services.contracts.errors import ErrorCode, StreetcarError
from services.simulator.nodes import VOCAB_SIZE
from services.simulator.options import Options
from services.simulator.world import Client, World

SEEDS = range(1, 13)
MARKERS = (VOCAB_SIZE, VOCAB_SIZE + 1)
DEATHS_OF_A_POISON = 3
DEATHS_OF_A_PAIR = 4


class PoisonedWorld(World):
    """The first `len(markers)` requests carry a marker each, which kills when all are computed in
    one step.
    """

    def __init__(self, seed: int, markers: tuple[int, ...]) -> None:
        self.markers = markers
        super().__init__(seed)

    def _draw(self) -> Options:
        drawn = super()._draw()
        if len(self.markers) > 1:
            # That the two may meet, they come together, and go into one step.
            drawn = dataclasses.replace(
                drawn,
                mean_arrival_ns=1,
                max_num_seqs=4,
                max_num_batched_tokens=512,
                policies=Policies(batching="dynamic", batch_size=4),
            )
        return dataclasses.replace(
            drawn,
            num_requests=max(4, drawn.num_requests),
            poison=self.markers,
            num_prompts=0,
            shared_prefix=0,
            cancel=0.0,
            deadline=0.0,
            reattach=0.0,
            scheduler_restart=0.0,
            admission_death=0.0,
        )

    def _draw_client(self, request_id: str, shared: list[int]) -> Client:
        client = super()._draw_client(request_id, shared)
        client.may_end_early = len(self.clients) < len(self.markers)
        return client

    def _draw_prompt(self, shared: list[int]) -> list[int]:
        prompt = super()._draw_prompt(shared)
        if len(self.clients) < len(self.markers):
            prompt[self.rng.randrange(len(prompt))] = self.markers[len(self.clients)]
        return prompt


def _run(seed: int, markers: tuple[int, ...]) -> PoisonedWorld:
    world = PoisonedWorld(seed, markers)
    try:
        world.run()
    except (AssertionError, StreetcarError) as error:
        raise AssertionError(f"{error}\nseed {seed}") from error
    return world


@pytest.mark.parametrize("seeds", [SEEDS])
def test_a_poison_dies_three_times_and_nobody_with_it(seeds: range) -> None:
    poisoned = 0
    for seed in seeds:
        world = _run(seed, MARKERS[:1])
        last = world.clients["r0"].frames[-1]
        assert last.error is not None, f"seed {seed}: {last}"
        assert last.error.code is ErrorCode.POISONED, f"seed {seed}"
        assert world.worker.generation == 1 + DEATHS_OF_A_POISON, f"seed {seed}"
        poisoned += 1
    assert poisoned >= len(seeds) * 3 // 4


@pytest.mark.parametrize("seeds", [SEEDS])
def test_what_kills_only_in_company_is_kept_apart(seeds: range) -> None:
    """Nobody is guilty, nobody is failed, and the worker deaths have an end."""
    deaths = 0
    for seed in seeds:
        world = _run(seed, MARKERS)
        for client in world.clients.values():
            error = client.frames[-1].error
            assert error is None, f"seed {seed}: {error}"
        assert world.worker.generation <= 1 + DEATHS_OF_A_PAIR, f"seed {seed}"
        deaths += world.worker.generation - 1
    assert deaths >= len(seeds) // 4
