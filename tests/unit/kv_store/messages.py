"""Messages of one scheduler to the ledger, with everything filled in but what a test is about."""

from __future__ import annotations

from typing import Any

import numpy as np

from kv_store.core import Asked, KvCore
from services.contracts.beats import Beat, ServiceKind, StreamMark
from services.contracts.hashing import chain_hashes
from services.contracts.kv import (
    NO_PARENT,
    Commits,
    KvDelta,
    KvSnapshot,
    LeaseReply,
    LeaseRequest,
    LookupReply,
    LookupRequest,
)
from services.contracts.vectors import pack, unpack
from tests.unit.fake_admission import engine_load

ENGINE = "engine-0"
BLOCK_SIZE = 4


def ids(vector: bytes) -> list[int]:
    return [int(value) for value in unpack(vector)]


def hashes_of(tokens: list[int], salt: bytes = b"") -> list[bytes]:
    array = np.array(tokens, dtype=np.int32)
    return chain_hashes(salt, array, BLOCK_SIZE, len(tokens) // BLOCK_SIZE)


def commits(block_ids: list[int], tokens: list[int], salt: bytes = b"") -> Commits:
    """`block_ids` hold `tokens`, one chain from its first block on."""
    full = tokens[: len(block_ids) * BLOCK_SIZE]
    return Commits(
        block_ids=pack(block_ids),
        parents=pack([NO_PARENT, *block_ids[:-1]][: len(block_ids)]),
        hashes=b"".join(hashes_of(full, salt)),
        token_ids=pack(full),
        salts=[salt] if block_ids else [],
    )


class Peer:
    """A scheduler epoch as the ledger hears it: numbers its requests and its deltas. ledger,
    binding: whom it names in all of them.
    """

    def __init__(
        self, core: KvCore, generation: int = 1, epoch: int = 1, num_blocks: int = 9
    ) -> None:
        self.core = core
        self.generation, self.epoch, self.num_blocks = generation, epoch, num_blocks
        self.ledger, self.binding = core.service_id, 0
        self.requests = 0
        self.deltas = 0

    def snapshot(self, held: dict[int, int] | None = None, **more: Any) -> None:
        """Its parts have one number, the next of the deltas'."""
        held = held or {}
        if not more.get("part"):
            self.deltas += 1
        fields: dict[str, Any] = {
            "engine": ENGINE,
            "generation": self.generation,
            "epoch": self.epoch,
            "number": self.deltas,
            "num_blocks": self.num_blocks,
            "block_size": BLOCK_SIZE,
            "block_ids": pack(held.keys()),
            "holds": pack(held.values()),
            "closed_through": self.requests,
            "ledger": self.ledger,
            "binding": self.binding,
        }
        self.core.handle(KvSnapshot(**{**fields, **more}), 0)

    def lease(self, count: int, number: int = 0) -> LeaseReply:
        self.requests = max(self.requests, number or self.requests + 1)
        request = LeaseRequest(
            *(ENGINE, self.generation, self.epoch, number or self.requests, count),
            ledger=self.ledger,
            binding=self.binding,
        )
        (reply,) = self.core.handle(Asked(request, "inbox"), 0)
        assert reply.reply == "inbox" and isinstance(reply.message, LeaseReply)
        return reply.message

    def lookup(self, tokens: list[int], salt: bytes = b"", number: int = 0) -> LookupReply:
        self.requests = max(self.requests, number or self.requests + 1)
        full = tokens[: len(tokens) // BLOCK_SIZE * BLOCK_SIZE]
        request = LookupRequest(
            engine=ENGINE,
            generation=self.generation,
            epoch=self.epoch,
            number=number or self.requests,
            salt=salt,
            hashes=b"".join(hashes_of(full, salt)),
            token_ids=pack(full),
            ledger=self.ledger,
            binding=self.binding,
        )
        (reply,) = self.core.handle(Asked(request, "inbox"), 0)
        assert isinstance(reply.message, LookupReply)
        return reply.message

    def delta(
        self,
        *,
        content: Commits | None = None,
        released: list[int] | None = None,
        abandoned: list[int] | None = None,
        copied: list[int] | None = None,
        forget: bytes = b"",
        number: int = 0,
    ) -> None:
        self.deltas = number or self.deltas + 1
        self.core.handle(
            KvDelta(
                ENGINE,
                self.generation,
                self.epoch,
                self.deltas,
                content,
                pack(released or []),
                pack(abandoned or []),
                pack(copied or []),
                forget,
                ledger=self.ledger,
                binding=self.binding,
            ),
            0,
        )
        self.core.check_invariants()

    def beat(self, delta_number: int, **changes: Any) -> None:
        """The scheduler's, which names the last delta that it has sent."""
        load = engine_load(ledger=self.ledger, binding=self.binding)
        fields = {"service_id": ENGINE, "generation": self.generation, "epoch": self.epoch}
        beat = Beat(
            ServiceKind.SCHEDULER,
            **{**fields, **changes},
            streams=[StreamMark(ENGINE, delta_number)],
            engine=load,
        )
        assert self.core.handle(beat, 0) == []

    def counts(self) -> tuple[int, int, int]:
        """(free, leased, cached)."""
        pool = self.core.ledgers[ENGINE].pool
        return pool.num_free, pool.num_leased, pool.num_cached
