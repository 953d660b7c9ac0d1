"""The ledger's state machine: every engine's books, and whom they are kept for.

Invariants: nothing is granted to an epoch before its snapshot; a lower epoch or another generation
changes nothing. Only what names this ledger is heeded; where a scheduler has gone over to another
one, this one's books of that engine are void and thrown away, and with the last of them it ends.

Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from services.contracts.beats import Beat, KvPoolLoad, ServiceKind
from services.contracts.codec import Message
from services.contracts.errors import InvariantError
from services.contracts.kv import (
    KvCheck,
    KvCheckRequest,
    KvDelta,
    KvReport,
    KvReportRequest,
    KvSnapshot,
    KvStatus,
    LeaseReply,
    LeaseRequest,
    LookupReply,
    LookupRequest,
)
from services.contracts.limits import MAX_NAMES

from .block_pool import BlockPool
from .ledger import Ledger
from .report import check, report

Question: TypeAlias = LookupRequest | LeaseRequest | KvReportRequest | KvCheckRequest


class Superseded(InvariantError):
    """Another ledger has the books of every engine that this one had: it must go."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A request with a reply subject; `reply` is opaque and comes back in the effect."""

    message: Question
    reply: str


@dataclass(frozen=True, slots=True)
class Reply:
    reply: str
    message: Message


Event: TypeAlias = Asked | KvDelta | KvSnapshot | Beat
Effect: TypeAlias = Reply


class KvCore:
    """See the module. Has no timers. service_id: of this run alone, what schedulers call it by.
    tenant_share: part of either tier's cached blocks that one tenant may have.
    """

    wake_at_ns: int | None = None

    def __init__(self, service_id: str, tenant_share: float = 1.0) -> None:
        self.service_id = service_id
        self.tenant_share = tenant_share
        self.ledgers: dict[str, Ledger] = {}

    def handle(self, event: Event, now_ns: int) -> list[Effect]:
        """Raises Superseded."""
        match event:
            case Asked():
                if self._is_named(event.message):
                    return [Reply(event.reply, self._answer(event.message))]
            case KvDelta():
                ledger = self.ledgers.get(event.engine) if self._is_named(event) else None
                if ledger is not None and ledger.owns(event):
                    ledger.apply(event)
            case KvSnapshot():
                ledger = self._ledger_for(event) if self._is_named(event) else None
                if ledger is not None:
                    ledger.restore(event)
            case Beat():
                self._beat(event)
        return []

    def tick(self, now_ns: int) -> list[Effect]:
        return []

    # ---- whom they speak to

    def _is_named(self, message: Question | KvDelta | KvSnapshot) -> bool:
        if message.ledger == self.service_id:
            return True
        if message.ledger and not isinstance(message, KvReportRequest | KvCheckRequest):
            self._yield(message.engine, message.generation, message.epoch, message.binding)
        return False

    def _yield(self, engine: str, generation: int, epoch: int, binding: int) -> None:
        """The scheduler of `engine` speaks to another ledger: since after these books, or before
        them, where it is an old message that comes late.
        """
        ledger = self.ledgers.get(engine)
        if ledger is None or not ledger.is_before(generation, epoch, binding):
            return
        del self.ledgers[engine]
        if not self.ledgers:
            raise Superseded(f"another ledger has the books of {engine}")

    # ---- requests

    def _answer(self, request: Question) -> Message:
        ledger = self.ledgers.get(request.engine)
        match request:
            case LookupRequest() | LeaseRequest():
                return self._grant(request, ledger)
            case KvReportRequest():
                if ledger is None:
                    return KvReport(engine=request.engine)
                return report(request.engine, ledger, request.max_tenants)
            case KvCheckRequest():
                if ledger is None:
                    return KvCheck(engine=request.engine)
                return check(request.engine, ledger)

    @staticmethod
    def _grant(request: LookupRequest | LeaseRequest, ledger: Ledger | None) -> Message:
        status = KvStatus.NEED_SNAPSHOT
        generation, epoch = request.generation, request.epoch
        if ledger is not None:
            status = ledger.status_for(request)
            if status is KvStatus.STALE:
                generation, epoch = ledger.generation, ledger.epoch
        if status is KvStatus.OK and ledger is not None:
            if isinstance(request, LookupRequest):
                return ledger.lookup(request)
            return ledger.lease(request)
        kind = LookupReply if isinstance(request, LookupRequest) else LeaseReply
        return kind(generation, epoch, request.number, status)

    # ---- what schedulers say

    def _ledger_for(self, snapshot: KvSnapshot) -> Ledger | None:
        """The ledger that the snapshot speaks of, opened or emptied as its generation and binding
        demand; None where the snapshot comes too late.
        """
        ledger = self.ledgers.get(snapshot.engine)
        if ledger is not None and ledger.is_after(snapshot):
            return None
        if ledger is None or not ledger.may_keep(snapshot):
            if ledger is None and len(self.ledgers) >= MAX_NAMES:
                raise InvariantError(f"more than {MAX_NAMES} engines")
            pool = BlockPool(
                snapshot.num_blocks, snapshot.block_size, snapshot.host_blocks, self.tenant_share
            )
            ledger = Ledger(snapshot.generation, pool)
            self.ledgers[snapshot.engine] = ledger
        return ledger

    def _beat(self, beat: Beat) -> None:
        """A scheduler names its ledger, and the last delta that it sent: a higher number than ours
        means that the last ones were lost.
        """
        if beat.kind is not ServiceKind.SCHEDULER or beat.engine is None or not beat.engine.ledger:
            return
        binding = beat.engine.binding
        if beat.engine.ledger != self.service_id:
            self._yield(beat.service_id, beat.generation, beat.epoch, binding)
            return
        ledger = self.ledgers.get(beat.service_id)
        if ledger is None or ledger.term != (beat.generation, beat.epoch, binding):
            return
        for mark in beat.streams:
            if mark.name == beat.service_id and ledger.deltas.behind(mark.number):
                ledger.need_snapshot = True

    # ---- what others may ask

    def beat(self) -> Beat:
        return Beat(
            kind=ServiceKind.KV_STORE,
            service_id=self.service_id,
            pools=[_load(engine, ledger) for engine, ledger in self.ledgers.items()],
        )

    def check_invariants(self) -> None:
        for ledger in self.ledgers.values():
            ledger.pool.check_invariants()


def _load(engine: str, ledger: Ledger) -> KvPoolLoad:
    pool = ledger.pool
    return KvPoolLoad(
        engine=engine,
        generation=ledger.generation,
        epoch=ledger.epoch,
        num_blocks=pool.num_blocks,
        num_free=pool.num_free,
        num_leased=pool.num_leased,
        num_cached=pool.num_cached,
        need_snapshot=ledger.need_snapshot,
        num_host_blocks=pool.host.num_slots,
        num_host_free=pool.host.num_free,
        num_host_cached=pool.host.num_cached,
        binding=ledger.binding,
    )
