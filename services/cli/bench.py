"""`streetcar bench`: what the mesh costs, its scheduler alone, kernels, or servers side by side.

Shell: prints.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Final

from cyclopts import App

from services.cli.output import ClusterReporter, print_json

if TYPE_CHECKING:
    from services.runtime.cluster import Cluster

app = App(
    name="bench",
    help="Measure the mesh, its scheduler, the kernels, or servers side by side.",
)
app.command("services.cli.bench_serve:serve", name="serve")
app.command("services.cli.bench_kernels:kernels", name="kernels")
app.command("services.cli.bench_start:start", name="start")

INTERRUPTED: Final = 130


@app.command
def mesh(
    *,
    lanes: int = 256,
    step_ms: float = 5.0,
    seconds: float = 10.0,
    trace_ratio: float = 1.0,
    stop_ledger: float = 0.0,
    json: bool = False,
) -> int:
    """Fill every lane of a stub worker and measure the steps.

    Parameters
    ----------
    lanes
        Sequences that decode at once.
    step_ms
        How long the stub worker takes for a step.
    seconds
        How long to measure, after a second of warm-up.
    trace_ratio
        Share of the lanes whose trace is recorded.
    stop_ledger
        Stop the kv_store for so many seconds in the middle (SIGSTOP), and compare the steps before,
        meanwhile and after.
    json
        Print the result as one object.
    """
    from services.cli.bench_mesh import bench_settings, measure
    from services.cli.ledger_stop import LedgerStop
    from services.cli.running import prepare, run_cluster
    from services.runtime.cluster import Cluster
    from services.runtime.loop import run_loop

    settings = prepare(bench_settings(lanes, step_ms, seconds + stop_ledger))
    settings = settings.replace("bench", trace_ratio=trace_ratio)
    stop = LedgerStop(stop_ledger, lanes) if stop_ledger else None

    async def work(cluster: Cluster) -> dict[str, Any]:
        return await measure(cluster, settings, seconds, stop)

    async def run() -> dict[str, Any] | None:
        return await run_cluster(Cluster(settings, ClusterReporter(quiet=json)), work)

    result = run_loop(run())
    if result is None:
        return INTERRUPTED
    if json:
        print_json(result)
        return 0
    for name, value in result.items():
        print(f"{name:<24} {value}")
    return 0


@app.command
def scheduler(
    lanes: int = 256, steps: int = 2000, *, traced: bool = False, json: bool = False
) -> int:
    """What a steady decode step costs the scheduler alone, without bus and model.

    Parameters
    ----------
    lanes
        Sequences that decode, in random phases of their blocks of 16.
    steps
        How many steps to measure.
    traced
        Every sequence is part of a trace that is recorded.
    json
        Print the result as one object.
    """
    from services.simulator.steady import measure

    figures = dataclasses.asdict(measure(lanes, steps, traced=traced))
    if json:
        print_json(figures)
        return 0
    for name, value in figures.items():
        print(f"{name:<26} {value}")
    return 0
