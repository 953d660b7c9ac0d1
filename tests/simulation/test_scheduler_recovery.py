"""A scheduler dies: the ledger kept its committed blocks, and its successor computes none of them
again, but a ledger that was replaced before that has nothing to give any more. One whose attach is
not answered asks again.
"""

from __future__ import annotations

import itertools

import pytest

from kv_store.core import KvCore
from scheduler_svc.core import SchedulerConfig, SchedulerCore
from scheduler_svc.lease import LEASE_RETRY_NS
from scheduler_svc.owners import BEAT_NS, SUSPECT_NS
from scheduler_svc.worker_link import ATTACH_RETRY_NS
from services.contracts import codec
from services.contracts.beats import Beat, ServiceKind
from services.contracts.limits import MAX_PAYLOAD_BYTES
from services.contracts.step import Attach
from services.simulator.network import Parcel
from services.simulator.nodes import ATTACH_TIMEOUT_NS
from services.simulator.world import World
from tests.unit.scheduler_svc.rig import Rig, answer, lanes_of

PROMPT = list(range(1, 40))
BLOCK = 4
_attach = codec.Decoder(Attach)


def _successor(rig: Rig) -> None:
    """Another scheduler, which knows nothing, on the same worker and ledger."""
    config = SchedulerConfig(
        engine="engine-0",
        scheduler_id="scheduler-1",
        incarnation="successor",
        model="shadow",
        max_num_seqs=4,
        max_num_batched_tokens=64,
        max_waiting_seqs=100,
        max_join_bytes=MAX_PAYLOAD_BYTES,
    )
    rig.core = SchedulerCore(config)
    rig.queue.clear()
    rig.tick()
    rig.attached()


def test_a_resubmitted_sequence_finds_its_committed_blocks() -> None:
    rig = Rig(num_blocks=64, block_size=BLOCK)
    rig.submit("r1", PROMPT, 30)
    for _ in range(12):
        rig.step()
    accepted = rig.tokens(1)
    # The last accepted token is not computed yet; every full block before it was committed.
    committed = (len(PROMPT) + len(accepted) - 1) // BLOCK
    old_epoch = rig.epoch
    _successor(rig)
    assert rig.epoch == old_epoch + 1
    rig.submit("r1", PROMPT, 30, accepted=accepted)
    (join,) = rig.queue[0].join
    assert join.num_computed_tokens == committed * BLOCK
    computed = 0
    while rig.queue:
        plan = rig.step()
        computed += sum(lanes_of(plan.chunk_tokens))
    assert computed <= len(PROMPT) + len(accepted) - committed * BLOCK, "no block is recomputed"
    assert rig.tokens(1) == answer(PROMPT, 30)
    assert rig.ends(1)[-1].reason == "length"


def _hear(rig: Rig, *leaving: str, beating: str) -> None:
    for name in leaving:
        rig.handle(Beat(ServiceKind.KV_STORE, name, leaving=True))
    for _ in range(SUSPECT_NS // BEAT_NS + 2):
        rig.tick(BEAT_NS)
        rig.handle(Beat(ServiceKind.KV_STORE, beating))


@pytest.mark.parametrize("remembers", [True, False])
def test_a_ledger_that_was_replaced_gives_nothing_to_a_new_scheduler(remembers: bool) -> None:
    """It was never told, its successor is dead, and the scheduler that knew both is dead too: the
    worker alone knows whose blocks it has filled since. Without that memory the answer is wrong.
    """
    rig = Rig(num_blocks=16, block_size=BLOCK)
    rig.submit("r1", PROMPT, 8)
    rig.drain()
    first, rig.kv = rig.kv, KvCore("kv-1")
    _hear(rig, "kv-0", beating="kv-1")
    rig.submit("r2", [100 + token for token in PROMPT], 8)
    rig.drain()
    rig.kv = first
    rig.filled_by = rig.filled_by if remembers else "kv-0"
    rig.ledger = False
    _successor(rig)
    _hear(rig, beating="kv-0")
    rig.ledger = True
    rig.tick(LEASE_RETRY_NS)
    rig.submit("r3", PROMPT, 8)
    rig.drain()
    assert (rig.tokens(3) == answer(PROMPT, 8)) is remembers


class AnswersLost(World):
    """The first `lose` answers to an attach are lost, and nothing else is."""

    def __init__(self, seed: int, lose: int) -> None:
        super().__init__(seed)
        self.left = lose
        self.asked: list[tuple[int, Attach]] = []

    def open(self) -> None:
        self.network.watch = self.watch

    def watch(self, parcel: Parcel) -> bool:
        if parcel.kind == "attach":
            self.asked.append((self.clock.now_ns, _attach.decode(parcel.payload)))
        lost = parcel.kind == "attach reply" and self.left > 0
        self.left -= lost
        return lost


@pytest.mark.parametrize("lose", [2, 3])
def test_an_attach_whose_answer_is_lost_is_asked_again_and_costs_no_epoch(lose: int) -> None:
    seed = next(seed for seed in range(1, 100) if World(seed).options.faults.none)
    world = AnswersLost(seed, lose)
    report = world.run()
    times, asked = zip(*world.asked, strict=True)
    assert len(asked) == lose + 1 and len({attach.attempt for attach in asked}) == 1
    # The second is for the worker's first beat: it may be another one than the first was for.
    for before, after in itertools.pairwise(times[1:]):
        assert 0 < after - before <= ATTACH_TIMEOUT_NS + ATTACH_RETRY_NS
    assert world.scheduler.core.link.epoch == 1 and report.steps
