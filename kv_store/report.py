"""The books of an engine, for people: counts, the largest tenants, and a proof on demand.

A tenant is named by a short hash of its salt: the salt itself is a secret between tenant and
cache.

Pure.
"""

from __future__ import annotations

from collections import Counter
from hashlib import blake2b
from heapq import nlargest
from typing import Final

from services.contracts.kv import KvCheck, KvReport, TenantReport
from services.contracts.limits import MAX_ERROR_CHARS

from .ledger import Ledger

TENANT_HASH_BYTES: Final = 6
SHARED: Final = "shared"


def tenant_name(salt: bytes) -> str:
    """12 hexadecimal digits for `salt`; "shared" for the namespace without one."""
    if not salt:
        return SHARED
    return blake2b(salt, digest_size=TENANT_HASH_BYTES, person=b"streetcar-tenant").hexdigest()


def report(engine: str, ledger: Ledger, max_tenants: int) -> KvReport:
    pool, host, totals = ledger.pool, ledger.pool.host, ledger.pool.totals
    return KvReport(
        engine=engine,
        known=True,
        generation=ledger.generation,
        epoch=ledger.epoch,
        need_snapshot=ledger.need_snapshot,
        block_size=pool.block_size,
        num_blocks=pool.num_blocks - 1,
        num_free=pool.num_free,
        num_leased=pool.num_leased,
        num_cached=pool.num_cached,
        num_host_blocks=host.num_slots,
        num_host_free=host.num_free,
        num_host_cached=host.num_cached,
        num_host_writing=host.num_writing,
        num_lookups=totals.lookups,
        num_query_blocks=totals.query_blocks,
        num_hit_blocks=totals.hit_blocks,
        num_host_hit_blocks=totals.host_hit_blocks,
        num_evictions=totals.evictions,
        num_quota_evictions=totals.quota_evictions,
        num_host_evictions=host.num_evicted,
        num_copies_out=totals.copies_out,
        num_copies_in=totals.copies_in,
        tenant_quota=pool.tenant_quota,
        host_tenant_quota=host.quota,
        num_tenants=len(pool.tenant_counts.keys() | host.tenant_counts.keys()),
        tenants=_tenants(ledger, max_tenants),
    )


def _tenants(ledger: Ledger, count: int) -> list[TenantReport]:
    cached = Counter(ledger.pool.tenant_counts)
    in_host = Counter(ledger.pool.host.tenant_counts)
    largest = nlargest(count, (cached + in_host).items(), key=lambda entry: (entry[1], entry[0]))
    return [TenantReport(tenant_name(salt), cached[salt], in_host[salt]) for salt, _ in largest]


def check(engine: str, ledger: Ledger) -> KvCheck:
    """O(blocks): the ledger answers nobody else meanwhile."""
    pool = ledger.pool
    return KvCheck(
        engine=engine,
        known=True,
        fault=next(pool.faults(), "")[:MAX_ERROR_CHARS],
        num_blocks=pool.num_blocks - 1,
        num_free=pool.num_free,
        num_leased=pool.num_leased,
        num_cached=pool.num_cached,
        num_holds=pool.num_holds,
        num_entries=pool.num_entries,
        num_host_blocks=pool.host.num_slots,
        num_open_requests=len(ledger.granted),
        num_unconfirmed_copies=sum(len(copies) for copies in ledger.copies.values()),
    )
