"""`streetcar kv`: the ledger's books (pools, tiers, tenants, hit rates), and their proof on demand.

Shell: asks the ledger over the bus; every number is its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Final, TypeVar

import msgspec
from cyclopts import App, Parameter

from services.cli.output import print_json
from services.cli.ps import listen
from services.cli.running_file import find_cluster
from services.runtime.bus_url import without_password
from services.runtime.problem import Problem
from services.runtime.settings import load

if TYPE_CHECKING:
    from nats.aio.client import Client

    from services.contracts.beats import Beat
    from services.contracts.codec import Message
    from services.contracts.kv import KvCheck, KvReport

app = App(name="kv", help="KV blocks: pools, tiers, tenants, hit rates; `kv check` proves them.")

ASK_TIMEOUT_S: Final = 5.0
"""A check of millions of blocks takes the ledger a few seconds."""

BROKEN: Final = 3

_Bus = Annotated[str | None, Parameter(name="--nats", help="bus of the cluster")]
_Engine = Annotated[str | None, Parameter(help="only this engine's pool")]

T = TypeVar("T")


@app.default
def show(*, nats_url: _Bus = None, engine: _Engine = None, json: bool = False) -> int:
    """Show every pool: blocks by state and tier, hit rates, evictions, the largest tenants.

    Parameters
    ----------
    json
        Print one object per pool.
    """
    for report in asyncio.run(_reports(*_where(nats_url), engine)):
        if json:
            print_json(
                {
                    **msgspec.structs.asdict(report),
                    "tenants": [msgspec.structs.asdict(tenant) for tenant in report.tenants],
                    "hit_rate": hit_rate(report),
                }
            )
        else:
            print("\n".join(lines(report)))
    return 0


@app.command
def check(*, nats_url: _Bus = None, engine: _Engine = None, json: bool = False) -> int:
    """Let the ledger prove its books; status 3 where an invariant is broken.

    Parameters
    ----------
    json
        Print one object per pool.
    """
    checks = asyncio.run(_checks(*_where(nats_url), engine))
    for proof in checks:
        if json:
            print_json(msgspec.structs.asdict(proof))
            continue
        print(
            f"{proof.engine}: {proof.fault or 'sound'}  "
            f"{proof.num_free} free + {proof.num_leased} leased + {proof.num_cached} cached = "
            f"{proof.num_blocks}, {proof.num_holds} holds, {proof.num_entries} entries, "
            f"{proof.num_unconfirmed_copies} copies under way"
        )
    return BROKEN if any(proof.fault for proof in checks) else 0


def hit_rate(report: KvReport) -> float:
    """Part of the blocks asked for that were found, in either tier; 0 where none was asked for."""
    asked = report.num_query_blocks
    return round(report.num_hit_blocks / asked, 4) if asked else 0.0


def lines(report: KvReport) -> list[str]:
    """The report for a person."""
    state = "  waits for a snapshot" if report.need_snapshot else ""
    text = [
        (
            f"{report.engine}  generation {report.generation} epoch {report.epoch}  "
            f"blocks of {report.block_size} tokens{state}"
        ),
        (
            f"  pool     {report.num_blocks:>9} blocks  {report.num_free} free  "
            f"{report.num_leased} leased  {report.num_cached} cached"
        ),
    ]
    if report.num_host_blocks:
        text.append(
            f"  host     {report.num_host_blocks:>9} blocks  {report.num_host_free} free  "
            f"{report.num_host_cached} cached  {report.num_host_writing} being written"
        )
    text += [
        (
            f"  lookups  {report.num_lookups:>9}         {hit_rate(report):.1%} of "
            f"{report.num_query_blocks} blocks hit, {report.num_host_hit_blocks} of them in host"
        ),
        (
            f"  evicted  {report.num_evictions:>9} blocks  {report.num_quota_evictions} by quota  "
            f"{report.num_host_evictions} from host memory  {report.num_copies_out} copied out  "
            f"{report.num_copies_in} copied in"
        ),
        f"  tenants  {report.num_tenants:>9}         quota {report.tenant_quota} blocks"
        + (f", {report.host_tenant_quota} in host memory" if report.num_host_blocks else ""),
    ]
    text += [
        f"    {tenant.tenant:<12} {tenant.num_cached:>5} cached  {tenant.num_host_cached} in host"
        for tenant in report.tenants
    ]
    return text


# ---- asking


def _where(nats_url: str | None) -> tuple[str, str]:
    settings = load(flags={} if nats_url is None else {"nats_url": nats_url})
    return find_cluster(settings).watch_url, settings.subject_prefix


async def _engines(url: str, prefix: str, engine: str | None) -> dict[str, str]:
    """Engines, and the ledger that has each one's books."""
    found = ledgers_of(await listen(url, prefix))
    if not found:
        cause = f"no heartbeat with one on {without_password(url)}"
        raise Problem("E203", "No ledger has a pool", cause=cause)
    if engine is None:
        return found
    if engine not in found:
        raise Problem("E203", "No such engine", cause=f"no ledger has a pool of {engine!r}")
    return {engine: found[engine]}


def ledgers_of(beats: Iterable[Beat]) -> dict[str, str]:
    """By engine, in order: of ledgers that both say they have its books, the one that does."""
    pools = [(pool, beat.service_id) for beat in beats for pool in beat.pools]
    pools.sort(key=lambda entry: (entry[0].generation, entry[0].epoch, entry[0].binding))
    found = {pool.engine: ledger for pool, ledger in pools}
    return dict(sorted(found.items()))


async def _reports(url: str, prefix: str, engine: str | None) -> list[KvReport]:
    from services.cli.bus import connect
    from services.contracts.kv import KvReport, KvReportRequest
    from services.contracts.subjects import Subjects

    names = Subjects(prefix)
    engines = await _engines(url, prefix, engine)
    async with connect(url) as client:
        return [
            _known(await _ask(client, names.kv_report(name), question, KvReport))
            for name, ledger in engines.items()
            for question in (KvReportRequest(name, ledger=ledger),)
        ]


async def _checks(url: str, prefix: str, engine: str | None) -> list[KvCheck]:
    from services.cli.bus import connect
    from services.contracts.kv import KvCheck, KvCheckRequest
    from services.contracts.subjects import Subjects

    names = Subjects(prefix)
    engines = await _engines(url, prefix, engine)
    async with connect(url) as client:
        return [
            _known(await _ask(client, names.kv_check(name), KvCheckRequest(name, ledger), KvCheck))
            for name, ledger in engines.items()
        ]


async def _ask(client: Client, subject: str, question: Message, kind: type[T]) -> T:
    import nats.errors

    from services.contracts.codec import Decoder, encode
    from services.contracts.errors import WireError

    try:
        answer = await client.request(subject, encode(question), timeout=ASK_TIMEOUT_S)
        return Decoder(kind).decode(answer.data)
    except (nats.errors.TimeoutError, nats.errors.NoRespondersError) as error:
        raise Problem("E203", "Ledger does not answer", cause=str(error) or subject) from None
    except WireError as error:
        raise Problem("E203", "Ledger speaks another version", cause=str(error)) from None


_Answer = TypeVar("_Answer", "KvReport", "KvCheck")


def _known(answer: _Answer) -> _Answer:
    if not answer.known:
        raise Problem(
            "E203", "No such engine", cause=f"the ledger has no pool of {answer.engine!r}"
        )
    return answer
