"""A scheduler dies: the ledger kept its committed blocks, and its successor computes none of them
again.
"""

from __future__ import annotations

from scheduler_svc.core import SchedulerConfig, SchedulerCore
from services.contracts.limits import MAX_PAYLOAD_BYTES
from tests.unit.scheduler_svc.rig import Rig, answer, lanes_of

PROMPT = list(range(1, 40))
BLOCK = 4


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
