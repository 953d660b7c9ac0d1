"""One seed after the other: the options first, and for what breaks, all that it takes to see it
again.

Shell: asks git for the version, where there is one.
"""

from __future__ import annotations

import subprocess
import traceback
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from .world import FAILURES, Report, World

_ROOT: Final = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Outcome:
    """`failure`: what broke, and how to see it again; "" where everything held."""

    seed: int
    options: str
    report: Report | None
    failure: str


def options_of(seed: int) -> str:
    """What the run is, before it is run."""
    return str(World(seed).options)


def run_seed(seed: int) -> Outcome:
    world = World(seed)
    try:
        report = world.run()
    except FAILURES as error:
        return Outcome(seed, str(world.options), None, failure_text(world, error))
    return Outcome(seed, str(world.options), report, "")


def failure_text(world: World, error: BaseException) -> str:
    """Seed, version, options, the fault itself and the command that replays it."""
    trace = "".join(traceback.format_exception(error))
    return (
        f"seed {world.seed}, version {version()}\n{world.options}\n"
        f"faults until then: {dict(world.nemesis.happened)}\n{trace}"
        f"{type(error).__name__}: {error}\n"
        f"replay: python -m services.simulator {world.seed}"
    )


def version() -> str:
    """The commit that runs, or "unknown"."""
    command = ["git", "-C", str(_ROOT), "rev-parse", "--short", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return done.stdout.strip() or "unknown"


def summary(report: Report) -> str:
    """What happened, line by line, for a person."""

    def line(name: str, counts: Counter[str]) -> str:
        return f"  {name}: " + ", ".join(f"{key} {n}" for key, n in sorted(counts.items()))

    what = (
        f"{report.requests} requests, {report.steps} steps, {report.events} events, "
        f"{report.checked} checks; faults over at {report.healed_ms} ms, "
        f"at rest at {report.virtual_ms} ms"
    )
    lines = (
        line("ended", report.finished),
        line("failed", report.errors),
        line("started", report.starts),
        line("faults", report.faults),
        line("reached", report.reached),
    )
    return "\n".join((what, *lines))
