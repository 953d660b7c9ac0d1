"""Whose cached block gives way: fair between tenants, least recently used inside one."""

from __future__ import annotations

import random

import pytest

from kv_store.block_pool import BlockPool
from kv_store.eviction import FairLru, quota_of
from services.contracts.vectors import pack


def _cache(pool: BlockPool, tenant: bytes, first: int, count: int) -> None:
    """Leave `count` blocks with one-token contents from `first` on in the cache of `tenant`."""
    for token in range(first, first + count):
        (block,) = pool.grant(1)
        pool.commit(block, tenant + pack([token]), pack([token]), None, tenant)
        pool.release(block)
        pool.check_invariants()


def _found(pool: BlockPool, tenant: bytes, token: int) -> bool:
    blocks = pool.lookup(tenant, [tenant + pack([token])], [pack([token])])
    for block in blocks:
        pool.release(block)
    return bool(blocks)


def test_one_tenant_is_plain_lru() -> None:
    lru = FairLru(100)
    for item in (3, 1, 2):
        lru.add(item, b"")
    lru.remove(1)
    lru.add(1, b"")
    assert [lru.pop() for _ in range(3)] == [3, 2, 1]
    with pytest.raises(KeyError):
        lru.pop()


def test_the_tenant_with_most_gives_way_and_its_oldest_first() -> None:
    lru = FairLru(100)
    lru.add(9, b"small")
    for item in range(4):
        lru.add(item, b"large")
    assert [lru.pop() for _ in range(3)] == [0, 1, 2]
    assert 9 in lru and 3 in lru


def test_any_history_pops_from_a_largest_tenant() -> None:
    rng = random.Random(1)
    lru = FairLru(100)
    owner: dict[int, bytes] = {}
    for item in range(3000):
        if owner and rng.random() < 0.45:
            counts = [list(owner.values()).count(tenant) for tenant in (b"a", b"b", b"c")]
            victim = lru.pop()
            assert list(owner.values()).count(owner.pop(victim)) == max(counts)
        elif owner and rng.random() < 0.2:
            gone = rng.choice(list(owner))
            lru.remove(gone)
            del owner[gone]
        else:
            owner[item] = rng.choice([b"a", b"a", b"b", b"c"])
            lru.add(item, owner[item])
        assert list(lru.faults()) == [] and len(lru) == len(owner)


def test_a_flood_of_one_tenant_leaves_anothers_share_alone() -> None:
    pool = BlockPool(11, 1)
    _cache(pool, b"quiet", 0, 4)
    _cache(pool, b"flood", 0, 1000)
    assert all(_found(pool, b"quiet", token) for token in range(4))
    assert pool.tenant_counts == {b"quiet": 4, b"flood": 6}


def test_a_flood_takes_at_most_one_block_of_an_equal_share() -> None:
    pool = BlockPool(11, 1)
    _cache(pool, b"quiet", 0, 5)
    _cache(pool, b"flood", 0, 1000)
    assert pool.tenant_counts == {b"quiet": 4, b"flood": 6}


def test_of_equal_shares_the_older_one_gives_way() -> None:
    """Or tenants that nobody hears of any more would keep their share, and new ones none."""
    lru = FairLru(100)
    for item, tenant in enumerate((b"first", b"second", b"third")):
        lru.add(item, tenant)
    assert [lru.pop() for _ in range(3)] == [0, 1, 2]


def test_a_quota_caps_what_a_tenant_keeps_cached() -> None:
    pool = BlockPool(11, 1, tenant_share=0.3)
    _cache(pool, b"a", 0, 6)
    assert (pool.num_cached, pool.num_free, pool.totals.quota_evictions) == (3, 7, 3)
    assert [_found(pool, b"a", token) for token in range(6)] == [False] * 3 + [True] * 3


@pytest.mark.parametrize(("share", "quota"), [(1.0, 10), (0.3, 3), (0.01, 1), (0.0, 0)])
def test_a_share_is_at_least_one_block_unless_it_is_none(share: float, quota: int) -> None:
    assert quota_of(share, 10) == quota


def test_pins_are_never_evicted() -> None:
    pool = BlockPool(5, 1)
    _cache(pool, b"a", 0, 4)
    pinned = pool.lookup(b"a", [b"a" + pack([0])], [pack([0])])
    granted = pool.grant(10)
    assert len(granted) == 3 and not set(granted) & set(pinned)
