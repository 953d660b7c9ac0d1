"""`streetcar bench serve`: what users of an OpenAI-compatible server get, ours or another.

Invariant: in each turn every server gets the same requests, drawn from a seed that no other turn
has; servers take turns, in alternating order; figures are medians over turns, ratios are medians
over pairs.

Shell: processes, HTTP, the terminal.
"""

from __future__ import annotations

import asyncio
import json as jsonlib
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from services.cli.options import ClusterOptions
from services.cli.output import ClusterReporter, print_json
from services.runtime.problem import Problem

if TYPE_CHECKING:
    from aiohttp import ClientSession

    from services.cli.serving.figures import Slo
    from services.cli.serving.target import Target
    from services.cli.serving.turn import Load
    from services.runtime.cluster import Cluster

INTERRUPTED: Final = 130
DEFAULT_USERS: Final = (1, 32)
OWN: Final = "streetcar"
MAX_REQUESTS: Final = 100_000


def serve(
    options: ClusterOptions | None = None,
    *,
    url: tuple[str, ...] = (),
    users: tuple[int, ...] = (),
    rate: tuple[float, ...] = (),
    requests: int = 96,
    turns: int = 1,
    seed: int = 7,
    extra: tuple[str, ...] = (),
    slo_ttft_ms: float = 0.0,
    slo_tpot_ms: float = 0.0,
    json: bool = False,
) -> int:
    """Load servers with the same requests in turn and compare what their users see.

    Without --url a cluster of our own is started, and stopped at the end.

    Parameters
    ----------
    url
        A server, as URL or NAME=URL; give several to compare them. The first is what ratios are of.
    users
        Closed loop: that many requests at any time [default: 1 and 32]; give several for a sweep.
    rate
        Open loop: arrivals per second, Poisson; give several for a sweep.
    requests
        How many requests a turn has.
    turns
        How often each server is measured under each load.
    seed
        Of the first turn; each turn takes the next.
    extra
        JSON object that goes into every request body, or NAME=JSON for one server.
    slo_ttft_ms
        Goodput counts answers whose first text came within this (0: any).
    slo_tpot_ms
        Goodput counts answers whose time per output token stayed within this (0: any).
    json
        Print the result as one object.
    """
    from services.cli.serving.figures import Slo
    from services.cli.serving.turn import Load

    _check(requests, turns, users, rate)
    closed = users or (() if rate else DEFAULT_USERS)
    loads = [Load(users=count) for count in closed] + [Load(rate=per_s) for per_s in rate]
    plan = _Plan(loads, requests, turns, seed, Slo(slo_ttft_ms, slo_tpot_ms))
    targets = [_target(text, extra) for text in url]

    async def run() -> dict[str, Any] | None:
        if targets:
            return await _measure(targets, plan)
        return await _measure_own(options or ClusterOptions(), plan, extra, quiet=json)

    result = asyncio.run(run())
    if result is None:
        return INTERRUPTED
    if json:
        print_json(result)
    else:
        _print_table(result)
    return 1 if any(row["failed"] for row in result["results"]) else 0


@dataclass(frozen=True, slots=True)
class _Plan:
    """What is measured, apart from whom."""

    loads: list[Load]
    requests: int
    turns: int
    seed: int
    slo: Slo


def _check(requests: int, turns: int, users: tuple[int, ...], rate: tuple[float, ...]) -> None:
    bad = [
        (not 1 <= requests <= MAX_REQUESTS, f"--requests {requests}", f"1 to {MAX_REQUESTS}"),
        (turns < 1, f"--turns {turns}", "at least 1"),
        (any(count < 1 for count in users), f"--users {min(users, default=0)}", "at least 1"),
        (any(not per_s > 0 for per_s in rate), f"--rate {min(rate, default=0):g}", "above 0"),
    ]
    for wrong, given, wanted in bad:
        if wrong:
            raise Problem("E409", "A value is out of range", cause=given, fix=f"give {wanted}")


def _target(text: str, extra: tuple[str, ...]) -> Target:
    """NAME=URL or URL."""
    from services.cli.serving.target import Target

    name, separator, url = text.partition("=")
    if not separator or name.startswith(("http://", "https://")):
        name, url = text.partition("//")[2] or text, text
    return Target(name=name, url=url.rstrip("/").removesuffix("/v1"), extra=_extra(name, extra))


