"""Content that may be broken: what hangs below it, who goes on holding it, and both tiers."""

from __future__ import annotations

from kv_store.core import KvCore
from services.contracts.codec import Decoder, encode
from services.contracts.kv import Commits, KvDelta, KvSnapshot
from services.contracts.vectors import pack
from tests.unit.kv_store.messages import ENGINE, Peer, commits, hashes_of, ids

PROMPT = list(range(12))
FIRST, SECOND, THIRD = hashes_of(PROMPT)
# Shares its first block with PROMPT.
COUSIN = [*PROMPT[:4], 90, 91, 92, 93]


def _bound(num_blocks: int = 9, host_blocks: int = 0) -> Peer:
    peer = Peer(KvCore("kv-0"), num_blocks=num_blocks)
    peer.snapshot(host_blocks=host_blocks)
    return peer


def _cached(peer: Peer, tokens: list[int]) -> list[int]:
    """`tokens` are computed, committed and released -> their blocks."""
    blocks = ids(peer.lease(len(tokens) // 4).block_ids)
    peer.delta(content=commits(blocks, tokens), released=blocks[::-1])
    return blocks


def _on_top(block_id: int, parent: int, tokens: list[int], index: int) -> Commits:
    return Commits(
        block_ids=pack([block_id]),
        parents=pack([parent]),
        hashes=hashes_of(tokens)[index],
        token_ids=pack(tokens[4 * index : 4 * index + 4]),
    )


def test_what_continues_it_goes_with_it_and_what_it_continues_stays() -> None:
    peer = _bound()
    _cached(peer, PROMPT)
    assert peer.counts() == (5, 0, 3)
    peer.delta(forget=SECOND)
    assert peer.counts() == (7, 0, 1)
    assert len(ids(peer.lookup(PROMPT).block_ids)) == 1


def test_all_branches_below_it_go() -> None:
    peer = _bound()
    _cached(peer, PROMPT)
    hit = ids(peer.lookup(COUSIN).block_ids)
    (own,) = ids(peer.lease(1).block_ids)
    peer.delta(content=_on_top(own, hit[0], COUSIN, 1), released=[own, *hit])
    _cached(peer, [50, 51, 52, 53])
    peer.delta(forget=FIRST)
    assert peer.counts() == (7, 0, 1), "another prompt is not concerned"
    assert not peer.lookup(PROMPT).block_ids and not peer.lookup(COUSIN).block_ids
    pool = peer.core.ledgers[ENGINE].pool
    assert (pool.totals.forgotten, pool.num_entries) == (4, 1)


def test_those_that_hold_it_go_on_and_it_is_free_after_them() -> None:
    peer = _bound()
    _cached(peer, PROMPT[:4])
    (shared,) = ids(peer.lookup(PROMPT).block_ids)
    (own,) = ids(peer.lease(1).block_ids)
    peer.delta(forget=FIRST)
    assert peer.counts() == (6, 2, 0)
    peer.delta(content=_on_top(own, shared, PROMPT, 1))
    assert not peer.lookup(PROMPT).block_ids, "what is computed on top of it is not indexed"
    peer.delta(released=[own, shared])
    assert peer.counts() == (8, 0, 0)


def test_commit_forget_and_release_in_one_delta_count_in_this_order() -> None:
    peer = _bound()
    blocks = ids(peer.lease(2).block_ids)
    peer.delta(content=commits(blocks, PROMPT[:8]), forget=FIRST, released=blocks[::-1])
    assert peer.counts() == (8, 0, 0)


def test_what_is_computed_anew_is_found_while_the_old_is_still_held() -> None:
    peer = _bound()
    old = ids(peer.lease(2).block_ids)
    peer.delta(content=commits(old, PROMPT[:8]))
    peer.delta(forget=FIRST)
    new = _cached(peer, PROMPT)
    assert ids(peer.lookup(PROMPT).block_ids) == new
    peer.delta(released=[*old, *new[::-1]])
    assert peer.counts() == (5, 0, 3)


def test_it_is_idempotent_and_an_unknown_hash_is_nothing() -> None:
    peer = _bound()
    _cached(peer, PROMPT)
    peer.delta(forget=SECOND + SECOND + bytes(32))
    peer.delta(forget=THIRD)
    assert peer.counts() == (7, 0, 1)


def test_a_snapshot_forgets_what_a_lost_delta_would_have() -> None:
    peer = _bound()
    held = ids(peer.lease(1).block_ids)
    peer.delta(content=commits(held, PROMPT[:4]))
    _cached(peer, [50, 51, 52, 53])
    peer.snapshot({held[0]: 1}, commits=commits(held, PROMPT[:4]), forget=FIRST)
    assert peer.counts() == (6, 1, 1)
    assert not peer.lookup(PROMPT).block_ids
    peer.delta(released=held)
    assert peer.counts() == (7, 0, 1)


# ---- host memory


def _in_host(peer: Peer) -> list[int]:
    """PROMPT[:8] lies in host memory alone -> the blocks of the grant that drove it out, held."""
    _cached(peer, PROMPT[:8])
    grant = peer.lease(2)
    assert len(ids(grant.copies_out)) == 4
    peer.delta(copied=[grant.number])
    return ids(grant.block_ids)


def _host(peer: Peer) -> tuple[int, int, int]:
    host = peer.core.ledgers[ENGINE].pool.host
    return host.num_free, host.num_writing, host.num_cached


def test_host_copies_go_too() -> None:
    peer = _bound(num_blocks=3, host_blocks=4)
    blocks = _in_host(peer)
    assert _host(peer) == (2, 0, 2)
    peer.delta(forget=FIRST, released=blocks)
    assert _host(peer) == (4, 0, 0) and peer.counts() == (2, 0, 0)
    assert not peer.lookup(PROMPT).block_ids


def test_a_copy_that_is_being_read_goes_after_its_readers() -> None:
    peer = _bound(num_blocks=3, host_blocks=4)
    peer.delta(released=_in_host(peer))
    hit = peer.lookup(PROMPT[:8])
    assert len(ids(hit.copies_in)) == 4
    peer.delta(forget=FIRST)
    assert _host(peer) == (2, 0, 2) and peer.counts() == (0, 2, 0)
    peer.delta(copied=[hit.number], released=ids(hit.block_ids)[::-1])
    assert _host(peer) == (4, 0, 0) and peer.counts() == (2, 0, 0)


def test_a_copy_that_is_being_written_counts_for_nothing() -> None:
    peer = _bound(num_blocks=3, host_blocks=4)
    _cached(peer, PROMPT[:8])
    grant = peer.lease(2)
    peer.delta(forget=FIRST)
    peer.delta(copied=[grant.number], released=ids(grant.block_ids))
    assert _host(peer) == (4, 0, 0) and peer.counts() == (2, 0, 0)


def test_what_is_over_a_quota_is_not_written_back() -> None:
    peer = Peer(KvCore("kv-0", 0.5), num_blocks=5)
    peer.snapshot(host_blocks=4)
    _cached(peer, PROMPT)
    assert peer.counts() == (2, 0, 2)
    peer.delta(forget=FIRST)
    assert peer.counts() == (4, 0, 0)
    assert not peer.lease(4).copies_out


def test_the_messages_carry_it() -> None:
    decoder: Decoder[KvDelta | KvSnapshot] = Decoder(KvDelta, KvSnapshot)
    delta = KvDelta("e", 1, 1, 1, forget=FIRST + SECOND)
    snapshot = KvSnapshot(
        engine="e", generation=1, epoch=1, number=0, num_blocks=2, block_size=4, forget=FIRST
    )
    assert decoder.decode(encode(delta)) == delta
    assert decoder.decode(encode(snapshot)) == snapshot
