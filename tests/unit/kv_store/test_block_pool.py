"""Blocks of one pool: FREE, LEASED, CACHED, and who is found under which hash."""

from __future__ import annotations

import pytest

from kv_store.block_pool import BlockPool
from services.contracts.errors import InvariantError
from services.contracts.vectors import pack

A, B, C = pack([1, 2]), pack([3, 4]), pack([5, 6])


def _pool(num_blocks: int = 6) -> BlockPool:
    return BlockPool(num_blocks, 2)


def _counts(pool: BlockPool) -> tuple[int, int, int]:
    pool.check_invariants()
    return pool.num_free, pool.num_leased, pool.num_cached


def _chain(pool: BlockPool) -> list[int]:
    """A and B, committed under their hashes and held."""
    first, second = pool.grant(2)
    pool.commit(first, b"a", A, None, b"")
    pool.commit(second, b"b", B, first, b"")
    return [first, second]


def test_case_07_two_holds_and_two_releases_free_a_block_once() -> None:
    pool = _pool(3)
    (block,) = pool.grant(1)
    pool.commit(block, b"a", A, None, b"")
    assert pool.lookup(b"", [b"a"], [A]) == [block] and pool.holds(block) == 2
    pool.release(block)
    assert _counts(pool) == (1, 1, 0)
    pool.release(block)
    assert _counts(pool) == (1, 0, 1)
    with pytest.raises(InvariantError):
        pool.release(block)
    one, other = pool.grant(2)
    assert one != other and _counts(pool) == (0, 2, 0)


def test_case_09_a_hash_alone_is_no_hit() -> None:
    pool = _pool()
    (block,) = pool.grant(1)
    pool.commit(block, b"7", A, None, b"")
    assert pool.lookup(b"", [b"7"], [B]) == []
    assert pool.lookup(b"salt", [b"7"], [A]) == []
    assert pool.lookup(b"", [b"7"], [A]) == [block]


def test_case_09_a_second_content_under_one_hash_stays_unindexed() -> None:
    pool = _pool()
    one, other = pool.grant(2)
    pool.commit(one, b"7", A, None, b"")
    pool.commit(other, b"7", B, None, b"")
    assert pool.lookup(b"", [b"7"], [B]) == []
    pool.release(other)
    pool.release(one)
    assert _counts(pool) == (4, 0, 1)


def test_the_parent_is_compared_too() -> None:
    pool = _pool()
    first, second = _chain(pool)
    assert pool.lookup(b"", [b"b"], [B]) == []
    assert pool.lookup(b"", [b"a", b"b"], [A, B]) == [first, second]


def test_a_duplicate_takes_over_when_the_first_is_evicted() -> None:
    pool = _pool(4)
    one, other, third = pool.grant(3)
    pool.commit(one, b"a", A, None, b"")
    pool.commit(other, b"a", A, None, b"")
    pool.release(one)
    assert _counts(pool) == (0, 2, 1)
    assert pool.grant(1) == [one]
    pool.release(other)
    assert _counts(pool) == (0, 2, 1)
    assert pool.lookup(b"", [b"a"], [A]) == [other]
    assert third not in (one, other)


def test_a_duplicate_of_what_is_found_elsewhere_is_free_at_its_release() -> None:
    pool = _pool()
    one, other = pool.grant(2)
    for block in (one, other):
        pool.commit(block, b"a", A, None, b"")
    pool.release(other)
    assert _counts(pool) == (4, 1, 0)


def test_the_least_recently_released_is_evicted_first() -> None:
    pool = _pool(4)
    first, second = _chain(pool)
    (third,) = pool.grant(1)
    pool.commit(third, b"c", C, None, b"")
    for block in (second, first, third):
        pool.release(block)
    pool.lookup(b"", [b"a", b"b"], [A, B])
    pool.release(second)
    pool.release(first)
    assert pool.grant(3) == [third, second, first]


def test_free_blocks_are_granted_before_cached_ones() -> None:
    pool = _pool(4)
    first, second = _chain(pool)
    pool.release(second)
    pool.release(first)
    assert pool.grant(1) == [3]
    assert pool.lookup(b"", [b"a", b"b"], [A, B]) == [first, second]


def test_what_was_cached_behind_an_evicted_block_is_found_when_it_is_computed_again() -> None:
    pool = _pool(4)
    first, second = _chain(pool)
    pool.release(first)
    pool.release(second)
    (third,) = pool.grant(1)
    assert pool.grant(1) == [first] and pool.lookup(b"", [b"a", b"b"], [A, B]) == []
    pool.commit(third, b"a", A, None, b"")
    assert pool.lookup(b"", [b"a", b"b"], [A, B]) == [third, second]


def test_a_content_is_committed_once_or_repeated_but_never_changed() -> None:
    pool = _pool()
    (block,) = pool.grant(1)
    pool.commit(block, b"a", A, None, b"")
    pool.commit(block, b"a", A, None, b"")
    with pytest.raises(InvariantError, match="different content"):
        pool.commit(block, b"b", B, None, b"")


def test_only_held_blocks_with_known_parents_are_committed() -> None:
    pool = _pool()
    with pytest.raises(InvariantError, match="nobody holds"):
        pool.commit(1, b"a", A, None, b"")
    one, other = pool.grant(2)
    with pytest.raises(InvariantError, match="unknown"):
        pool.commit(one, b"a", A, other, b"")


def test_revoked_blocks_stay_cached_where_their_content_is_known() -> None:
    pool = _pool()
    first, second = _chain(pool)
    pool.grant(1)
    pool.lookup(b"", [b"a"], [A])
    pool.revoke()
    assert _counts(pool) == (3, 0, 2)
    assert pool.lookup(b"", [b"a", b"b"], [A, B]) == [first, second]


def test_an_adopted_block_is_held_and_its_content_forgotten() -> None:
    pool = _pool()
    first, second = _chain(pool)
    pool.revoke()
    pool.adopt(first, 2)
    pool.adopt(5, 1)
    assert _counts(pool) == (2, 2, 1) and pool.holds(first) == 2
    assert pool.lookup(b"", [b"a", b"b"], [A, B]) == []
    pool.commit(first, b"a", A, None, b"")
    assert pool.lookup(b"", [b"a", b"b"], [A, B]) == [first, second]


def test_the_salt_of_a_chain_is_known_at_each_of_its_blocks() -> None:
    pool = _pool()
    (block,) = pool.grant(1)
    assert pool.salt_of(block) == b""
    pool.commit(block, b"a", A, None, b"salt")
    assert pool.salt_of(block) == b"salt"
