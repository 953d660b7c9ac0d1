"""The ledger: whom it believes, what it grants, and how it repairs what it missed."""

from __future__ import annotations

from typing import Any

import pytest

from kv_store.core import KvCore
from services.contracts.errors import InvariantError, WireError
from services.contracts.kv import Commits, KvStatus
from services.contracts.vectors import pack
from tests.unit.kv_store.messages import ENGINE, Peer, commits, ids

PROMPT = list(range(12))


def _bound(num_blocks: int = 9) -> Peer:
    peer = Peer(KvCore("kv-0"), num_blocks=num_blocks)
    peer.snapshot()
    return peer


def _cached(peer: Peer, tokens: list[int], salt: bytes = b"") -> list[int]:
    """Leave `tokens` in the cache -> the blocks."""
    blocks = ids(peer.lease(len(tokens) // 4).block_ids)
    peer.delta(content=commits(blocks, tokens, salt), released=blocks[::-1])
    return blocks


def test_nothing_is_granted_before_the_snapshot() -> None:
    peer = Peer(KvCore("kv-0"))
    reply = peer.lease(3)
    assert reply.status is KvStatus.NEED_SNAPSHOT and not reply.block_ids
    assert peer.lookup(PROMPT).status is KvStatus.NEED_SNAPSHOT
    peer.snapshot()
    assert ids(peer.lease(3).block_ids) == [1, 2, 3]


def test_block_0_is_never_granted_and_a_grant_is_as_large_as_it_can_be() -> None:
    peer = _bound()
    reply = peer.lease(100)
    assert ids(reply.block_ids) == list(range(1, 9))
    assert (reply.status, reply.num_available) == (KvStatus.OK, 0)
    assert not peer.lease(1).block_ids and peer.counts() == (0, 8, 0)


def test_a_repeated_request_gets_the_same_answer() -> None:
    peer = _bound()
    first = peer.lease(2, number=1)
    assert peer.lease(2, number=1) == first
    assert peer.counts() == (6, 2, 0)
    _cached(peer, PROMPT)
    hit = peer.lookup(PROMPT)
    again = peer.lookup(PROMPT, number=peer.requests)
    assert again == hit and peer.counts()[1] == 2 + 3
    assert peer.core.ledgers[ENGINE].pool.holds(ids(hit.block_ids)[0]) == 1


def test_a_lower_epoch_is_stale_and_hears_which_one_rules() -> None:
    peer = _bound()
    young = Peer(peer.core, epoch=3)
    young.snapshot()
    reply = peer.lease(1)
    assert (reply.status, reply.epoch) == (KvStatus.STALE, 3)
    assert peer.lookup(PROMPT).status is KvStatus.STALE
    before = young.counts()
    peer.snapshot({1: 1})
    peer.delta(released=[1])
    assert young.counts() == before
    assert young.lease(1).status is KvStatus.OK


def test_a_higher_epoch_needs_its_snapshot_first() -> None:
    peer = _bound()
    assert Peer(peer.core, epoch=2).lease(1).status is KvStatus.NEED_SNAPSHOT


def test_a_new_epoch_finds_what_the_old_one_left() -> None:
    peer = _bound()
    blocks = ids(peer.lease(4).block_ids)
    peer.delta(content=commits(blocks[:3], PROMPT))
    young = Peer(peer.core, epoch=2)
    young.snapshot()
    assert young.counts() == (5, 0, 3)
    assert ids(young.lookup(PROMPT).block_ids) == blocks[:3]


def test_a_new_generation_empties_the_pool() -> None:
    peer = _bound()
    _cached(peer, PROMPT)
    young = Peer(peer.core, generation=2, epoch=2, num_blocks=17)
    young.snapshot()
    assert young.counts() == (16, 0, 0)
    assert not young.lookup(PROMPT).block_ids
    assert peer.lease(1).status is KvStatus.STALE


def test_a_delta_gap_stops_grants_until_a_snapshot_repairs_it() -> None:
    peer = _bound()
    blocks = ids(peer.lease(4).block_ids)
    peer.delta(released=blocks[:1])
    peer.delta(number=4, released=blocks[1:2])
    assert peer.lease(1).status is KvStatus.NEED_SNAPSHOT
    assert peer.core.beat().pools[0].need_snapshot
    peer.delta(number=5, released=blocks[2:3])
    assert peer.counts() == (5, 3, 0), "after a gap nothing is applied"
    peer.snapshot({blocks[3]: 1})
    assert peer.counts() == (7, 1, 0)
    assert not peer.core.beat().pools[0].need_snapshot
    peer.delta(released=blocks[3:])
    assert peer.lease(1).status is KvStatus.OK


def test_a_repeated_delta_is_applied_once() -> None:
    peer = _bound()
    blocks = ids(peer.lease(2).block_ids)
    peer.delta(released=blocks[:1])
    peer.delta(number=peer.deltas, released=blocks[:1])
    assert peer.counts() == (7, 1, 0)


def test_a_repeated_snapshot_takes_nothing_back() -> None:
    """The scheduler that sent it may be dead, and its last plan still on its way."""
    peer = _bound()
    first = peer.deltas
    blocks = ids(peer.lease(2).block_ids)
    peer.snapshot(number=first)
    assert peer.counts() == (6, 2, 0)
    peer.delta(number=first + 1, released=blocks)
    assert peer.counts() == (8, 0, 0)


def test_a_beat_that_names_a_higher_delta_proves_a_loss() -> None:
    peer = _bound()
    peer.delta(released=ids(peer.lease(1).block_ids))

    def wants_snapshot(number: int, **changes: Any) -> bool:
        peer.beat(number, **changes)
        return peer.core.ledgers[ENGINE].need_snapshot

    assert not wants_snapshot(peer.deltas)
    assert not wants_snapshot(9, epoch=2)
    assert not wants_snapshot(9, service_id="engine-1")
    assert wants_snapshot(peer.deltas + 1)


def test_an_abandoned_request_gives_everything_back_once() -> None:
    peer = _bound()
    _cached(peer, PROMPT)
    peer.lookup(PROMPT)
    peer.lease(2)
    assert peer.counts() == (3, 5, 0)
    peer.delta(abandoned=[peer.requests, peer.requests - 1])
    assert peer.counts() == (5, 0, 3)


def test_a_request_that_arrives_after_it_was_abandoned_takes_nothing() -> None:
    peer = _bound()
    peer.delta(abandoned=[7])
    reply = peer.lease(3, number=7)
    assert reply.status is KvStatus.OK and not reply.block_ids
    assert peer.counts() == (8, 0, 0)


def test_a_request_closed_by_a_snapshot_takes_nothing() -> None:
    peer = _bound()
    peer.lease(2, number=5)
    peer.snapshot()
    assert peer.counts() == (8, 0, 0)
    assert not peer.lease(2, number=5).block_ids and not peer.lease(2, number=4).block_ids
    assert peer.lease(2, number=6).block_ids


def test_a_snapshot_repeats_holds_and_content() -> None:
    peer = _bound()
    blocks = ids(peer.lease(3).block_ids)
    peer.snapshot(dict.fromkeys(blocks, 2), commits=commits(blocks, PROMPT))
    pool = peer.core.ledgers[ENGINE].pool
    assert [pool.holds(block) for block in blocks] == [2, 2, 2]
    assert ids(peer.lookup(PROMPT).block_ids) == blocks
    peer.delta(abandoned=[peer.requests])
    for _ in range(2):
        peer.delta(released=blocks[::-1])
    assert peer.counts() == (5, 0, 3)


def test_a_snapshot_in_parts_counts_when_the_last_has_come() -> None:
    peer = _bound()
    blocks = ids(peer.lease(3).block_ids)
    content = commits(blocks, PROMPT)
    first = Commits(
        pack(blocks[:2]), pack([-1, blocks[0]]), content.hashes[:64], pack(PROMPT[:8]), [b""]
    )
    last = Commits(pack(blocks[2:]), pack([blocks[1]]), content.hashes[64:], pack(PROMPT[8:]), [])
    peer.snapshot({blocks[0]: 1, blocks[1]: 1}, part=0, parts=2, commits=first)
    assert peer.lease(1).status is KvStatus.NEED_SNAPSHOT
    peer.snapshot({blocks[2]: 1}, part=1, parts=2, commits=last)
    assert peer.counts() == (5, 3, 0)
    assert ids(peer.lookup(PROMPT).block_ids) == blocks


def test_a_lost_part_asks_for_another_snapshot() -> None:
    peer = _bound()
    peer.snapshot({1: 1}, part=0, parts=3)
    peer.snapshot({3: 1}, part=2, parts=3)
    assert peer.core.beat().pools[0].need_snapshot
    assert peer.lease(1).status is KvStatus.NEED_SNAPSHOT
    peer.snapshot()
    assert peer.counts() == (8, 0, 0) and peer.lease(1).status is KvStatus.OK


def test_deltas_are_not_applied_to_a_snapshot_that_is_not_whole() -> None:
    for lost in ("first", "last"):
        peer = _bound()
        blocks = ids(peer.lease(3).block_ids)
        if lost == "last":
            peer.snapshot({blocks[0]: 1}, part=0, parts=2)
        else:
            peer.deltas += 1
            peer.snapshot({blocks[0]: 1}, part=1, parts=2)
        before = peer.counts()
        peer.delta(content=commits(blocks[1:2], PROMPT), released=blocks[2:])
        assert peer.counts() == before
        assert peer.lease(1).status is KvStatus.NEED_SNAPSHOT
        assert peer.core.beat().pools[0].need_snapshot
        peer.snapshot(dict.fromkeys(blocks[:2], 1))
        assert peer.counts() == (6, 2, 0)


def test_case_59_a_salt_is_a_namespace_of_its_own() -> None:
    peer = _bound()
    blocks = _cached(peer, PROMPT, b"a")
    assert not peer.lookup(PROMPT, b"b").block_ids
    assert not peer.lookup(PROMPT).block_ids
    assert ids(peer.lookup(PROMPT, b"a").block_ids) == blocks


def test_case_06_hits_and_grants_never_count_a_block_twice() -> None:
    """Five blocks, two of them cached: a grant after the pin can have three, not five."""
    peer = _bound(num_blocks=6)
    cached = _cached(peer, PROMPT[:8])
    assert peer.counts() == (3, 0, 2)
    assert ids(peer.lookup(PROMPT[:8]).block_ids) == cached
    reply = peer.lease(4)
    assert len(ids(reply.block_ids)) == 3 and reply.num_available == 0
    assert peer.counts() == (0, 5, 0)
    peer.delta(abandoned=[peer.requests, peer.requests - 1])
    assert peer.counts() == (3, 0, 2), "all as before"
    assert ids(peer.lookup(PROMPT[:8]).block_ids) == cached


def test_case_07_a_block_released_twice_is_an_error_not_a_second_free_block() -> None:
    peer = _bound()
    (block,) = ids(peer.lease(1).block_ids)
    with pytest.raises(InvariantError, match="nobody holds"):
        peer.delta(released=[block, block])


def test_columns_of_different_length_are_refused() -> None:
    peer = _bound()
    (block,) = ids(peer.lease(1).block_ids)
    with pytest.raises(WireError):
        peer.delta(content=Commits(pack([block]), pack([-1, -1]), b"h" * 32, pack([1] * 4), [b""]))
    with pytest.raises(WireError):
        peer.delta(content=Commits(pack([block]), pack([-1]), b"h" * 31, pack([1] * 4), [b""]))


def test_engines_do_not_touch_each_other() -> None:
    peer = _bound()
    peer.lease(3)
    assert peer.counts() == (5, 3, 0)
    peer.beat(4, service_id="engine-9", epoch=9)
    assert peer.counts() == (5, 3, 0)


def test_the_beat_carries_every_pools_books() -> None:
    peer = _bound()
    _cached(peer, PROMPT)
    peer.lease(1)
    (load,) = peer.core.beat().pools
    assert (load.num_blocks, load.num_free, load.num_leased, load.num_cached) == (9, 4, 1, 3)
