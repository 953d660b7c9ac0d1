"""A sequence whose logits are not finite ends, and what it held is hit by nobody any more."""

from __future__ import annotations

from typing import Any

import msgspec

from scheduler_svc.forgotten import MAX_FORGOTTEN, Forgotten
from services.contracts.errors import ErrorCode
from services.contracts.hashing import HASH_BYTES
from services.contracts.kv import KvDelta, KvSnapshot, KvStatus, LookupReply, LookupRequest
from services.contracts.vectors import pack
from tests.unit.scheduler_svc.rig import Rig, answer, lanes_of

PROMPT = list(range(10))
BLOCKS = 2


def _spoil(rig: Rig, *tags: int) -> None:
    """Run the oldest plan; the lanes of `tags` have logits that are not finite."""
    step = rig.core.batch.pipeline.steps[0]
    lanes = rig.core.batch.lanes
    failed = [
        lane
        for lane in step.sampled.tolist()
        if (step.departed.get(lane) or lanes.occupant(lane)).tag in tags
    ]
    result = rig.run(rig.queue.popleft())
    rig.handle(msgspec.structs.replace(result, failed=pack(failed)))


def _forgotten(rig: Rig) -> list[bytes]:
    return [delta.forget for delta in rig.all(KvDelta) if delta.forget]


def _pool(rig: Rig) -> Any:
    return rig.kv.ledgers["engine-0"].pool


def test_its_committed_prefix_is_forgotten_and_the_next_one_computes_it_anew() -> None:
    rig = Rig()
    rig.submit("s1", PROMPT, 9)
    rig.step()
    _spoil(rig, 1)
    rig.drain()
    assert [end.code for end in rig.ends(1)] == [ErrorCode.NUMERICS]
    (forget,) = _forgotten(rig)
    assert len(forget) == HASH_BYTES, "one hash: the rest hangs below it"
    assert _pool(rig).num_cached == 0
    rig.submit("s2", PROMPT, 9)
    rig.drain()
    assert rig.tokens(2) == answer(PROMPT, 9) and rig.core.totals.num_prefix_hits == 0
    rig.submit("s3", PROMPT, 9)
    rig.drain()
    assert rig.core.totals.num_prefix_hits == BLOCKS * 4, "content anew is content"


def test_one_that_has_committed_nothing_is_not_spoken_of() -> None:
    rig = Rig()
    rig.submit("s1", PROMPT, 9)
    _spoil(rig, 1)
    rig.drain()
    assert rig.ends(1) and not _forgotten(rig)


def test_what_it_has_hit_is_forgotten_and_those_that_share_it_go_on() -> None:
    rig = Rig()
    rig.submit("s1", PROMPT, 2)
    rig.drain()
    for tag in (2, 3):
        rig.submit(f"s{tag}", PROMPT, 20)
    rig.step()
    one, other = [join for plan in rig.plans for join in plan.join][-2:]
    assert lanes_of(one.block_ids)[:BLOCKS] == lanes_of(other.block_ids)[:BLOCKS]
    _spoil(rig, 2)
    assert len(_forgotten(rig)) == 1
    rig.drain()
    assert rig.ends(2)[0].code is ErrorCode.NUMERICS
    assert rig.tokens(3) == answer(PROMPT, 20) and rig.ends(3)[0].code is None
    assert _pool(rig).num_cached == 0, "what the other has committed on top of it is not kept"


def test_who_waits_with_it_pinned_lets_it_go() -> None:
    rig = Rig(max_num_seqs=1)
    rig.submit("s1", PROMPT, 4)
    rig.step()
    rig.submit("s2", PROMPT, 9)
    (waiting,) = rig.core.waiting
    assert len(waiting.block_ids) == BLOCKS
    _spoil(rig, 1)
    rig.drain()
    assert rig.tokens(2) == answer(PROMPT, 9)
    join = next(join for plan in reversed(rig.plans) for join in plan.join)
    assert join.num_computed_tokens == 0


def test_a_lookup_under_way_is_given_up() -> None:
    rig = Rig()
    rig.submit("s1", PROMPT, 9)
    rig.step()
    rig.ledger = False
    rig.submit("s2", PROMPT, 9)
    number = rig.last(LookupRequest).number
    _spoil(rig, 1)
    (delta,) = [delta for delta in rig.all(KvDelta) if delta.forget]
    assert lanes_of(delta.abandoned) == [number]
    late = pack([40, 41])
    rig.handle(LookupReply(rig.generation, rig.epoch, number, KvStatus.OK, late))
    assert 40 not in rig.core.batch.lease.holds
    rig.drain()
    assert rig.tokens(2) == answer(PROMPT, 9)


def test_the_ledger_is_told_before_anybody_asks_again() -> None:
    """Two end in one step, and the next in line looks up at once."""
    rig = Rig(max_num_seqs=1)
    rig.submit("s1", PROMPT, 9)
    for tag in range(2, 9):
        rig.submit(f"s{tag}", [50 + tag] * 9 if tag < 8 else PROMPT, 1)
    rig.step()
    _spoil(rig, 1)
    kinds = [
        effect
        for effect in rig.effects
        if isinstance(effect, LookupRequest) or (isinstance(effect, KvDelta) and effect.forget)
    ]
    forgets = [at for at, effect in enumerate(kinds) if isinstance(effect, KvDelta)]
    asked_after = [effect for effect in kinds[forgets[0] :] if isinstance(effect, LookupRequest)]
    assert len(forgets) == 1 and asked_after, "somebody asks in the very same step"
    rig.drain()
    assert rig.tokens(8) == answer(PROMPT, 1)


def test_every_snapshot_of_that_worker_repeats_it() -> None:
    rig = Rig()
    rig.submit("s1", PROMPT, 9)
    rig.step()
    _spoil(rig, 1)
    (forget,) = _forgotten(rig)
    rig.core.batch.lease.snapshot_due = True
    rig.tick()
    assert rig.last(KvSnapshot).forget == forget
    rig.core._detach()
    rig.tick()
    rig.attached()
    assert rig.last(KvSnapshot).forget == forget, "in a new epoch of the same worker too"
    rig.core._detach()
    rig.generation += 1
    rig.tick()
    rig.attached()
    assert rig.last(KvSnapshot).forget == b"", "another worker has another cache"


def test_it_is_bounded_and_keeps_the_latest() -> None:
    forgotten = Forgotten()
    hashes = [number.to_bytes(HASH_BYTES, "big") for number in range(MAX_FORGOTTEN + 1)]
    for content_hash in [*hashes[:-1], hashes[0], hashes[-1]]:
        forgotten.add(content_hash)
    assert forgotten.hashes == b"".join([*hashes[2:-1], hashes[0], hashes[-1]])
