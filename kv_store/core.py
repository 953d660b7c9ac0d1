"""The ledger's state machine: every engine's pool, and whom it is leased to.

Invariants: nothing is granted to an epoch before its snapshot; a lower epoch or another generation
changes nothing; deltas are applied in order, and a gap stops grants until a snapshot repairs it;
each request is closed once.

Pure.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from services.contracts.beats import Beat, KvPoolLoad, ServiceKind
from services.contracts.codec import Message
from services.contracts.errors import InvariantError, WireError
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
from services.contracts.limits import MAX_NAMES
from services.contracts.streams import Arrival, StreamReceiver
from services.contracts.vectors import pack, unpack

from .block_pool import BlockPool

# Answered requests whose reply the scheduler may yet abandon; it abandons within milliseconds.
MAX_OPEN_REQUESTS: Final = 8192


@dataclass(frozen=True, slots=True)
class Asked:
    """A request with a reply subject; `reply` is opaque and comes back in the effect."""

    message: LookupRequest | LeaseRequest
    reply: str


@dataclass(frozen=True, slots=True)
class Reply:
    reply: str
    message: Message


Event: TypeAlias = Asked | KvDelta | KvSnapshot | Beat
Effect: TypeAlias = Reply


@dataclass(slots=True)
class Ledger:
    """One engine. granted: blocks of answered requests by number, until a delta or snapshot closes
    them.
    """

    generation: int
    epoch: int
    pool: BlockPool
    deltas: StreamReceiver
    closed_through: int
    granted: OrderedDict[int, list[int]] = field(default_factory=OrderedDict)
    need_snapshot: bool = False
    next_part: int = 0


class KvCore:
    """See the module. Has no timers."""

    wake_at_ns: int | None = None

    def __init__(self, service_id: str) -> None:
        self.service_id = service_id
        self.ledgers: dict[str, Ledger] = {}

    def handle(self, event: Event, now_ns: int) -> list[Effect]:
        match event:
            case Asked(message=LookupRequest() as lookup):
                return [Reply(event.reply, self._lookup(lookup))]
            case Asked(message=LeaseRequest() as lease):
                return [Reply(event.reply, self._lease(lease))]
            case KvDelta():
                self._delta(event)
            case KvSnapshot():
                self._snapshot(event)
            case Beat():
                self._beat(event)
        return []

    def tick(self, now_ns: int) -> list[Effect]:
        return []

    # ---- requests

    def _status(self, request: LookupRequest | LeaseRequest) -> tuple[KvStatus, Ledger | None]:
        ledger = self.ledgers.get(request.engine)
        if ledger is None:
            return KvStatus.NEED_SNAPSHOT, None
        if request.epoch < ledger.epoch or request.generation < ledger.generation:
            return KvStatus.STALE, ledger
        if request.epoch > ledger.epoch or request.generation > ledger.generation:
            return KvStatus.NEED_SNAPSHOT, ledger
        if ledger.need_snapshot or ledger.next_part:
            return KvStatus.NEED_SNAPSHOT, ledger
        return KvStatus.OK, ledger

    def _lookup(self, request: LookupRequest) -> LookupReply:
        status, ledger = self._status(request)
        hits: list[int] = []
        if status is KvStatus.OK and ledger is not None and self._is_new(ledger, request.number):
            stride = 4 * ledger.pool.block_size
            hashes = _split(request.hashes, HASH_BYTES)
            tokens = _split(request.token_ids, stride)
            if len(hashes) != len(tokens):
                raise WireError(f"{len(hashes)} hashes for {len(tokens)} blocks of tokens")
            self._remember(ledger, request.number, ledger.pool.lookup(request.salt, hashes, tokens))
        if status is KvStatus.OK and ledger is not None:
            hits = ledger.granted.get(request.number, [])
        return LookupReply(
            generation=request.generation,
            epoch=self._epoch_for(status, request.epoch, ledger),
            number=request.number,
            status=status,
            block_ids=pack(hits),
        )

    def _lease(self, request: LeaseRequest) -> LeaseReply:
        status, ledger = self._status(request)
        granted: list[int] = []
        available = 0
        if status is KvStatus.OK and ledger is not None:
            if self._is_new(ledger, request.number):
                self._remember(ledger, request.number, ledger.pool.grant(request.num_blocks))
            granted = ledger.granted.get(request.number, [])
            available = ledger.pool.num_available
        return LeaseReply(
            generation=request.generation,
            epoch=self._epoch_for(status, request.epoch, ledger),
            number=request.number,
            status=status,
            block_ids=pack(granted),
            num_available=available,
        )

    @staticmethod
    def _epoch_for(status: KvStatus, epoch: int, ledger: Ledger | None) -> int:
        return ledger.epoch if status is KvStatus.STALE and ledger is not None else epoch

    @staticmethod
    def _is_new(ledger: Ledger, number: int) -> bool:
        """False for a repeated request, which gets the same answer, and for a closed one, which
        gets nothing.
        """
        return number > ledger.closed_through and number not in ledger.granted

    @staticmethod
    def _remember(ledger: Ledger, number: int, block_ids: list[int]) -> None:
        ledger.granted[number] = block_ids
        while len(ledger.granted) > MAX_OPEN_REQUESTS:
            closed, _ = ledger.granted.popitem(last=False)
            ledger.closed_through = max(ledger.closed_through, closed)

    # ---- deltas and snapshots

    def _delta(self, delta: KvDelta) -> None:
        ledger = self.ledgers.get(delta.engine)
        if ledger is None or (delta.generation, delta.epoch) != (ledger.generation, ledger.epoch):
            return
        match ledger.deltas.arrive(delta.number):
            case Arrival.DUPLICATE:
                return
            case Arrival.GAP:
                ledger.need_snapshot = True
                return
        if ledger.need_snapshot or ledger.next_part:
            # The rest of a snapshot is missing: what deltas speak of may be in it.
            ledger.need_snapshot = True
            return
        if delta.commits is not None:
            self._commit(ledger, delta.commits)
        for block_id in unpack(delta.released).tolist():
            ledger.pool.release(block_id)
        for number in unpack(delta.abandoned).tolist():
            for block_id in reversed(ledger.granted.pop(number, [])):
                ledger.pool.release(block_id)
            # An abandoned request may still be on its way: answering it later would leak what it
            # took.
            ledger.granted[number] = []

    def _commit(self, ledger: Ledger, commits: Commits) -> None:
        block_ids = unpack(commits.block_ids).tolist()
        parents = unpack(commits.parents).tolist()
        hashes = _split(commits.hashes, HASH_BYTES)
        tokens = _split(commits.token_ids, 4 * ledger.pool.block_size)
        if not len(block_ids) == len(parents) == len(hashes) == len(tokens):
            raise WireError("the columns of a commit differ in length")
        salts = iter(commits.salts)
        for block_id, parent, content_hash, block_tokens in zip(
            block_ids, parents, hashes, tokens, strict=True
        ):
            if parent == NO_PARENT:
                ledger.pool.commit(block_id, content_hash, block_tokens, None, next(salts, b""))
            else:
                salt = ledger.pool.salt_of(parent)
                ledger.pool.commit(block_id, content_hash, block_tokens, parent, salt)

    def _snapshot(self, snapshot: KvSnapshot) -> None:
        ledger = self._ledger_for(snapshot)
        if ledger is None:
            return
        if snapshot.part == 0:
            ledger.pool.revoke()
            ledger.granted.clear()
            ledger.next_part = 0
        elif snapshot.part != ledger.next_part:
            ledger.need_snapshot, ledger.next_part = True, 0
            return
        for block_id, holds in zip(
            unpack(snapshot.block_ids).tolist(), unpack(snapshot.holds).tolist(), strict=True
        ):
            ledger.pool.adopt(block_id, holds)
        self._commit(ledger, snapshot.commits)
        ledger.next_part = (snapshot.part + 1) % snapshot.parts
        if ledger.next_part == 0:
            ledger.deltas.restart(snapshot.number)
            ledger.closed_through = snapshot.closed_through
            ledger.need_snapshot = False

    def _ledger_for(self, snapshot: KvSnapshot) -> Ledger | None:
        """The ledger that the snapshot speaks of, opened or emptied as its generation and epoch
        demand.
        """
        ledger = self.ledgers.get(snapshot.engine)
        if ledger is None or snapshot.generation > ledger.generation:
            if ledger is None and len(self.ledgers) >= MAX_NAMES:
                raise InvariantError(f"more than {MAX_NAMES} engines")
            ledger = Ledger(
                snapshot.generation,
                snapshot.epoch,
                BlockPool(snapshot.num_blocks, snapshot.block_size),
                StreamReceiver(),
                closed_through=0,
            )
            self.ledgers[snapshot.engine] = ledger
        if snapshot.generation < ledger.generation or snapshot.epoch < ledger.epoch:
            return None
        ledger.epoch = snapshot.epoch
        return ledger

    def _beat(self, beat: Beat) -> None:
        """A scheduler names the last delta it sent: a higher number than ours means that the last
        ones were lost.
        """
        if beat.kind is not ServiceKind.SCHEDULER:
            return
        for mark in beat.streams:
            ledger = self.ledgers.get(mark.name)
            if ledger is not None and beat.service_id == mark.name:
                same = (beat.generation, beat.epoch) == (ledger.generation, ledger.epoch)
                if same and ledger.deltas.behind(mark.number):
                    ledger.need_snapshot = True

    def beat(self) -> Beat:
        return Beat(
            kind=ServiceKind.KV_STORE,
            service_id=self.service_id,
            pools=[
                KvPoolLoad(
                    engine=engine,
                    generation=ledger.generation,
                    epoch=ledger.epoch,
                    num_blocks=ledger.pool.num_blocks,
                    num_free=ledger.pool.num_free,
                    num_leased=ledger.pool.num_leased,
                    num_cached=ledger.pool.num_cached,
                    need_snapshot=ledger.need_snapshot,
                )
                for engine, ledger in self.ledgers.items()
            ],
        )

    def check_invariants(self) -> None:
        for ledger in self.ledgers.values():
            ledger.pool.check_invariants()


def _split(buffer: bytes, stride: int) -> list[bytes]:
    if len(buffer) % stride:
        raise WireError(f"a column of {len(buffer)} bytes is no multiple of {stride}")
    return [buffer[i : i + stride] for i in range(0, len(buffer), stride)]
