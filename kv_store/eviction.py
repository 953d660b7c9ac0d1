"""Which cached block gives way: the least recently used one of the tenant that has most.

Shares are equal, so the tenant with most is the one furthest above its share; one that is below the
average keeps what it has for as long as another is above: a flood evicts itself. With one tenant
this is plain LRU. Of equal shares the one that has been as large for longest gives way, so that
nobody keeps a share for ever; a flood takes one block of it at most. Every operation is O(1):
tenants are filed by how many ids they have, and counts move by one.

Pure.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator


class FairLru:
    """Ids (blocks or host slots), each a tenant's, from least to most recently used.

    quota: ids that one tenant may have; `add` does not enforce it, `over_quota` tells.
    """

    def __init__(self, quota: int) -> None:
        self.quota = quota
        self._tenant_of: dict[int, bytes] = {}
        self._by_tenant: dict[bytes, OrderedDict[int, None]] = {}
        self._by_count: dict[int, OrderedDict[bytes, None]] = {}
        self._largest = 0

    def __len__(self) -> int:
        return len(self._tenant_of)

    def __contains__(self, item: int) -> bool:
        return item in self._tenant_of

    def __iter__(self) -> Iterator[int]:
        return iter(self._tenant_of)

    @property
    def counts(self) -> dict[bytes, int]:
        """Ids by tenant; a copy."""
        return {tenant: len(ids) for tenant, ids in self._by_tenant.items()}

    def add(self, item: int, tenant: bytes) -> None:
        """`item` is the most recently used of `tenant`."""
        assert item not in self._tenant_of, f"{item} is cached twice"
        self._tenant_of[item] = tenant
        ids = self._by_tenant.setdefault(tenant, OrderedDict())
        ids[item] = None
        self._refile(tenant, len(ids) - 1, len(ids))

    def remove(self, item: int) -> None:
        tenant = self._tenant_of.pop(item)
        ids = self._by_tenant[tenant]
        del ids[item]
        self._refile(tenant, len(ids) + 1, len(ids))
        if not ids:
            del self._by_tenant[tenant]

    def pop(self) -> int:
        """The next to give way, removed. Raises KeyError where there is none."""
        tenant = next(iter(self._by_count[self._largest]))
        item = next(iter(self._by_tenant[tenant]))
        self.remove(item)
        return item

    def over_quota(self, tenant: bytes) -> int | None:
        """The least recently used id of `tenant`, where it has more than the quota."""
        ids = self._by_tenant.get(tenant, ())
        return next(iter(ids)) if len(ids) > self.quota else None

    def _refile(self, tenant: bytes, before: int, after: int) -> None:
        if before:
            tenants = self._by_count[before]
            del tenants[tenant]
            if not tenants:
                del self._by_count[before]
        if after:
            self._by_count.setdefault(after, OrderedDict())[tenant] = None
        if after > self._largest:
            self._largest = after
        elif self._largest not in self._by_count:
            # Counts move by one: the largest was `before`, and its tenant is now at `after`.
            self._largest = after

    def faults(self) -> Iterator[str]:
        """Broken invariants, in words."""
        if sum(len(ids) for ids in self._by_tenant.values()) != len(self._tenant_of):
            yield "the tenants' cached blocks do not add up"
        if max(self.counts.values(), default=0) != self._largest:
            yield "the largest tenant is not known"
        for count, tenants in self._by_count.items():
            if any(len(self._by_tenant[tenant]) != count for tenant in tenants):
                yield f"a tenant is filed under {count} blocks and has another number"


def quota_of(share: float, num_blocks: int) -> int:
    """Blocks that one tenant may have cached: at least one, so that a share cannot turn caching
    off by rounding. `share` in [0, 1]; 0 keeps nothing.
    """
    return max(1, int(share * num_blocks)) if share else 0
