"""`streetcar up`: the whole cluster in the foreground.

Shell: starts and stops processes.
"""

from __future__ import annotations

import asyncio
import json as jsonlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from services.cli.options import ClusterOptions
from services.cli.output import ClusterReporter, print_json, print_problem
from services.runtime.private_file import write_private
from services.runtime.problem import Problem


def up(options: ClusterOptions | None = None, *, json: bool = False) -> int:
    """Start the bus and all services; Ctrl-C stops them.

    Parameters
    ----------
    json
        Print one line of JSON once ready: nats_url, http_url, pids by service.
    """
    from services.cli.running import prepare, restart_signals, run_cluster
    from services.cli.running_file import (
        RunningCluster,
        forget,
        remember,
        restart_failure,
        restart_order,
    )
    from services.runtime.bus_url import without_password
    from services.runtime.cluster import Cluster

    settings = prepare((options or ClusterOptions()).settings())

    def announce(cluster: Cluster) -> None:
        remember(
            settings,
            RunningCluster(
                cluster.nats_url,
                cluster.http_url,
                settings.served_name,
                os.getpid(),
                cluster.observer_url,
            ),
        )
        if json:
            print_json(
                {
                    "nats_url": cluster.nats_url,
                    "http_url": cluster.http_url,
                    "pids": cluster.pids,
                }
            )
            return
        print(f"\n  ready    {cluster.http_url}/v1    {without_password(cluster.nats_url)}")
        print('  try      streetcar chat "hello"   |   streetcar ps')
        print("  stop     Ctrl-C", flush=True)

    async def serve(cluster: Cluster) -> None:
        announce(cluster)
        async with restart_signals() as asked:
            while True:
                await asked.wait()
                asked.clear()
                order = restart_order(settings, os.getpid())
                try:
                    await cluster.restart(_ordered(order, cluster.services))
                except Problem as problem:
                    print_problem(problem, as_json=False)
                    write_private(restart_failure(settings, os.getpid()), _as_json(problem))
                order.unlink(missing_ok=True)

    async def run() -> None:
        await run_cluster(Cluster(settings, ClusterReporter()), serve)

    try:
        asyncio.run(run())
    finally:
        forget(settings, os.getpid())
    if not json:
        print("stopped", file=sys.stderr)
    return 0


def _as_json(problem: Problem) -> str:
    return jsonlib.dumps(
        {"code": problem.code, "title": problem.title, "cause": problem.cause, "fix": problem.fix}
    )


def _ordered(order: Path, known: Sequence[str]) -> list[str]:
    """Services that the order names, of those that there are; all without one."""
    try:
        named = jsonlib.loads(order.read_bytes())
    except (OSError, ValueError):
        named = []
    return [name for name in known if name in named] if named else list(known)
