"""Two hundred histories, every promise checked after every event, and proof of what they cover."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from services.simulator.world import World
from tests.simulation.histories import history

NUM_SEEDS = 200
CHUNK = 25
ROOT = Path(__file__).parents[2]


def _seeds(first: int) -> range:
    return range(first, first + CHUNK)


@pytest.mark.parametrize("first", range(1, NUM_SEEDS + 1, CHUNK))
def test_seeds_keep_their_promises(first: int) -> None:
    for seed in _seeds(first):
        history(seed)


@pytest.fixture(scope="module")
def totals() -> Counter[str]:
    """What happened in all histories together."""
    total: Counter[str] = Counter()
    for seed in range(1, NUM_SEEDS + 1):
        report, seen = history(seed)
        total.update(report.messages)
        total.update({f"ended by {reason}": n for reason, n in report.finished.items()})
        total.update(seen)
        total["steps"] += report.steps
        total["preemptions"] += report.preemptions
        total["prefix hits"] += report.prefix_hits
        total["requests"] += report.requests
        total["scheduler replaced"] += report.scheduler_restarts
        total["copied out"] += report.copies_out
        total["copied in"] += report.copies_in
        total["worker replaced"] += report.messages["attach"] > 1
        total["snapshot after a gap"] += max(0, seen["snapshot"] - report.messages["attach"])
    return total


@pytest.mark.parametrize(
    ("what", "least"),
    [
        ("requests", 1000),
        ("steps", 5000),
        ("preemptions", 100),
        ("prefix hits", 100),
        ("joined with cached tokens", 20),
        ("hold", 100),
        ("append", 1000),
        ("later chunk", 100),
        ("lane left and taken in one plan", 50),
        ("worker replaced", 10),
        ("scheduler replaced", 20),
        ("copied out", 500),
        ("copied in", 60),
        ("snapshot after a gap", 10),
        ("poll sent", 200),
        ("poll says result", 5),
        ("poll says unknown", 5),
        ("stale or repeated plan", 10),
        ("dropped plan", 5),
        ("dropped result", 5),
        ("dropped updates", 5),
        ("dropped delta", 5),
        ("dropped lease", 5),
        ("dropped lookup reply", 5),
        ("dropped submit reply", 1),
        ("abort", 50),
        ("stopped", 50),
        ("ended by stop", 50),
        ("ended by length", 500),
        ("ended by abort", 50),
        ("ended by error", 10),
    ],
)
def test_the_histories_cover(totals: Counter[str], what: str, least: int) -> None:
    assert totals[what] >= least


def test_one_seed_is_one_history() -> None:
    for seed in (7, 42):
        again = World(seed).run()
        assert again == history(seed)[0]
        assert again.messages == history(seed)[0].messages
        assert again.virtual_ms == history(seed)[0].virtual_ms


def test_another_seed_is_another_history() -> None:
    assert len({str(history(seed)[0]) for seed in range(1, 26)}) == 25


def test_a_history_does_not_depend_on_the_hash_seed() -> None:
    seeds = (3, 11, 19)
    script = (
        "from services.simulator.world import World\n"
        f"for seed in {seeds}:\n"
        "    report = World(seed).run()\n"
        "    print(report.steps, report.events, sorted(report.messages.items()))\n"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT)},
            cwd=ROOT,
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for hash_seed in ("1", "2")
    }
    here = "".join(
        f"{report.steps} {report.events} {sorted(report.messages.items())}\n"
        for report in (history(seed)[0] for seed in seeds)
    )
    assert outputs == {here}
