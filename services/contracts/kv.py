"""Between scheduler and ledger (DESIGN section 6).

Requests (lookups and leases) share one numbering; each is closed once: its reply was used, or a
delta names it as abandoned and the ledger takes back what it had granted. Deltas are a numbered
stream; a gap is repaired by a snapshot.

Pure.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from msgspec import Meta

from . import limits
from .codec import Message
from .ids import Id
from .vectors import EMPTY, MAX_VECTOR_BYTES, Vector

Hashes = Annotated[bytes, Meta(max_length=MAX_VECTOR_BYTES)]
_Salts = Annotated[list[Annotated[bytes, Meta(max_length=64)]], Meta(max_length=limits.MAX_LANES)]

NO_PARENT = -1


class KvStatus(StrEnum):
    OK = "ok"
    STALE = "stale"
    NEED_SNAPSHOT = "need_snapshot"


class LookupRequest(Message, frozen=True, tag="lookup", kw_only=True):
    """Longest cached prefix, pinned. hashes: 32 bytes each [n]; token_ids: int32 [n * block_size],
    compared on a hit.
    """

    engine: Id
    generation: int
    epoch: int
    number: int
    salt: Annotated[bytes, Meta(max_length=64)] = b""
    hashes: Hashes
    token_ids: Vector


class LookupReply(Message, frozen=True, tag="lookup_reply"):
    """block_ids: int32, pinned once each, in prefix order. epoch: the ledger's own where status is
    STALE.
    """

    generation: int
    epoch: int
    number: int
    status: KvStatus
    block_ids: Vector = EMPTY


class LeaseRequest(Message, frozen=True, tag="lease"):
    engine: Id
    generation: int
    epoch: int
    number: int
    num_blocks: Annotated[int, Meta(ge=1, le=limits.MAX_BLOCKS)]


class LeaseReply(Message, frozen=True, tag="lease_reply"):
    """block_ids: granted, content forgotten. num_available: free or evictable blocks left after the
    grant.
    """

    generation: int
    epoch: int
    number: int
    status: KvStatus
    block_ids: Vector = EMPTY
    num_available: int = 0


class Commits(Message, frozen=True):
    """Blocks whose content is now known, column by column.

    block_ids, parents: int32 [n], `parents` being the block before in the same sequence or -1 for a
    first block.
    hashes: 32 bytes each; token_ids: int32 [n * block_size]; salts: of the first blocks, in order.
    """

    block_ids: Vector = EMPTY
    parents: Vector = EMPTY
    hashes: Hashes = b""
    token_ids: Vector = EMPTY
    salts: _Salts = []


class KvDelta(Message, frozen=True, tag="delta"):
    """scheduler -> ledger, one per step. released: one hold of each goes back. abandoned: request
    numbers.
    """

    engine: Id
    generation: int
    epoch: int
    number: int
    commits: Commits | None = None
    released: Vector = EMPTY
    abandoned: Vector = EMPTY


class KvSnapshot(Message, frozen=True, tag="snapshot", kw_only=True):
    """scheduler -> ledger: everything the epoch holds, as of delta `number`; opens the epoch or
    repairs a gap.

    Parts 0 .. parts - 1 arrive in order and count together. block_ids, holds: int32. Every request
    numbered `closed_through` or lower is closed: what it granted is in here or is not held.
    """

    engine: Id
    generation: int
    epoch: int
    number: int
    part: int = 0
    parts: int = 1
    num_blocks: Annotated[int, Meta(ge=2, le=limits.MAX_BLOCKS)]
    block_size: Annotated[int, Meta(ge=1, le=limits.MAX_BLOCK_SIZE)]
    block_ids: Vector = EMPTY
    holds: Vector = EMPTY
    commits: Commits = Commits()
    closed_through: int = 0
