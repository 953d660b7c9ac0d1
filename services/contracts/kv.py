"""Between scheduler and ledger (DESIGN section 6).

Requests (lookups and leases) share one numbering; each is closed once: its reply was used, or a
delta names it as abandoned and the ledger takes back what it had granted. Deltas are a numbered
stream; a gap is repaired by a snapshot.

Copies between a block of the pool and a slot of host memory come with the replies, as int32 pairs
(source, destination). All copies of one reply run in one step, before it computes, outs before
ins; a delta names the request once that step's result has arrived, and only then are they believed.

Every message names the ledger that it is for, and the scheduler's `binding` to it: 0 for the one
that the epoch began with, one more with each other that took its place. Any other ledger is silent.

Pure.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from msgspec import Meta

from . import limits
from .codec import Message
from .ids import Id, MaybeId
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

    copy_block_us, recompute_block_us: what it costs to bring one block in from host memory, and to
    compute it again; 0 where not known, and then whatever is cached is taken.
    """

    engine: Id
    generation: int
    epoch: int
    number: int
    salt: Annotated[bytes, Meta(max_length=64)] = b""
    hashes: Hashes
    token_ids: Vector
    copy_block_us: Annotated[int, Meta(ge=0)] = 0
    recompute_block_us: Annotated[int, Meta(ge=0)] = 0
    ledger: MaybeId = ""
    binding: Annotated[int, Meta(ge=0)] = 0


class LookupReply(Message, frozen=True, tag="lookup_reply"):
    """block_ids: int32, pinned once each, in prefix order. generation, epoch: the ledger's own
    where status is STALE.

    copies_in: pairs (host slot, block) that fill some of these blocks; copies_out: pairs (block,
    host slot) that save what these blocks held.
    """

    generation: int
    epoch: int
    number: int
    status: KvStatus
    block_ids: Vector = EMPTY
    copies_out: Vector = EMPTY
    copies_in: Vector = EMPTY


class LeaseRequest(Message, frozen=True, tag="lease"):
    engine: Id
    generation: int
    epoch: int
    number: int
    num_blocks: Annotated[int, Meta(ge=1, le=limits.MAX_BLOCKS)]
    ledger: MaybeId = ""
    binding: Annotated[int, Meta(ge=0)] = 0


class LeaseReply(Message, frozen=True, tag="lease_reply"):
    """block_ids: granted, content forgotten. num_available: free or evictable blocks left after the
    grant. copies_out: pairs (block, host slot) that save what they held.
    """

    generation: int
    epoch: int
    number: int
    status: KvStatus
    block_ids: Vector = EMPTY
    num_available: int = 0
    copies_out: Vector = EMPTY


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
    numbers. copied: numbers of requests whose copies have run; counts before all the rest.

    forget: 32 bytes each, hashes of content that may be broken: it, and all that continues it, is
    never hit again, in either tier; after the commits of this delta, before its releases.
    """

    engine: Id
    generation: int
    epoch: int
    number: int
    commits: Commits | None = None
    released: Vector = EMPTY
    abandoned: Vector = EMPTY
    copied: Vector = EMPTY
    forget: Hashes = b""
    ledger: MaybeId = ""
    binding: Annotated[int, Meta(ge=0)] = 0


class KvSnapshot(Message, frozen=True, tag="snapshot", kw_only=True):
    """scheduler -> ledger: everything the epoch holds; opens the epoch or repairs a gap. It takes
    the next `number` of the deltas, which go on after it.

    Parts 0 .. parts - 1 arrive in order and count together. block_ids, holds: int32. Every request
    numbered `closed_through` or lower is closed: what it granted is in here or is not held, and its
    copies have run or never will. host_blocks: slots of the worker's host memory. forget: as in a
    delta, and also what a lost one may have named; in the last part, after all commits.
    binding: with 0 the ledger keeps what it had cached in this generation, with another only what
    it has cached under the same.
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
    host_blocks: Annotated[int, Meta(ge=0, le=limits.MAX_BLOCKS)] = 0
    forget: Hashes = b""
    ledger: MaybeId = ""
    binding: Annotated[int, Meta(ge=0)] = 0


class KvReportRequest(Message, frozen=True, tag="kv_report"):
    """anyone -> ledger (request/reply): the books of one engine, the `max_tenants` largest tenants
    with them.
    """

    engine: Id
    max_tenants: Annotated[int, Meta(ge=0, le=limits.MAX_NAMES)] = 10
    ledger: MaybeId = ""


class TenantReport(Message, frozen=True):
    """tenant: a short hash of its salt, or "shared" for the namespace without one. Cached blocks in
    either tier.
    """

    tenant: Annotated[str, Meta(max_length=limits.MAX_NAME_CHARS)]
    num_cached: int
    num_host_cached: int


class KvReport(Message, frozen=True, tag="kv_report_reply", kw_only=True):
    """One engine's books as the ledger has them; `known` is False, and the rest empty, where it has
    none.

    free + leased + cached = total, the null block apart; host_free + host_cached + host_writing =
    host_total. Counts since the pool was opened; hits and queries in blocks. quotas: cached blocks
    that one tenant may have in each tier.
    """

    engine: Id
    known: bool = False
    generation: int = 0
    epoch: int = 0
    need_snapshot: bool = False
    block_size: int = 0
    num_blocks: int = 0
    num_free: int = 0
    num_leased: int = 0
    num_cached: int = 0
    num_host_blocks: int = 0
    num_host_free: int = 0
    num_host_cached: int = 0
    num_host_writing: int = 0
    num_lookups: int = 0
    num_query_blocks: int = 0
    num_hit_blocks: int = 0
    num_host_hit_blocks: int = 0
    num_evictions: int = 0
    num_quota_evictions: int = 0
    num_host_evictions: int = 0
    num_copies_out: int = 0
    num_copies_in: int = 0
    tenant_quota: int = 0
    host_tenant_quota: int = 0
    num_tenants: int = 0
    tenants: Annotated[list[TenantReport], Meta(max_length=limits.MAX_NAMES)] = []


class KvCheckRequest(Message, frozen=True, tag="kv_check"):
    """anyone -> ledger (request/reply): prove the books of one engine now."""

    engine: Id
    ledger: MaybeId = ""


class KvCheck(Message, frozen=True, tag="kv_check_reply", kw_only=True):
    """fault: the first broken invariant in words, "" where none is. Counts are of what was looked
    at.
    """

    engine: Id
    known: bool = False
    fault: Annotated[str, Meta(max_length=limits.MAX_ERROR_CHARS)] = ""
    num_blocks: int = 0
    num_free: int = 0
    num_leased: int = 0
    num_cached: int = 0
    num_holds: int = 0
    num_entries: int = 0
    num_host_blocks: int = 0
    num_open_requests: int = 0
    num_unconfirmed_copies: int = 0
