"""What one epoch and its ledger say to each other: prefixes looked up shortly before a lane is
free, blocks leased ahead of need, what changed, and everything, where the ledger has lost it.

Invariants: a step never waits for an answer; a request that is given up is named in the next delta,
so that the ledger takes back what it grants for it; what may be broken is forgotten before anybody
asks again.

Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from services.contracts.kv import (
    KvDelta,
    KvSnapshot,
    KvStatus,
    LeaseReply,
    LeaseRequest,
    LookupReply,
    LookupRequest,
)
from services.contracts.vectors import unpack

from .batch import Batch
from .phases import PhaseLog
from .sequence import Sequence
from .totals import Totals
from .waiting import WaitingQueue

# Newcomers look their prefix up shortly before a lane can be theirs: earlier, their pins would
# only fill the pool.
LOOKUPS_AHEAD: Final = 4


class LedgerTalk:
    """Of one batch. Replies are those of its own epoch. phases: hear of every lookup."""

    def __init__(
        self, batch: Batch, waiting: WaitingQueue, totals: Totals, phases: PhaseLog, *,
        prefix_caching: bool,
    ) -> None:  # fmt: skip
        self._batch = batch
        self._lease = batch.lease
        self._waiting = waiting
        self._totals = totals
        self._phases = phases
        self._prefix_caching = prefix_caching

    def bind(self, ledger: str) -> None:
        """To `ledger`, which has this epoch's books from now on; what the one before it grants is
        not taken any more.
        """
        for number in list(self._lease.lookups):
            self._waiting.end_lookup(self._lease.give_up_lookup(number))
        if self._lease.open_lease is not None:
            self._lease.give_up_lease()
        self._lease.bind(ledger)
        self._batch.stir()

    # ---- out

    def lookups(self, now_ns: int) -> Iterator[KvDelta | LookupRequest]:
        """For those who may soon have a lane."""
        lease, batch = self._lease, self._batch
        if not len(self._waiting) or not self._prefix_caching:
            return
        if lease.snapshot_due or not lease.bound:
            return
        for seq in self._waiting.head(batch.lanes.num_free + LOOKUPS_AHEAD):
            if seq.looked_up or not seq.reads_cache or not batch.may_look_up(seq):
                continue
            seq.looked_up = True
            known = seq.token_ids[: seq.num_tokens]
            ask = lease.ask_lookup(seq, known, now_ns, batch.recompute_block_us)
            if ask is None:
                continue
            if lease.is_forgetting and (delta := lease.flush()) is not None:
                yield delta
            if seq.num_preemptions and (delta := lease.make_room(len(seq.hashes))) is not None:
                # Its content may be in host memory by now, and the lease has all that is free.
                yield delta
            self._waiting.begin_lookup(seq)
            self._phases.asked(seq)
            self._totals.num_prefix_queries += len(ask.token_ids) // 4
            yield ask

    def snapshot_if_due(self, holders: Iterable[Sequence]) -> list[KvSnapshot]:
        """Everything that `holders` hold, once no copy is in flight."""
        lease, lanes = self._lease, self._batch.lanes
        if not lease.snapshot_due or lease.copies.are_in_flight or not lease.ledger:
            return []
        for number in list(lease.lookups):
            self._give_up(number)
        self._batch.prepare_snapshot()
        known = [(s, lanes.known_token_ids(s)) for s in holders if s.block_ids]
        return lease.snapshot(known, self._batch.experience.forgotten.hashes)

    def news(self, now_ns: int, *, ask: bool) -> Iterator[KvDelta | LeaseRequest]:
        """What this step changed; then, where `ask`, what it lacks: the delta may bring it back."""
        self._lease.shed()
        delta = self._lease.flush()
        if delta is not None:
            yield delta
        request = self._lease.ask_lease(now_ns, self._batch.pipeline.next_step_id) if ask else None
        if request is not None:
            yield request

    # ---- in

    def on_lookup(self, reply: LookupReply) -> None:
        lease = self._lease
        if reply.status is KvStatus.NEED_SNAPSHOT:
            if reply.number in lease.lookups:
                lease.snapshot_due = True
            return
        hits = unpack(reply.block_ids)
        seq = lease.close_lookup(reply.number, hits, reply.copies_out, reply.copies_in)
        if seq is not None:
            self._waiting.end_lookup(seq)
            self._phases.answered(seq, len(hits) * lease.block_size)
            self._totals.num_prefix_hits += len(hits) * lease.block_size

    def on_lease(self, reply: LeaseReply) -> None:
        awaited = self._lease.on_lease(reply)
        if awaited and reply.status is KvStatus.NEED_SNAPSHOT:
            self._lease.snapshot_due = True

    # ---- what may be broken

    def forget(self, seq: Sequence) -> None:
        """`seq` has ended with logits that are not finite: whatever it has committed or hit may be
        the reason. Those that wait for the same content compute it anew; those that run on it go
        on, and what they commit on top of it is not indexed.
        """
        if not seq.num_committed_blocks:
            return
        first = seq.hashes[0]
        self._lease.forget(first)
        self._batch.experience.forgotten.add(first)
        self._let_go(first)

    def _let_go(self, first: bytes) -> None:
        """Nobody waits for content that begins with `first`, or with it."""
        for number, opened in list(self._lease.lookups.items()):
            if opened.seq.hashes[0] == first:
                self._waiting.end_lookup(self._lease.give_up_lookup(number))
        for other in self._waiting:
            if other.num_committed_blocks and other.hashes[0] == first:
                self._lease.release(other)

    # ---- what is not waited for any more

    def drop_lookup(self, seq: Sequence) -> None:
        """`seq` has ended."""
        lease = self._lease
        for number in [n for n, opened in lease.lookups.items() if opened.seq is seq]:
            self._give_up(number)

    def give_up_late(self, now_ns: int) -> None:
        lease = self._lease
        for number in [n for n, opened in lease.lookups.items() if now_ns >= opened.give_up_ns]:
            self._give_up(number)
            self._batch.stir()
        if lease.open_lease is not None and now_ns >= lease.open_lease.give_up_ns:
            lease.give_up_lease()
            self._batch.stir()

    def _give_up(self, number: int) -> None:
        seq = self._lease.give_up_lookup(number)
        self._waiting.end_lookup(seq)
        self._phases.answered(seq, None)
