"""Host memory below the pool: what is written back, when it is believed, what a hit brings in."""

from __future__ import annotations

import pytest

from kv_store.block_pool import BlockPool
from kv_store.content import Copies
from kv_store.core import KvCore
from kv_store.policy import Costs, affordable_hit, cheapest_hit
from services.contracts.kv import KvStatus
from services.contracts.vectors import pack
from tests.unit.kv_store.messages import ENGINE, Peer, commits, ids

PROMPT = list(range(8))
A, B = pack([1]), pack([2])


def _bound(num_blocks: int = 3, host_blocks: int = 4) -> Peer:
    """A ledger of two usable blocks, PROMPT cached in them."""
    peer = Peer(KvCore("kv-0"), num_blocks=num_blocks)
    peer.snapshot(host_blocks=host_blocks)
    blocks = ids(peer.lease(2).block_ids)
    peer.delta(content=commits(blocks, PROMPT), released=blocks[::-1])
    return peer


def _host(peer: Peer) -> tuple[int, int, int]:
    """(free, writing, cached)."""
    host = peer.core.ledgers[ENGINE].pool.host
    assert host.num_free + host.num_writing + host.num_cached == host.num_slots
    return host.num_free, host.num_writing, host.num_cached


def _written_back(peer: Peer) -> None:
    """PROMPT lies in host memory alone; the pool is free."""
    grant = peer.lease(2)
    assert len(ids(grant.copies_out)) == 4
    peer.delta(copied=[grant.number], released=ids(grant.block_ids))
    assert peer.counts() == (2, 0, 0) and _host(peer) == (2, 0, 2)


def test_eviction_names_the_copy_and_a_hit_brings_it_in() -> None:
    peer = _bound()
    _written_back(peer)
    hit = peer.lookup(PROMPT)
    blocks = ids(hit.block_ids)
    assert len(blocks) == 2 and ids(hit.copies_in)[1::2] == blocks and not hit.copies_out
    assert peer.counts() == (0, 2, 0)
    peer.delta(copied=[hit.number])
    peer.delta(released=blocks[::-1])
    assert peer.counts() == (0, 0, 2) and _host(peer) == (2, 0, 2)
    again = peer.lookup(PROMPT)
    assert ids(again.block_ids) == blocks and not again.copies_in, "the pool has it now"


def test_a_slot_counts_only_after_its_step_is_confirmed() -> None:
    peer = _bound()
    grant = peer.lease(2)
    peer.delta(released=ids(grant.block_ids))
    assert _host(peer) == (2, 2, 0) and not peer.lookup(PROMPT).block_ids
    peer.delta(copied=[grant.number])
    assert _host(peer) == (2, 0, 2) and len(ids(peer.lookup(PROMPT).block_ids)) == 2


@pytest.mark.parametrize("how", ["abandoned", "snapshot", "epoch"])
def test_unconfirmed_copies_out_are_dropped(how: str) -> None:
    peer = _bound()
    grant = peer.lease(2)
    assert _host(peer) == (2, 2, 0)
    if how == "abandoned":
        peer.delta(abandoned=[grant.number])
    elif how == "snapshot":
        peer.snapshot(host_blocks=4)
    else:
        peer = Peer(peer.core, epoch=2, num_blocks=3)
        peer.snapshot(host_blocks=4)
    assert peer.counts() == (2, 0, 0) and _host(peer) == (4, 0, 0)
    assert not peer.lookup(PROMPT).block_ids


def test_an_abandoned_hit_gives_blocks_and_pins_back_and_claims_nothing() -> None:
    peer = _bound()
    _written_back(peer)
    hit = peer.lookup(PROMPT)
    peer.delta(abandoned=[hit.number])
    assert peer.counts() == (2, 0, 0) and _host(peer) == (2, 0, 2)
    assert peer.core.ledgers[ENGINE].pool.tenant_counts == {}


def test_a_released_arrival_that_was_never_confirmed_is_free() -> None:
    peer = _bound()
    _written_back(peer)
    hit = peer.lookup(PROMPT)
    peer.delta(released=ids(hit.block_ids))
    assert peer.counts() == (2, 0, 0)
    peer.delta(copied=[hit.number])
    assert peer.counts() == (2, 0, 0), "a late confirmation changes nothing"


def test_whoever_hits_an_arrival_gets_the_same_copy_and_its_own_pin() -> None:
    peer = _bound()
    _written_back(peer)
    first, second = peer.lookup(PROMPT), peer.lookup(PROMPT)
    assert second.block_ids == first.block_ids and second.copies_in == first.copies_in
    peer.delta(abandoned=[first.number])
    assert peer.counts() == (0, 2, 0)
    peer.delta(copied=[second.number])
    peer.delta(released=ids(second.block_ids))
    assert peer.counts() == (0, 0, 2) and _host(peer) == (2, 0, 2)