def _extra(name: str, given: tuple[str, ...]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for text in given:
        whose, separator, body = text.partition("=")
        if text.lstrip().startswith("{"):
            whose, separator, body = name, "=", text
        if not separator or whose != name:
            continue
        try:
            value = jsonlib.loads(body)
        except ValueError as error:
            raise Problem("E409", "A value is out of range", cause=f"--extra: {error}") from error
        if not isinstance(value, dict):
            raise Problem("E409", "A value is out of range", cause="--extra is no JSON object")
        merged |= value
    return merged


async def _measure_own(
    options: ClusterOptions, plan: _Plan, extra: tuple[str, ...], *, quiet: bool
) -> dict[str, Any] | None:
    from services.cli.running import prepare, run_cluster
    from services.runtime.cluster import Cluster

    settings = prepare(options.settings())

    async def work(cluster: Cluster) -> dict[str, Any]:
        return await _measure([_target(f"{OWN}={cluster.http_url}", extra)], plan)

    return await run_cluster(Cluster(settings, ClusterReporter(quiet=quiet)), work)


async def _measure(targets: list[Target], plan: _Plan) -> dict[str, Any]:
    """Every load: turn by turn, all servers in each, the order reversed in every other turn."""
    import dataclasses

    from services.cli.serving.target import first_model, http_session

    rows: list[dict[str, Any]] = []
    async with http_session() as session:
        ready = [
            dataclasses.replace(
                target, model=target.extra.get("model") or await first_model(session, target.url)
            )
            for target in targets
        ]
        for load in plan.loads:
            rows.extend(await _measure_load(session, ready, load, plan))
    return {
        "workload": {"requests": plan.requests, "turns": plan.turns, "seed": plan.seed},
        "results": rows,
    }


async def _measure_load(
    session: ClientSession, targets: list[Target], load: Load, plan: _Plan
) -> list[dict[str, Any]]:
    from services.cli.serving.figures import figures, medians, ratios
    from services.cli.serving.turn import run_turn
    from services.cli.serving.workload import jobs

    turns: dict[str, list[dict[str, Any]]] = {target.name: [] for target in targets}
    for turn in range(plan.turns):
        seed = plan.seed + turn
        todo = jobs(plan.requests, seed)
        for target in targets if turn % 2 == 0 else reversed(targets):
            progress = _Progress(f"{target.name}, {load}, turn {turn + 1}", plan.requests)
            answers, seconds = await run_turn(session, target, load, todo, seed, progress.update)
            turns[target.name].append(figures(answers, seconds, plan.slo))
            progress.end()
    base = turns[targets[0].name]
    return [
        {
            "target": target.name,
            "model": target.model,
            "load": str(load),
            **medians(turns[target.name]),
            "ratio": ratios(turns[target.name], base) if len(targets) > 1 else None,
            "turns": turns[target.name],
        }
        for target in targets
    ]


class _Progress:
    """How many answers have come, on a terminal's standard error."""

    def __init__(self, label: str, total: int) -> None:
        self._label = label
        self._total = total
        self._terminal = sys.stderr.isatty()

    def update(self, done: int) -> None:
        if self._terminal:
            sys.stderr.write(f"\r\x1b[2K  {self._label}: {done} of {self._total}")
            sys.stderr.flush()

    def end(self) -> None:
        clear = "\r\x1b[2K" if self._terminal else ""
        sys.stderr.write(f"{clear}  {self._label}: done\n")
        sys.stderr.flush()


def _print_table(result: dict[str, Any]) -> None:
    head = ("load", "server", "tok/s", "req/s", "goodput", "TTFT p50", "p99", "TPOT p50")
    print("{:<16}{:<22}{:>8}{:>8}{:>9}{:>10}{:>9}{:>10}".format(*head), end="")
    print(f"{'ITL p50':>9}{'p99':>9}{'failed':>8}")
    for row in result["results"]:
        ttft, tpot, itl = row["ttft_ms"], row["tpot_ms"], row["itl_ms"]
        print(
            f"{row['load']:<16}{row['target'][:21]:<22}{row['output_tokens_per_s']:>8.1f}"
            f"{row['requests_per_s']:>8.2f}{row['goodput_per_s']:>9.2f}{ttft['p50']:>10.1f}"
            f"{ttft['p99']:>9.1f}{tpot['p50']:>10.2f}{itl['p50']:>9.2f}{itl['p99']:>9.2f}"
            f"{sum(row['failed'].values()):>8}"
        )
    for row in result["results"]:
        if row["ratio"]:
            pairs = "  ".join(f"{name} {value:.2f}" for name, value in row["ratio"].items())
            print(
                f"  {row['load']}, {row['target']} over {result['results'][0]['target']}: {pairs}"
            )
    print("latencies in ms; medians over turns")
