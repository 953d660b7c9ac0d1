"""Two ledgers that live: only the one that the scheduler names answers, and the other one goes."""

from __future__ import annotations

import pytest

from kv_store.core import Asked, KvCore, Superseded
from services.contracts.kv import KvCheckRequest, KvReportRequest, KvStatus, LeaseRequest
from tests.unit.kv_store.messages import ENGINE, Peer, commits, ids

PROMPT = list(range(12))
OTHER = "kv-0-other"


def _bound(core: KvCore | None = None) -> Peer:
    peer = Peer(core or KvCore("kv-0-first"))
    peer.snapshot()
    return peer


def _cached(peer: Peer) -> list[int]:
    blocks = ids(peer.lease(3).block_ids)
    peer.delta(content=commits(blocks, PROMPT), released=blocks[::-1])
    return blocks


def test_what_names_another_is_not_answered() -> None:
    core = _bound().core
    for ledger in (OTHER, ""):
        questions = (
            LeaseRequest(ENGINE, 1, 1, 1, 2, ledger),
            KvReportRequest(ENGINE, ledger=ledger),
            KvCheckRequest(ENGINE, ledger),
        )
        for question in questions:
            assert core.handle(Asked(question, "inbox"), 0) == []
    assert core.ledgers[ENGINE].pool.num_leased == 0


@pytest.mark.parametrize("by", ["snapshot", "delta", "beat", "lease", "next epoch"])
def test_a_ledger_that_hears_that_another_is_bound_goes(by: str) -> None:
    peer = _bound()
    peer.ledger, peer.binding = OTHER, 1
    if by == "next epoch":
        peer.epoch, peer.binding = 2, 0
    with pytest.raises(Superseded, match=ENGINE):
        match by:
            case "snapshot":
                peer.snapshot()
            case "delta":
                peer.delta(released=[])
            case "lease":
                peer.core.handle(Asked(LeaseRequest(ENGINE, 1, 1, 1, 2, OTHER, 1), "inbox"), 0)
            case _:
                peer.beat(0)
    assert not peer.core.ledgers


def test_the_books_of_other_engines_are_kept() -> None:
    peer = _bound()
    peer.snapshot(engine="engine-1")
    peer.ledger, peer.binding = OTHER, 1
    peer.beat(0)
    assert list(peer.core.ledgers) == ["engine-1"]


def test_old_messages_to_the_ledger_before_change_nothing() -> None:
    """Of a binding before, and of a scheduler before: neither frightens the one that is bound."""
    peer = Peer(KvCore("kv-0-second"), epoch=2)
    peer.binding = 1
    peer.snapshot()
    late = Peer(peer.core, epoch=2)
    late.ledger = OTHER
    older = Peer(peer.core, epoch=1)
    older.ledger, older.binding = OTHER, 7
    for other in (late, older):
        other.snapshot({1: 1})
        other.delta(released=[1])
        other.beat(9)
    assert peer.lease(2).status is KvStatus.OK


def test_a_fresh_ledger_waits_until_it_is_named() -> None:
    peer = Peer(KvCore("kv-0-second"))
    peer.ledger = OTHER
    peer.snapshot()
    peer.beat(3)
    assert not peer.core.ledgers
    peer.ledger, peer.binding = peer.core.service_id, 1
    assert peer.lease(1).status is KvStatus.NEED_SNAPSHOT
    peer.snapshot()
    assert ids(peer.lease(1).block_ids) == [1]


def test_a_ledger_that_comes_back_has_forgotten_what_it_had() -> None:
    """Another one has granted its cached blocks meanwhile, and nobody has told it."""
    peer = _bound()
    _cached(peer)
    peer.binding = 2
    assert peer.lookup(PROMPT).status is KvStatus.NEED_SNAPSHOT, "before it has the snapshot"
    peer.snapshot({4: 1})
    assert peer.counts() == (7, 1, 0) and not peer.lookup(PROMPT).block_ids


def test_a_repaired_gap_and_a_new_epoch_with_the_same_ledger_keep_the_cache() -> None:
    peer = _bound()
    peer.binding = 2
    peer.snapshot()
    blocks = _cached(peer)
    peer.snapshot()
    assert peer.counts() == (5, 0, 3)
    young = Peer(peer.core, epoch=2)
    young.snapshot()
    assert ids(young.lookup(PROMPT).block_ids) == blocks


def test_a_new_generation_begins_with_binding_0_in_the_same_epoch() -> None:
    """Found by the simulator (seed 183): worker and scheduler new, the ledger's second binding."""
    peer = Peer(KvCore("kv-0-second"))
    peer.binding = 1
    peer.snapshot()
    young = Peer(peer.core, generation=2)
    young.snapshot()
    assert young.lease(2).status is KvStatus.OK


def test_a_request_of_the_binding_before_gets_nothing() -> None:
    peer = _bound()
    peer.binding = 2
    peer.snapshot()
    peer.binding = 0
    assert peer.lease(2).status is KvStatus.NEED_SNAPSHOT
    peer.delta(released=[1])
    peer.snapshot({1: 1})
    assert peer.counts() == (8, 0, 0)
