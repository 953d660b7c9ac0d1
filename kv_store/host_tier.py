"""Host memory below the pool: slots that keep what was evicted, and give it back on a hit.

    FREE ─reserve─▶ WRITING ─┬─ step confirmed ─▶ CACHED ─┬─ hit ─▶ pinned ─ confirmed ─▶ CACHED
     ▲                       └─ dropped ─▶ FREE           └─ needed for newer content ─▶ FREE

free + writing + cached = num_slots. A slot that is being written holds nothing yet; a slot that a
copy reads is pinned, once for each request that names it, and is not given away before.

Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from .content import Arrival, Entry, WriteBack
from .eviction import FairLru, quota_of


class HostTier:
    """`num_slots` 0: there is no host memory."""

    def __init__(self, num_slots: int, tenant_share: float) -> None:
        self.num_slots = num_slots
        self.num_evicted = 0
        self._free = list(range(num_slots - 1, -1, -1))
        self._lru = FairLru(quota_of(tenant_share, num_slots))
        self._content: dict[int, Entry] = {}
        self._writing: dict[int, Entry] = {}
        self._pins: Counter[int] = Counter()

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_writing(self) -> int:
        return len(self._writing)

    @property
    def num_cached(self) -> int:
        return len(self._content)

    @property
    def quota(self) -> int:
        return self._lru.quota

    @property
    def tenant_counts(self) -> dict[bytes, int]:
        """Cached slots by tenant, those being read apart."""
        return self._lru.counts

    # ---- in: an evicted block is written back

    def save(self, block_id: int, entry: Entry) -> WriteBack | None:
        """A slot for `entry`, which `block_id` held; None where none can be had, or none is
        needed.
        """
        if entry.host_slot is not None:
            self._touch(entry.host_slot)
            return None
        if not self._free:
            if not len(self._lru):
                return None
            self._evict(self._lru.pop())
        slot = self._free.pop()
        self._writing[slot] = entry
        return WriteBack(block_id, slot, entry)

    def confirm_write(self, write: WriteBack) -> None:
        """The copy has run: its content is found from now on."""
        slot, entry = write.host_slot, self._writing.pop(write.host_slot)
        if entry.host_slot is not None or entry.is_forgotten:
            # Evicted twice before the first copy was confirmed: one slot is enough.
            self._free.append(slot)
            return
        entry.host_slot = slot
        self._content[slot] = entry
        self._lru.add(slot, entry.salt)
        self._keep_quota(entry.salt)

    def drop_write(self, write: WriteBack) -> None:
        del self._writing[write.host_slot]
        self._free.append(write.host_slot)

    # ---- out: a hit brings content in

    def pin(self, slot: int) -> None:
        if slot not in self._pins:
            self._lru.remove(slot)
        self._pins[slot] += 1

    def unpin(self, arrival: Arrival) -> None:
        slot = arrival.host_slot
        self._pins[slot] -= 1
        if not self._pins[slot]:
            del self._pins[slot]
            entry = self._content[slot]
            if entry.is_forgotten:
                self._release(slot)
                return
            self._lru.add(slot, entry.salt)
            self._keep_quota(entry.salt)

    # ---- what may be broken

    def forget(self, entry: Entry) -> None:
        """Its slot is free: at once, or once the copies that read it are through."""
        slot = entry.host_slot
        if slot is not None and slot not in self._pins:
            self._lru.remove(slot)
            self._release(slot)

    # ---- inside

    def _touch(self, slot: int) -> None:
        if slot not in self._pins:
            self._lru.remove(slot)
            self._lru.add(slot, self._content[slot].salt)

    def _keep_quota(self, tenant: bytes) -> None:
        surplus = self._lru.over_quota(tenant)
        if surplus is not None:
            self._lru.remove(surplus)
            self._evict(surplus)

    def _evict(self, slot: int) -> None:
        self._release(slot)
        self.num_evicted += 1

    def _release(self, slot: int) -> None:
        self._content.pop(slot).host_slot = None
        self._free.append(slot)

    def faults(self) -> Iterator[str]:
        """Broken invariants, in words."""
        slots = [*self._free, *self._writing, *self._content]
        if sorted(slots) != list(range(self.num_slots)):
            yield "a host slot is lost, or is in two states"
        if set(self._lru) | self._pins.keys() != self._content.keys():
            yield "a cached host slot can be neither evicted nor unpinned"
        if any(slot in self._lru for slot in self._pins):
            yield "a pinned host slot can be evicted"
        for slot, entry in self._content.items():
            if entry.host_slot != slot:
                yield f"host slot {slot} cannot be found"
        yield from self._lru.faults()
