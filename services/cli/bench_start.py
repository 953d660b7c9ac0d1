"""`streetcar bench start`: from the command to when requests can be served, by phases, and the
worker's memory then.

The first start builds the native code and prepares the weights, in a cache directory of its own
that shares only the models; the others find both.

Shell: processes, a temporary directory, /proc.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from pathlib import Path
from typing import Any, Final

from services.cli.options import ClusterOptions
from services.cli.output import print_json
from services.cli.running import prepare
from services.runtime.cluster import BUS, Cluster
from services.runtime.settings import Settings
from services.runtime.supervisor import SupervisorEvent

WORKER: Final = "worker"
PHASES: Final = {
    "starting": "interpreter_and_imports",
    "preparing native kernels": "torch",
    "reading the weights": "native_code",
    "warming up": "weights",
}
"""What the worker says at the end of a phase; the last one ends when it is ready."""

MEMORY: Final = {"VmHWM": "peak_mb", "VmRSS": "steady_mb"}


def start(options: ClusterOptions | None = None, *, starts: int = 3, json: bool = False) -> int:
    """Start the whole cluster several times and say how long each start takes.

    Parameters
    ----------
    starts
        The first one finds neither native code nor prepared weights.
    json
        Print the result as one object.
    """
    age_s = _age_s()
    settings = prepare((options or ClusterOptions()).settings())
    result = asyncio.run(_measure(settings, starts, age_s))
    if json:
        print_json(result)
        return 0
    for number, run in enumerate(result["starts"]):
        phases = "  ".join(f"{name} {took:.2f}" for name, took in run["phases_s"].items())
        print(f"start {number + 1}: ready after {run['ready_s']:.2f} s  ({phases})")
        worker = "  ".join(f"{name} {value:,}" for name, value in run["worker"].items())
        print(f"         worker: {worker}")
    return 0


async def _measure(settings: Settings, starts: int, age_s: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="streetcar-start-") as folder:
        (settings.cache_path / "models").mkdir(parents=True, exist_ok=True)
        (Path(folder) / "models").symlink_to((settings.cache_path / "models").resolve())
        own = settings.replace("bench", cache_dir=folder, run_dir="", http_port=0, nats_port=0)
        runs = [await _one(own, age_s) for _ in range(starts)]
    return {
        "dtype": settings.dtype,
        "quantization": settings.quantization,
        "starts": runs,
    }


async def _one(settings: Settings, age_s: float) -> dict[str, Any]:
    """age_s: what the command took before it came to start anything; part of every start."""
    began = time.monotonic()
    marks: dict[str, float] = {}

    def observe(event: SupervisorEvent) -> None:
        said = event.text if event.kind == "progress" else f"is {event.kind}"
        name = f"{event.service} {said}"
        marks.setdefault(name, time.monotonic() - began)

    async with Cluster(settings, observe) as cluster:
        ready = time.monotonic() - began
        memory = _memory_of(cluster.pids[WORKER])
    prepared = sum(file.stat().st_size for file in settings.weights_path.glob("*"))
    memory["prepared_weights_mb"] = prepared // 1_000_000
    return {
        "ready_s": round(age_s + ready, 3),
        "phases_s": {"command": round(age_s, 3), **_phases(marks, ready)},
        "services_s": {
            event.removesuffix(" is ready"): round(age_s + at, 3)
            for event, at in marks.items()
            if event.endswith(" is ready")
        },
        "worker": memory,
    }


def _phases(marks: dict[str, float], ready: float) -> dict[str, float]:
    phases, before = {"bus": marks[f"{BUS} is ready"]}, marks[f"{WORKER} is starting"]
    for said, phase in PHASES.items():
        # A stub worker says less.
        at = marks.get(f"{WORKER} {said}", before)
        phases[phase], before = at - before, at
    worker_ready = marks[f"{WORKER} is ready"]
    phases["warm_up"], phases["until_served"] = worker_ready - before, ready - worker_ready
    return {name: round(took, 3) for name, took in phases.items()}


def _memory_of(pid: int) -> dict[str, int]:
    """Megabytes in use at most so far, and now; empty where there is no /proc."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return {}
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    return {
        name: int(fields[field].split()[0]) * 1024 // 1_000_000 for field, name in MEMORY.items()
    }


def _age_s() -> float:
    """How long this process has lived; 0 where there is no /proc."""
    try:
        stat = Path("/proc/self/stat").read_text()
    except OSError:
        return 0.0
    # Fields are counted after the name, which may hold anything; the 20th is the start, in ticks.
    ticks = int(stat.rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
