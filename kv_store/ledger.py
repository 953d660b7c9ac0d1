"""The books of one engine: what each request was given, and what each delta and snapshot changes.

Invariants: deltas are applied in order, and a gap stops grants until a snapshot repairs it; each
request is closed once; the copies of a reply are believed when a delta says that they have run, and
dropped with the request, or with the epoch, otherwise.

Pure.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from services.contracts.errors import WireError
from services.contracts.hashing import HASH_BYTES
from services.contracts.kv import (
    NO_PARENT,
    Commits,
    KvDelta,
    KvSnapshot,
    KvStatus,
    LeaseReply,
    LeaseRequest,
    LookupReply,
    LookupRequest,
)
from services.contracts.streams import Arrival as Arrived
from services.contracts.streams import StreamReceiver
from services.contracts.vectors import pack, unpack

from .block_pool import BlockPool
from .content import Copies
from .policy import Costs

# Answered requests whose reply the scheduler may yet abandon; it abandons within milliseconds.
MAX_OPEN_REQUESTS: Final = 8192


class Ledger:
    """One generation of one engine, as kept for one binding of one epoch; below the first until a
    snapshot has opened it.

    granted: blocks of answered requests by number, until a delta or snapshot closes them. copies:
    of answered requests, until they have run. next_part: of the snapshot that is arriving, else 0.
    """

    def __init__(self, generation: int, pool: BlockPool) -> None:
        self.generation = generation
        self.epoch = 0
        self.binding = 0
        self.pool = pool
        self.deltas = StreamReceiver()
        self.closed_through = 0
        self.granted: OrderedDict[int, list[int]] = OrderedDict()
        self.copies: dict[int, Copies] = {}
        self.need_snapshot = False
        self.next_part = 0

    @property
    def term(self) -> tuple[int, int, int]:
        """(generation, epoch, binding)."""
        return self.generation, self.epoch, self.binding

    def owns(self, message: LookupRequest | LeaseRequest | KvDelta) -> bool:
        return self.term == (message.generation, message.epoch, message.binding)

    def is_before(self, generation: int, epoch: int, binding: int) -> bool:
        """Another ledger has had that term, and so what is filed here no longer holds."""
        return epoch >= self.epoch and (generation, epoch, binding) > self.term

    def is_after(self, snapshot: KvSnapshot) -> bool:
        """The snapshot comes too late, or again: what was granted since must not be taken back."""
        term = (snapshot.generation, snapshot.epoch, snapshot.binding)
        if term == self.term and snapshot.number <= self.deltas.last:
            return True
        # Epochs grow over generations too, or the scheduler attaches again; bindings do not.
        return term < self.term or snapshot.epoch < self.epoch

    def may_keep(self, snapshot: KvSnapshot) -> bool:
        """False where the pool has another content by now than what is filed here."""
        same = (snapshot.epoch, snapshot.binding) == (self.epoch, self.binding)
        return snapshot.generation == self.generation and (same or not snapshot.binding)

    def status_for(self, request: LookupRequest | LeaseRequest) -> KvStatus:
        if request.epoch < self.epoch or request.generation < self.generation:
            return KvStatus.STALE
        if not self.owns(request) or self.need_snapshot or self.next_part:
            return KvStatus.NEED_SNAPSHOT
        return KvStatus.OK

    # ---- requests

    def lookup(self, request: LookupRequest) -> LookupReply:
        """Answer a request whose status is OK. Raises WireError where its columns do not fit."""
        hashes = _split(request.hashes, HASH_BYTES)
        tokens = _split(request.token_ids, 4 * self.pool.block_size)
        if len(hashes) != len(tokens):
            raise WireError(f"{len(hashes)} hashes for {len(tokens)} blocks of tokens")
        costs = Costs(request.copy_block_us, request.recompute_block_us)
        block_ids, copies = self._answer(
            request.number,
            lambda copies: self.pool.lookup(request.salt, hashes, tokens, copies, costs),
        )
        return LookupReply(
            generation=request.generation,
            epoch=request.epoch,
            number=request.number,
            status=KvStatus.OK,
            block_ids=pack(block_ids),
            copies_out=_outs(copies),
            copies_in=_ins(copies),
        )

    def lease(self, request: LeaseRequest) -> LeaseReply:
        """Answer a request whose status is OK."""
        block_ids, copies = self._answer(
            request.number, lambda copies: self.pool.grant(request.num_blocks, copies)
        )
        return LeaseReply(
            generation=request.generation,
            epoch=request.epoch,
            number=request.number,
            status=KvStatus.OK,
            block_ids=pack(block_ids),
            num_available=self.pool.num_available,
            copies_out=_outs(copies),
        )

    def _answer(self, number: int, take: Callable[[Copies], list[int]]) -> tuple[list[int], Copies]:
        """A repeated request gets the same answer, and a closed one nothing."""
        if number > self.closed_through and number not in self.granted:
            copies = Copies()
            self.granted[number] = take(copies)
            if copies:
                self.copies[number] = copies
            while len(self.granted) > MAX_OPEN_REQUESTS:
                closed, _ = self.granted.popitem(last=False)
                self.closed_through = max(self.closed_through, closed)
        return self.granted.get(number, []), self.copies.get(number, Copies())

    # ---- deltas and snapshots

    def apply(self, delta: KvDelta) -> None:
        match self.deltas.arrive(delta.number):
            case Arrived.DUPLICATE:
                return
            case Arrived.GAP:
                self.need_snapshot = True
                return
        if self.next_part:
            # Parts and deltas come in order: the rest of the snapshot is lost.
            self.need_snapshot, self.next_part = True, 0
        if self.need_snapshot:
            return
        # Copies first: what is committed or released in the same delta may rest on them.
        for number in unpack(delta.copied).tolist():
            copies = self.copies.pop(number, None)
            if copies is not None:
                self.pool.confirm(copies)
        if delta.commits is not None:
            self._commit(delta.commits)
        # After the commits, some of which may rest on it; before releases, which cache content.
        self._forget(delta.forget)
        for block_id in unpack(delta.released).tolist():
            self.pool.release(block_id)
        for number in unpack(delta.abandoned).tolist():
            self._take_back(number)

    def _take_back(self, number: int) -> None:
        for block_id in reversed(self.granted.pop(number, [])):
            self.pool.release(block_id)
        copies = self.copies.pop(number, None)
        if copies is not None:
            self.pool.drop(copies)
        # An abandoned request may still be on its way: answering it later would leak what it took.
        self.granted[number] = []

    def _commit(self, commits: Commits) -> None:
        block_ids = unpack(commits.block_ids).tolist()
        parents = unpack(commits.parents).tolist()
        hashes = _split(commits.hashes, HASH_BYTES)
        tokens = _split(commits.token_ids, 4 * self.pool.block_size)
        if not len(block_ids) == len(parents) == len(hashes) == len(tokens):
            raise WireError("the columns of a commit differ in length")
        salts = iter(commits.salts)
        for block_id, parent, content_hash, block_tokens in zip(
            block_ids, parents, hashes, tokens, strict=True
        ):
            if parent == NO_PARENT:
                self.pool.commit(block_id, content_hash, block_tokens, None, next(salts, b""))
            else:
                salt = self.pool.salt_of(parent)
                self.pool.commit(block_id, content_hash, block_tokens, parent, salt)

    def _forget(self, hashes: bytes) -> None:
        if hashes:
            self.pool.forget(_split(hashes, HASH_BYTES))

    def restore(self, snapshot: KvSnapshot) -> None:
        """A part of what the epoch holds; the first one takes back everything else."""
        if (snapshot.epoch, snapshot.binding) != (self.epoch, self.binding):
            self.epoch, self.binding = snapshot.epoch, snapshot.binding
            self.deltas.restart(0)
        if snapshot.part == 0:
            self._close_all()
        elif snapshot.part != self.next_part:
            self.need_snapshot, self.next_part = True, 0
            return
        for block_id, holds in zip(
            unpack(snapshot.block_ids).tolist(), unpack(snapshot.holds).tolist(), strict=True
        ):
            self.pool.adopt(block_id, holds)
        self._commit(snapshot.commits)
        self._forget(snapshot.forget)
        self.next_part = (snapshot.part + 1) % snapshot.parts
        if self.next_part == 0:
            self.deltas.restart(snapshot.number)
            self.closed_through = snapshot.closed_through
            self.need_snapshot = False

    def _close_all(self) -> None:
        self.pool.revoke()
        for copies in self.copies.values():
            self.pool.drop(copies)
        self.copies.clear()
        self.granted.clear()
        self.next_part = 0


def _outs(copies: Copies) -> bytes:
    return pack([end for write in copies.outs for end in (write.block_id, write.host_slot)])


def _ins(copies: Copies) -> bytes:
    return pack([end for arrival in copies.ins for end in (arrival.host_slot, arrival.block_id)])


def _split(buffer: bytes, stride: int) -> list[bytes]:
    if len(buffer) % stride:
        raise WireError(f"a column of {len(buffer)} bytes is no multiple of {stride}")
    return [buffer[i : i + stride] for i in range(0, len(buffer), stride)]
