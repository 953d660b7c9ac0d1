"""The books for people: counts that add up, tenants without their salts, faults in words."""

from __future__ import annotations

from kv_store.core import Asked, KvCore
from kv_store.report import tenant_name
from services.contracts.kv import KvCheck, KvCheckRequest, KvReport, KvReportRequest
from tests.unit.kv_store.messages import ENGINE, Peer, commits, ids


def _peer() -> Peer:
    """Two tenants with a cached block each, one block leased."""
    peer = Peer(KvCore("kv-0", 0.5))
    peer.snapshot(host_blocks=4)
    for salt in (b"", b"secret"):
        blocks = ids(peer.lease(1).block_ids)
        peer.delta(content=commits(blocks, [1, 2, 3, 4], salt), released=blocks)
    peer.lease(1)
    return peer


def _report(core: KvCore, engine: str = ENGINE, max_tenants: int = 10) -> KvReport:
    (reply,) = core.handle(Asked(KvReportRequest(engine, max_tenants, core.service_id), "inbox"), 0)
    assert isinstance(reply.message, KvReport)
    return reply.message


def _check(core: KvCore, engine: str = ENGINE) -> KvCheck:
    (reply,) = core.handle(Asked(KvCheckRequest(engine, core.service_id), "inbox"), 0)
    assert isinstance(reply.message, KvCheck)
    return reply.message


def test_a_report_adds_up_and_names_tenants_by_a_hash() -> None:
    peer = _peer()
    peer.lookup([1, 2, 3, 4])
    report = _report(peer.core)
    assert report.num_free + report.num_leased + report.num_cached == report.num_blocks == 8
    assert (report.num_leased, report.num_cached, report.tenant_quota) == (2, 1, 4)
    assert (report.num_lookups, report.num_query_blocks, report.num_hit_blocks) == (1, 1, 1)
    assert (report.num_host_blocks, report.num_host_free) == (4, 4)
    assert [tenant.tenant for tenant in report.tenants] == [tenant_name(b"secret")]
    assert len(tenant_name(b"secret")) == 12 and tenant_name(b"") == "shared"


def test_only_the_largest_tenants_are_named() -> None:
    report = _report(_peer().core, max_tenants=1)
    assert len(report.tenants) == 1 and report.num_tenants == 2


def test_an_engine_that_is_not_known_is_told() -> None:
    core = KvCore("kv-0")
    assert not _report(core, "engine-9").known and not _check(core, "engine-9").known


def test_a_check_is_sound_or_says_what_is_broken() -> None:
    peer = _peer()
    check = _check(peer.core)
    assert (check.known, check.fault, check.num_holds) == (True, "", 1)
    peer.core.ledgers[ENGINE].pool._free.popitem()
    assert "a block is lost" in _check(peer.core).fault
