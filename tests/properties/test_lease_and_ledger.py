"""Both books of the blocks, the scheduler's and the ledger's, over the real codec."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kv_store.core import Asked, KvCore
from scheduler_svc.forgotten import Forgotten
from scheduler_svc.lease import Lease, Pool
from scheduler_svc.sequence import Sequence
from services.contracts import codec
from services.contracts.kv import (
    KvDelta,
    KvSnapshot,
    KvStatus,
    LeaseReply,
    LeaseRequest,
    LookupReply,
    LookupRequest,
)
from services.contracts.sampling import SamplingParams
from services.contracts.vectors import unpack

BLOCK_SIZE = 2
MAX_TOKENS = 9
ENGINE = "engine-0"

_ask: codec.Decoder[LookupRequest | LeaseRequest] = codec.Decoder(LookupRequest, LeaseRequest)
_news: codec.Decoder[KvDelta | KvSnapshot] = codec.Decoder(KvDelta, KvSnapshot)
_lookup_reply = codec.Decoder(LookupReply)
_lease_reply = codec.Decoder(LeaseReply)


def _sequence(uid: int, token_ids: list[int]) -> Sequence:
    return Sequence(
        uid=uid,
        seq_id=f"s{uid}",
        admission_id="admission-0",
        tag=uid,
        token_ids=np.array(token_ids, dtype=np.int32),
        num_prompt_tokens=len(token_ids),
        num_tokens=len(token_ids),
        max_total_tokens=len(token_ids) + 1,
        sampling=SamplingParams(),
        stop_token_ids=np.zeros(0, dtype=np.int32),
        salt=bytes([token_ids[0] % 2]),
        priority=0,
        deadline_ns=0,
        arrival_ns=0,
    )


class BooksMachine(RuleBasedStateMachine):
    """Messages to the ledger lie in `wire`, in order, until they are delivered; some deltas are
    lost.
    """

    @initialize(num_blocks=st.integers(6, 24), low_water=st.integers(1, 6))
    def begin(self, num_blocks: int, low_water: int) -> None:
        self.kv = KvCore("kv-0")
        self.num_blocks, self.low_water = num_blocks, low_water
        self.epoch = 0
        self.sequences: list[Sequence] = []
        self.uid = 0
        self.forgotten = Forgotten()
        self.broken: set[int] = set()
        self.attach()

    @rule()
    def attach(self) -> None:
        """A new scheduler epoch: nothing is held; what was known stays cached at the ledger."""
        self.epoch += 1
        pool = Pool(ENGINE, 1, self.epoch, self.num_blocks, BLOCK_SIZE, ledger="kv-0")
        self.lease = Lease(pool, self.low_water)
        self.sequences = []
        self.wire: list[bytes] = []
        self.replies: list[bytes] = []
        self._send_all(self.lease.snapshot([], self.forgotten.hashes))

    def _send_all(self, messages: list[KvSnapshot]) -> None:
        self.wire.extend(codec.encode(message) for message in messages)

    # ---- the scheduler's side

    @rule(token_ids=st.lists(st.integers(0, 2), min_size=1, max_size=MAX_TOKENS))
    def arrive(self, token_ids: list[int]) -> None:
        self.uid += 1
        seq = _sequence(self.uid, token_ids)
        self.sequences.append(seq)
        ask = self.lease.ask_lookup(seq, seq.token_ids, 0)
        if ask is not None:
            self.wire.append(codec.encode(ask))

    def _free_to_run(self) -> list[Sequence]:
        looking = {opened.seq.uid for opened in self.lease.lookups.values()}
        return [seq for seq in self.sequences if seq.uid not in looking]

    @precondition(lambda self: bool(self._free_to_run()))
    @rule(data=st.data(), count=st.integers(1, 3))
    def run(self, data: st.DataObject, count: int) -> None:
        """Take blocks, and commit what the tokens fill."""
        seq = data.draw(st.sampled_from(self._free_to_run()))
        held = len(seq.block_ids)
        need = -(-seq.num_tokens // BLOCK_SIZE) - len(seq.block_ids)
        self.lease.take(seq, min(count, need))
        self.broken.difference_update(seq.block_ids[held:])
        full = min(len(seq.block_ids), seq.num_tokens // BLOCK_SIZE)
        for index in range(seq.num_committed_blocks, full):
            self.lease.commit(seq, index, seq.token_ids)
        seq.num_committed_blocks = full

    @precondition(lambda self: bool(self._free_to_run()))
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        seq = data.draw(st.sampled_from(self._free_to_run()))
        self.lease.release(seq)
        self.sequences.remove(seq)

    @precondition(lambda self: any(seq.num_committed_blocks for seq in self._free_to_run()))
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        """Its logits are not finite: what it holds is broken, and hit by nobody any more."""
        holders = [seq for seq in self._free_to_run() if seq.num_committed_blocks]
        seq = data.draw(st.sampled_from(holders))
        self.broken.update(seq.block_ids[: seq.num_committed_blocks])
        for number, opened in list(self.lease.lookups.items()):
            if opened.seq.hashes[0] == seq.hashes[0]:
                self.lease.give_up_lookup(number)
        self.lease.forget(seq.hashes[0])
        self.forgotten.add(seq.hashes[0])
        self.lease.release(seq)
        self.sequences.remove(seq)
        self.settle()

    @precondition(lambda self: bool(self.lease.lookups))
    @rule(data=st.data())
    def give_up_a_lookup(self, data: st.DataObject) -> None:
        self.lease.give_up_lookup(data.draw(st.sampled_from(sorted(self.lease.lookups))))

    @precondition(lambda self: self.lease.open_lease is not None)
    @rule()
    def give_up_the_lease(self) -> None:
        self.lease.give_up_lease()

    @rule()
    def settle(self) -> None:
        self.lease.shed()
        delta = self.lease.flush()
        if delta is not None:
            self.wire.append(codec.encode(delta))
        ask = self.lease.ask_lease(0, 1)
        if ask is not None:
            self.wire.append(codec.encode(ask))

    @rule(lost=st.booleans())
    def hear_that_it_lacks(self, lost: bool) -> None:
        """A beat of the ledger asks for a snapshot; it may be one of before the last snapshot."""
        before = len(self.wire)
        self._snapshot()
        if lost:
            del self.wire[before:]

    def _snapshot(self) -> None:
        for number in list(self.lease.lookups):
            self.lease.give_up_lookup(number)
        holders = [(seq, seq.token_ids) for seq in self.sequences if seq.block_ids]
        self._send_all(self.lease.snapshot(holders, self.forgotten.hashes))

    # ---- the wire

    @precondition(lambda self: bool(self.wire))
    @rule(count=st.integers(1, 4), repeat=st.booleans())
    def deliver(self, count: int, repeat: bool) -> None:
        for payload in self.wire[:count]:
            for _ in range(1 + repeat):
                self._ledger_hears(payload)
        del self.wire[:count]

    @precondition(lambda self: bool(self.wire))
    @rule()
    def lose(self) -> None:
        """A delta or a request is lost; a snapshot too, which only another one repairs."""
        del self.wire[0]

    def _ledger_hears(self, payload: bytes) -> None:
        event: Any
        if payload[2:].startswith((b"\xa6lookup", b"\xa5lease")):
            event = Asked(_ask.decode(payload), "inbox")
        else:
            event = _news.decode(payload)
        for effect in self.kv.handle(event, 0):
            self.replies.append(codec.encode(effect.message))
        self.kv.check_invariants()

    @precondition(lambda self: bool(self.replies))
    @rule(lost=st.booleans())
    def answer(self, lost: bool) -> None:
        payload = self.replies.pop(0)
        if lost:
            return
        if payload[2:].startswith(b"\xaclookup_reply"):
            self._lookup_answered(_lookup_reply.decode(payload))
        else:
            reply = _lease_reply.decode(payload)
            awaited = reply.status is not KvStatus.STALE and self.lease.on_lease(reply)
            if awaited and reply.status is KvStatus.NEED_SNAPSHOT:
                self._snapshot()

    def _lookup_answered(self, reply: LookupReply) -> None:
        if reply.status is not KvStatus.OK:
            return
        seq = self.lease.close_lookup(reply.number, unpack(reply.block_ids))
        if seq is not None:
            assert len(seq.block_ids) * BLOCK_SIZE < seq.num_tokens
            assert self.broken.isdisjoint(seq.block_ids), "a hit of what was forgotten"

    # ---- what must hold

    @invariant()
    def the_schedulers_book(self) -> None:
        if hasattr(self, "lease"):
            self.lease.check_invariants([seq for seq in self.sequences if seq.block_ids])

    @rule()
    def quiesce(self) -> None:
        """Everything arrives, and a snapshot where one is due: the two books say the same."""
        self.settle()
        for number in list(self.lease.lookups):
            self.lease.give_up_lookup(number)
        if self.lease.open_lease is not None:
            self.lease.give_up_lease()
        self.replies = []
        delta = self.lease.flush()
        if delta is not None:
            self.wire.append(codec.encode(delta))
        self._deliver_all()
        ledger = self.kv.ledgers.get(ENGINE)
        behind = ledger is None or ledger.epoch != self.epoch or ledger.need_snapshot
        if behind or (ledger is not None and ledger.deltas.behind(self.lease.delta_number)):
            self._snapshot()
            self._deliver_all()
        self.replies = []
        self._compare()

    def _deliver_all(self) -> None:
        wire, self.wire = self.wire, []
        for payload in wire:
            self._ledger_hears(payload)

    def _compare(self) -> None:
        pool = self.kv.ledgers[ENGINE].pool
        for block in range(1, self.num_blocks):
            here = self.lease.holds[block] + (block in self.lease.spare)
            assert pool.holds(block) == here, f"block {block}"
        assert pool.num_free + pool.num_leased + pool.num_cached == self.num_blocks - 1

    def teardown(self) -> None:
        if hasattr(self, "lease"):
            self.quiesce()


TestBooks = BooksMachine.TestCase
TestBooks.settings = settings(
    max_examples=80, stateful_step_count=50, deadline=None, derandomize=True
)
