"""Which ledger a scheduler is bound to: alone, and what it then says to whom."""

from __future__ import annotations

from kv_store.core import KvCore
from scheduler_svc.lease import LEASE_RETRY_NS
from scheduler_svc.ledger_link import LedgerLink
from scheduler_svc.owners import BEAT_NS, SUSPECT_NS
from services.contracts.beats import Beat, ServiceKind
from services.contracts.kv import (
    KvDelta,
    KvSnapshot,
    KvStatus,
    LeaseReply,
    LeaseRequest,
    LookupRequest,
)
from services.contracts.step import Attach, Attached
from services.contracts.vectors import pack
from tests.unit.scheduler_svc.rig import VOCAB_SIZE, Rig, answer


def _beat(name: str, *, leaving: bool = False) -> Beat:
    return Beat(ServiceKind.KV_STORE, name, leaving=leaving)


class Listener:
    """A link that hears the worker all the time, and ledgers as a test wants."""

    def __init__(self) -> None:
        self.link = LedgerLink()
        self.now_ns = 0

    def hear(self, *names: str, periods: int = 1) -> str:
        for _ in range(periods):
            self.now_ns += BEAT_NS
            self.link.hear(Beat(ServiceKind.GPU_WORKER, "worker-0"), self.now_ns)
            for name in names:
                self.link.hear(_beat(name), self.now_ns)
        return self.link.choose(self.now_ns)


def test_the_first_one_heard_is_it() -> None:
    listener = Listener()
    assert listener.hear() == ""
    assert listener.hear("a") == "a"


def test_of_two_that_live_the_bound_one_stays() -> None:
    listener = Listener()
    listener.hear("a")
    assert listener.hear("a", "b", periods=50) == "a"
    assert listener.hear("b", periods=2) == "a", "two missed beats prove nothing"
    assert listener.hear("a", "b") == "a"


def test_three_missed_beats_and_another_that_lives() -> None:
    listener = Listener()
    listener.hear("a")
    assert listener.hear(periods=10) == "a", "nobody else is there"
    assert listener.hear("b") == "b"
    assert listener.hear("a", "b", periods=50) == "b", "it wakes, and the new one stays"


def test_a_candidate_that_has_fallen_silent_is_none() -> None:
    listener = Listener()
    listener.hear("a")
    listener.hear("a", "b")
    assert listener.hear(periods=10) == "a"


def test_one_that_leaves_is_replaced_at_once() -> None:
    listener = Listener()
    listener.hear("a")
    listener.link.hear(_beat("b"), listener.now_ns)
    listener.link.hear(_beat("b", leaving=True), listener.now_ns)
    listener.link.hear(_beat("a", leaving=True), listener.now_ns)
    assert listener.link.choose(listener.now_ns) == "a", "both leave"
    listener.link.hear(_beat("c"), listener.now_ns)
    assert listener.link.choose(listener.now_ns) == "c"


def test_nobody_is_silent_because_the_scheduler_slept() -> None:
    listener = Listener()
    listener.hear("a")
    listener.hear("a", "b")
    listener.now_ns += 20 * BEAT_NS
    assert listener.hear("b") == "a"
    assert listener.hear("a", "b") == "a"


def test_an_epoch_begins_with_the_ledger_whose_blocks_the_worker_has_filled() -> None:
    listener = Listener()
    listener.hear("b")
    link, now_ns = listener.link, listener.now_ns
    assert link.attached("a", now_ns) == "a", "it has the cached content"
    assert link.attached("", now_ns) == "a", "a new worker: nobody has any"
    assert listener.hear("b", periods=SUSPECT_NS // BEAT_NS) == "a"
    assert listener.hear("b") == "b"


# ---- bound to another


def _replaced(rig: Rig, name: str) -> None:
    """The ledger of the rig leaves; `name` beats."""
    rig.handle(_beat(rig.kv.service_id, leaving=True))
    rig.kv = KvCore(name)
    rig.handle(_beat(name))


def _names(message: LookupRequest | LeaseRequest | KvDelta | KvSnapshot) -> tuple[str, int]:
    return message.ledger, message.binding


def test_another_ledger_gets_a_snapshot_and_everything_after_it() -> None:
    rig = Rig(block_size=4)
    rig.submit("s1", list(range(9)), 30)
    rig.step()
    said = len(rig.effects)
    _replaced(rig, "kv-1")
    rig.drain()
    news = [e for e in rig.effects[said:] if isinstance(e, KvDelta | KvSnapshot | LeaseRequest)]
    assert isinstance(news[0], KvSnapshot) and isinstance(news[1], LeaseRequest)
    assert {_names(message) for message in news} == {("kv-1", 1)}
    assert rig.tokens(1) == answer(list(range(9)), 30)
    held = rig.kv.ledgers["engine-0"].pool
    assert held.num_leased == len(rig.core.batch.lease.spare), "both books say the same"
    load = rig.core.beat().engine
    assert load is not None and (load.ledger, load.binding) == ("kv-1", 1)


def test_what_the_ledger_before_grants_is_not_taken_any_more() -> None:
    rig = Rig(ledger=False, block_size=4)
    asked = rig.last(LeaseRequest)
    _replaced(rig, "kv-1")
    rig.handle(LeaseReply(asked.generation, asked.epoch, asked.number, KvStatus.OK, pack([1]), 9))
    assert not rig.core.batch.lease.spare and not rig.core.batch.lease.bound


def test_a_plan_names_the_ledger_once_it_has_granted() -> None:
    rig = Rig(block_size=4)
    rig.submit("s1", [1], 40)
    assert [plan.ledger for plan in rig.plans] == ["kv-0", ""]
    rig.ledger = False
    _replaced(rig, "kv-1")
    for _ in range(4):
        rig.step()
    assert not any(plan.ledger for plan in rig.plans[1:]), "kv-1 has granted nothing"
    for snapshot in rig.all(KvSnapshot)[1:]:
        rig.kv.handle(snapshot, rig.now_ns)
    rig.ledger = True
    rig.tick(LEASE_RETRY_NS)
    rig.drain()
    assert [plan.ledger for plan in rig.plans if plan.ledger] == ["kv-0", "kv-1"]
    assert rig.tokens(1) == answer([1], 40)


def test_without_a_ledger_nothing_is_said_to_one() -> None:
    rig = Rig(attach=False)
    rig.tick()
    attached = Attached(rig.last(Attach).attempt, 1, 1, *rig.shape, VOCAB_SIZE)
    said = rig.handle(attached)
    rig.submit("s1", [1], 3)
    rig.tick(2 * SUSPECT_NS)
    assert not [e for e in rig.effects if isinstance(e, KvSnapshot | LeaseRequest | LookupRequest)]
    assert said
    rig.handle(_beat("kv-0"))
    rig.drain()
    assert rig.tokens(1) == answer([1], 3)
