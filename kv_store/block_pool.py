"""One engine's blocks: FREE, LEASED (held by the epoch) or CACHED (no holder, content known).

    FREE ─grant─▶ LEASED ─release─┬─ content found under its hash ─▶ CACHED ─┬─ hit ─▶ LEASED
      ▲                           └─ else ─▶ FREE                           └─ evict, forget ─▶ FREE

free + leased + cached = num_blocks - 1: block 0 is the null block and never in any of them. A block
is LEASED while it has holds; a grant and a pin are one hold each, released once. A block that a
copy from host memory is to fill is LEASED and ARRIVING: its content counts once that copy is
confirmed, and until then whoever hits it gets the same copy. A LEASED block whose content was
forgotten stays with its holders, and is FREE after them.

Pure.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence

from services.contracts.errors import InvariantError

from .content import Arrival, Copies, Entry, PrefixIndex
from .eviction import FairLru, quota_of
from .host_tier import HostTier
from .policy import UNKNOWN_COSTS, Costs, affordable_hit, cheapest_hit
from .totals import PoolTotals


class BlockPool:
    """Blocks 1 .. num_blocks - 1, and `host_blocks` slots of host memory below them."""

    def __init__(
        self, num_blocks: int, block_size: int, host_blocks: int = 0, tenant_share: float = 1.0
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.host = HostTier(host_blocks, tenant_share)
        self.totals = PoolTotals()
        # Ordered, so that a snapshot takes out any one of them in O(1).
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))
        # Over its tenant's quota: free, but its content goes to host memory when it is granted.
        self._surplus: OrderedDict[int, Entry] = OrderedDict()
        self._cached = FairLru(quota_of(tenant_share, num_blocks - 1))
        self._holds: dict[int, int] = {}
        self._content: dict[int, Entry] = {}
        self._arriving: dict[int, Arrival] = {}
        self._index = PrefixIndex()

    @property
    def num_free(self) -> int:
        return len(self._free) + len(self._surplus)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_leased(self) -> int:
        return len(self._holds)

    @property
    def num_available(self) -> int:
        return self.num_free + len(self._cached)

    @property
    def num_holds(self) -> int:
        return sum(self._holds.values())

    @property
    def num_entries(self) -> int:
        return len(self._index)

    @property
    def tenant_quota(self) -> int:
        return self._cached.quota

    @property
    def tenant_counts(self) -> dict[bytes, int]:
        """Cached blocks by tenant."""
        return self._cached.counts

    def holds(self, block_id: int) -> int:
        return self._holds.get(block_id, 0)

    # ---- grants and pins

    def grant(self, count: int, copies: Copies | None = None) -> list[int]:
        """Up to `count` blocks, one hold each, free ones first; an evicted block's content is
        forgotten, or moves to host memory by a copy that is added to `copies`.
        """
        granted: list[int] = []
        while len(granted) < count and self.num_available:
            granted.append(self._take(copies))
        return granted

    def lookup(
        self,
        salt: bytes,
        hashes: Sequence[bytes],
        tokens: Sequence[bytes],
        copies: Copies | None = None,
        costs: Costs = UNKNOWN_COSTS,
    ) -> list[int]:
        """Longest prefix worth taking -> its blocks, pinned; `tokens[i]` int32 bytes of block i,
        compared on a hit.

        What lies in host memory gets a block and a copy that is added to `copies`; without `copies`
        only the pool is looked at.
        """
        entries = self._prefix(salt, hashes, tokens, use_host=copies is not None)
        in_pool = [entry.block_id is not None or entry.arrival is not None for entry in entries]
        wanted = cheapest_hit([not there for there in in_pool], costs.copy, costs.recompute)
        is_cached = [
            entry.block_id is not None and entry.block_id in self._cached for entry in entries
        ]
        wanted = min(wanted, affordable_hit(in_pool, is_cached, self.num_available))
        del entries[wanted:]
        self.totals.lookups += 1
        self.totals.query_blocks += len(hashes)
        self.totals.hit_blocks += wanted
        self.totals.host_hit_blocks += in_pool[:wanted].count(False)
        return self._pin(entries, copies)

    def _prefix(
        self,
        salt: bytes,
        hashes: Sequence[bytes],
        tokens: Sequence[bytes],
        *,
        use_host: bool,
    ) -> list[Entry]:
        entries: list[Entry] = []
        parent: Entry | None = None
        for content_hash, block_tokens in zip(hashes, tokens, strict=True):
            entry = self._index.find(content_hash, block_tokens, parent, salt)
            if entry is None:
                break
            in_host = entry.arrival is not None or entry.host_slot is not None
            if entry.block_id is None and not (use_host and in_host):
                break
            entries.append(entry)
            parent = entry
        return entries

    def _pin(self, entries: list[Entry], copies: Copies | None) -> list[int]:
        """One hold of a block for each of `entries`. What is there is pinned before a block is
        taken for what is not, or one hit would evict another.
        """
        for entry in entries:
            if entry.block_id is not None:
                self._hold(entry.block_id)
            elif entry.arrival is not None:
                self._hold(entry.arrival.block_id)
                self.host.pin(entry.arrival.host_slot)
            else:
                assert entry.host_slot is not None
                self.host.pin(entry.host_slot)
        block_ids: list[int] = []
        for entry in entries:
            if entry.block_id is None:
                assert copies is not None
                copies.ins.append(entry.arrival or self._bring_in(entry, copies))
                block_ids.append(copies.ins[-1].block_id)
            else:
                block_ids.append(entry.block_id)
        return block_ids

    def _bring_in(self, entry: Entry, copies: Copies) -> Arrival:
        assert entry.host_slot is not None
        arrival = Arrival(entry.host_slot, self._take(copies), entry)
        self._arriving[arrival.block_id] = entry.arrival = arrival
        self._content[arrival.block_id] = entry
        return arrival

    def release(self, block_id: int) -> None:
        """Take one hold of `block_id` back. Raises InvariantError where it has none."""
        holds = self._holds.get(block_id, 0)
        if holds == 0:
            raise InvariantError(f"block {block_id} is released but nobody holds it")
        if holds > 1:
            self._holds[block_id] = holds - 1
            return
        del self._holds[block_id]
        arrival = self._arriving.pop(block_id, None)
        if arrival is not None:
            arrival.entry.arrival = None
        entry = self._content.get(block_id)
        if entry is not None and arrival is None and self._can_be_found(entry, block_id):
            entry.block_id = block_id
            self._cached.add(block_id, entry.salt)
            self._keep_quota(entry.salt)
        else:
            self._content.pop(block_id, None)
            self._free[block_id] = None

    # ---- content

    def commit(
        self, block_id: int, content_hash: bytes, tokens: bytes, parent: int | None, salt: bytes
    ) -> None:
        """`block_id` is full and its content is known. `parent`: the block before it, or None for a
        first one.

        Raises InvariantError where the block is not held, or its parent has no content.
        """
        if block_id not in self._holds:
            raise InvariantError(f"block {block_id} is committed but nobody holds it")
        before = None if parent is None else self._content.get(parent)
        if parent is not None and before is None:
            raise InvariantError(
                f"block {block_id} follows block {parent}, whose content is unknown"
            )
        entry = self._index.intern(content_hash, tokens, before, salt)
        known = self._content.get(block_id)
        if known is not None and known is not entry:
            raise InvariantError(f"block {block_id} is committed twice, with different content")
        self._content[block_id] = entry
        if entry.block_id is None and self._index.is_indexed(entry):
            entry.block_id = block_id

    def forget(self, hashes: Iterable[bytes]) -> None:
        """What has one of `hashes` may be broken: it, and all that continues it, is never found
        again, in either tier.
        """
        for entry in self._index.forget(hashes):
            block_id, entry.block_id = entry.block_id, None
            if block_id is not None and block_id in self._cached:
                self._cached.remove(block_id)
                del self._content[block_id]
                self._free[block_id] = None
            self.host.forget(entry)
            self.totals.forgotten += 1
        for block_id in [b for b, entry in self._surplus.items() if entry.is_forgotten]:
            del self._surplus[block_id]
            self._free[block_id] = None

    def salt_of(self, block_id: int) -> bytes:
        """Salt of the chain that `block_id` belongs to; b"" where its content is unknown."""
        entry = self._content.get(block_id)
        return entry.salt if entry is not None else b""

    # ---- copies

    def confirm(self, copies: Copies) -> None:
        """They have run: what they wrote can be found."""
        for write in copies.outs:
            self.host.confirm_write(write)
        for arrival in copies.ins:
            self.host.unpin(arrival)
            if self._arriving.get(arrival.block_id) is arrival:
                del self._arriving[arrival.block_id]
                entry = arrival.entry
                entry.arrival = None
                if entry.block_id is None and self._index.is_indexed(entry):
                    entry.block_id = arrival.block_id
        self.totals.copies_out += len(copies.outs)
        self.totals.copies_in += len(copies.ins)

    def drop(self, copies: Copies) -> None:
        """They will not run, or nobody can say: what they would have saved is lost. The holds of
        the blocks that they would have filled go back by `release`.
        """
        for write in copies.outs:
            self.host.drop_write(write)
        for arrival in copies.ins:
            self.host.unpin(arrival)

    # ---- epochs

    def revoke(self) -> None:
        """The epoch's lease ends: what has content stays cached, the rest is free."""
        for block_id in list(self._holds):
            self._holds[block_id] = 1
            self.release(block_id)

    def adopt(self, block_id: int, holds: int) -> None:
        """A snapshot says that `block_id` is held. Its content is unknown until the snapshot
        repeats it.
        """
        if block_id in self._cached:
            self._cached.remove(block_id)
            self._content.pop(block_id).block_id = None
        elif block_id in self._free:
            del self._free[block_id]
        elif block_id in self._surplus:
            del self._surplus[block_id]
        elif block_id not in self._holds:
            raise InvariantError(f"a snapshot holds block {block_id}, which the pool does not have")
        self._holds[block_id] = holds

    # ---- proof

    def faults(self) -> Iterator[str]:
        """Broken invariants, in words."""
        states = [*self._free, *self._surplus, *self._cached, *self._holds]
        if sorted(states) != list(range(1, self.num_blocks)):
            yield "a block is lost, or is in two states"
        if any(holds < 1 for holds in self._holds.values()):
            yield "a block is leased without a hold"
        if any(block_id in self._free or block_id in self._surplus for block_id in self._content):
            yield "a free block has content"
        if not self._arriving.keys() <= self._holds.keys():
            yield "a block arrives that nobody holds"
        for block_id in self._cached:
            entry = self._content.get(block_id)
            if entry is None or entry.block_id != block_id:
                yield f"cached block {block_id} cannot be found"
        for block_id, entry in self._content.items():
            if entry.block_id is not None and self._content.get(entry.block_id) is not entry:
                yield f"the content of block {block_id} is found in a block without it"
            if len(entry.tokens) != 4 * self.block_size:
                yield f"block {block_id} has {len(entry.tokens)} bytes of tokens"
        for block_id, arrival in self._arriving.items():
            if arrival.entry.arrival is not arrival or arrival.entry.block_id == block_id:
                yield f"block {block_id} arrives and is taken for there"
        yield from self._cached.faults()
        yield from self.host.faults()

    def check_invariants(self) -> None:
        fault = next(self.faults(), "")
        assert not fault, fault

    # ---- inside

    def _take(self, copies: Copies | None) -> int:
        if self._surplus:
            block_id, entry = self._surplus.popitem(last=False)
            self._save(block_id, entry, copies)
        elif self._free:
            block_id, _ = self._free.popitem(last=False)
        else:
            block_id = self._cached.pop()
            self._save(block_id, self._clear(block_id), copies)
            self.totals.evictions += 1
        self._holds[block_id] = 1
        return block_id

    def _save(self, block_id: int, entry: Entry, copies: Copies | None) -> None:
        write = self.host.save(block_id, entry) if copies is not None else None
        if write is not None and copies is not None:
            copies.outs.append(write)

    def _hold(self, block_id: int) -> None:
        if block_id in self._cached:
            self._cached.remove(block_id)
            self._holds[block_id] = 1
        else:
            self._holds[block_id] += 1

    def _clear(self, block_id: int) -> Entry:
        entry = self._content.pop(block_id)
        entry.block_id = None
        return entry

    def _keep_quota(self, tenant: bytes) -> None:
        surplus = self._cached.over_quota(tenant)
        if surplus is not None:
            self._cached.remove(surplus)
            entry = self._clear(surplus)
            if self.host.num_slots:
                self._surplus[surplus] = entry
            else:
                self._free[surplus] = None
            self.totals.quota_evictions += 1

    def _can_be_found(self, entry: Entry, block_id: int) -> bool:
        if entry.block_id is None:
            return self._index.is_indexed(entry)
        return entry.block_id == block_id
