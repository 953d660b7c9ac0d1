"""`python -m services.simulator.long [STEPS [FIRST_SEED]]`: histories from FIRST_SEED on, on two
processes, until so many steps have run; says at its end which seed comes next, to go on from there.

Shell: processes, prints.
"""

from __future__ import annotations

import multiprocessing
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from typing import Final

from .replay import Outcome, run_seed, version

DEFAULT_STEPS: Final = 1_000_000
DEFAULT_FIRST: Final = 1001
"""Those before are the tests'."""
PROCESSES: Final = 2
BATCH: Final = 100
MAX_FAILURES: Final = 5


def main(argv: list[str]) -> int:
    steps = int(argv[0]) if argv else DEFAULT_STEPS
    first = int(argv[1]) if len(argv) > 1 else DEFAULT_FIRST
    _say(f"version {version()}, {steps} steps, from seed {first} on")
    totals: Counter[str] = Counter()
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(PROCESSES, mp_context=context) as pool:
        while totals["steps"] < steps and totals["failures"] < MAX_FAILURES:
            for outcome in pool.map(run_seed, range(first, first + BATCH), chunksize=5):
                _count(totals, outcome)
            first += BATCH
            _say(_line(totals, first))
    return 1 if totals["failures"] else 0


def _count(totals: Counter[str], outcome: Outcome) -> None:
    totals["histories"] += 1
    report = outcome.report
    if report is None:
        totals["failures"] += 1
        _say(outcome.failure)
        return
    totals["steps"] += report.steps
    totals["events"] += report.events
    totals["checks"] += report.checked
    totals["requests"] += report.requests
    totals["faults"] += sum(report.faults.values())


def _line(totals: Counter[str], next_seed: int) -> str:
    names = ("histories", "requests", "steps", "events", "checks", "faults", "failures")
    counts = ", ".join(f"{totals[name]} {name}" for name in names)
    return f"{counts}; next seed {next_seed}"


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