def test_a_slot_that_a_copy_reads_is_not_given_away() -> None:
    pool = BlockPool(4, 1, host_blocks=1)
    (block,) = pool.grant(1)
    pool.commit(block, b"a", A, None, b"")
    pool.release(block)
    out = Copies()
    blocks = pool.grant(3, out)
    pool.confirm(out)
    for block in blocks:
        pool.release(block)
    bring = Copies()
    (arrived,) = pool.lookup(b"", [b"a"], [A], bring)
    (other,) = pool.grant(1)
    pool.commit(other, b"b", B, None, b"")
    pool.release(other)
    more = Copies()
    pool.grant(2, more)
    assert not more.outs, "its only slot is being read"
    pool.confirm(bring)
    pool.check_invariants()
    assert pool.lookup(b"", [b"a"], [A]) == [arrived]


def test_what_host_memory_has_already_is_not_copied_again() -> None:
    peer = _bound()
    _written_back(peer)
    hit = peer.lookup(PROMPT)
    peer.delta(copied=[hit.number], released=ids(hit.block_ids)[::-1])
    grant = peer.lease(2)
    assert len(ids(grant.block_ids)) == 2 and not grant.copies_out
    peer.delta(released=ids(grant.block_ids))
    assert len(ids(peer.lookup(PROMPT).block_ids)) == 2


def test_case_06_a_hit_is_cut_to_the_room_there_is_without_side_effects() -> None:
    peer = _bound()
    _written_back(peer)
    (taken,) = ids(peer.lease(1).block_ids)
    assert len(ids(peer.lookup(PROMPT).block_ids)) == 1
    assert peer.counts() == (0, 2, 0)
    assert not peer.lookup(PROMPT[4:]).block_ids
    peer.delta(abandoned=[peer.requests, peer.requests - 1], released=[taken])
    assert peer.counts() == (2, 0, 0) and _host(peer) == (2, 0, 2)


def test_a_new_generation_has_empty_host_memory() -> None:
    peer = _bound()
    _written_back(peer)
    young = Peer(peer.core, generation=2, epoch=2, num_blocks=3)
    young.snapshot(host_blocks=4)
    assert _host(young) == (4, 0, 0) and not young.lookup(PROMPT).block_ids
    assert peer.lease(1).status is KvStatus.STALE


def test_over_quota_blocks_go_to_host_memory_when_they_are_granted() -> None:
    pool = BlockPool(5, 1, host_blocks=4, tenant_share=0.25)
    for at, tokens in enumerate((A, B)):
        (block,) = pool.grant(1)
        pool.commit(block, bytes([at]), tokens, None, b"t")
        pool.release(block)
    assert (pool.num_free, pool.num_cached) == (3, 1)
    copies = Copies()
    pool.grant(1, copies)
    assert [write.entry.tokens for write in copies.outs] == [A]
    pool.confirm(copies)
    pool.check_invariants()
    assert pool.host.num_cached == 1


@pytest.mark.parametrize(
    ("in_host", "copy", "recompute", "taken"),
    [
        ([False, True, False], 30, 20, 3),
        ([False, True], 30, 20, 1),
        ([True, True], 10, 20, 2),
        ([True, True, False], 30, 10, 0),
        ([True, True], 0, 20, 2),
        ([True, True], 30, 0, 2),
        ([], 30, 20, 0),
    ],
)
def test_a_hit_is_as_long_as_it_pays(
    in_host: list[bool], copy: int, recompute: int, taken: int
) -> None:
    assert cheapest_hit(in_host, copy, recompute) == taken


def test_a_dear_copy_is_recomputed_instead() -> None:
    pool = BlockPool(3, 1, host_blocks=1)
    (block,) = pool.grant(1)
    pool.commit(block, b"a", A, None, b"")
    pool.release(block)
    out = Copies()
    for block in pool.grant(2, out):
        pool.release(block)
    pool.confirm(out)
    assert pool.lookup(b"", [b"a"], [A], Copies(), Costs(copy=9, recompute=3)) == []
    assert len(pool.lookup(b"", [b"a"], [A], Copies(), Costs(copy=3, recompute=9))) == 1


def test_room_is_counted_with_the_pins_of_the_hit_itself() -> None:
    assert affordable_hit([True, False, False], [True, False, False], 2) == 2
    assert affordable_hit([True, False], [False, False], 1) == 2
    assert affordable_hit([False], [False], 0) == 0
