"""Three hundred histories with faults, every promise checked after every event, and proof of what
they cover.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from services.simulator.nemesis import TIMED
from services.simulator.options import CELLS, LOSSY_KINDS, PAIRS, ROLES
from services.simulator.phases import Phase
from services.simulator.world import World
from tests.simulation.histories import History, histories

NUM_SEEDS = 300
ROOT = Path(__file__).parents[2]
# All seeds are one fixture.
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def all_histories() -> list[History]:
    return list(histories(range(1, NUM_SEEDS + 1)))


def test_seeds_keep_their_promises(all_histories: list[History]) -> None:
    failures = [history.failure for history in all_histories if history.failure]
    assert not failures, "\n".join(failures[:3])


@pytest.fixture(scope="module")
def totals(all_histories: list[History]) -> Counter[str]:
    """What happened in all histories together."""
    total: Counter[str] = Counter()
    for history in all_histories:
        total.update(history.seen)
        report = history.report
        if report is None:
            continue
        total.update(report.messages)
        total.update(report.faults)
        total.update({f"reached {phase}": n for phase, n in report.reached.items()})
        total.update({f"ended by {reason}": n for reason, n in report.finished.items()})
        total.update({f"failed by {code}": n for code, n in report.errors.items()})
        total.update({f"started {role}": n - 1 for role, n in report.starts.items()})
        total["steps"] += report.steps
        total["preemptions"] += report.preemptions
        total["prefix hits"] += report.prefix_hits
        total["requests"] += report.requests
        total["copied out"] += report.copies_out
        total["copied in"] += report.copies_in
        total["forgotten"] += report.forgotten
        total["checked"] += report.checked
    return total


@pytest.mark.parametrize(
    ("what", "least"),
    [
        ("requests", 3000),
        ("steps", 20_000),
        ("checked", 500_000),
        ("preemptions", 100),
        ("prefix hits", 100),
        ("joined with cached tokens", 20),
        ("hold", 100),
        ("append", 1000),
        ("later chunk", 100),
        ("lane left and taken in one plan", 50),
        ("copied out", 500),
        ("copied in", 100),
        ("block spoilt", 20),
        ("short of memory", 15),
        ("step did not fit", 20),
        ("failed by out_of_memory", 3),
        ("forgotten", 200),
        ("poll reply result", 5),
        ("poll reply unknown", 5),
        ("stale or repeated plan", 10),
        ("skewed clock", 100),
        ("stepped down", 5),
        ("crash pair", 10),
        ("crash loop", 5),
        ("lagged", 100),
        ("server restart", 5),
        ("struck message", 20),
        ("struck request", 20),
        ("ended by stop", 50),
        ("ended by length", 1000),
        ("ended by abort", 50),
        ("failed by no_worker", 10),
        ("failed by deadline_exceeded", 10),
        ("failed by numerics", 10),
        ("failed by context_length_exceeded", 10),
        *((f"started {role}", 20) for role in ROLES),
        *((f"dropped {kind}", 2) for kind in LOSSY_KINDS),
        *((f"repeated {kind}", 2) for kind in LOSSY_KINDS if kind != "generate"),
        *((f"reached {phase}", 50) for phase in Phase),
    ],
)
def test_the_histories_cover(totals: Counter[str], what: str, least: int) -> None:
    assert totals[what] >= least


@pytest.mark.parametrize(
    "begins",
    [
        *(f"crash {role}" for role in ROLES),
        *(f"pause {role}" for role in ROLES),
        *(f"hang {role}" for role in ROLES),
        "replace scheduler",
        "zombie scheduler",
        "replace kv_store",
        "zombie kv_store",
        "stepped down kv_store",
        "cut, lose",
        "cut, hold",
        "cut one way, lose",
        "cut one way, hold",
        "isolate, lose",
        "isolate, hold",
        "swizzle, lose",
        "swizzle, hold",
        "cut off ",
        "held ",
        "wiped ",
        "stale plan",
        "stale result",
        "stale delta",
        "stale lease",
        "stale updates",
    ],
)
def test_every_fault_really_happens(totals: Counter[str], begins: str) -> None:
    assert sum(n for name, n in totals.items() if name.startswith(begins)) >= 1


def test_every_fault_is_struck_at_every_phase(totals: Counter[str]) -> None:
    """A crash of each service, a loss and a cancel at each phase; pairs at once."""
    missed = [
        f"{action} {'+'.join(roles)} at {phase}"
        for phase, action, roles in CELLS
        if not totals[f"{action} {'+'.join(roles)} at {phase}"]
    ]
    assert not missed


def test_no_fault_is_missing_from_the_table() -> None:
    drawn = {name for seed in range(1, NUM_SEEDS + 1) for name in World(seed).options.faults.timed}
    assert drawn == set(TIMED)
    assert len(PAIRS) == 6


def test_one_seed_is_one_history(all_histories: list[History]) -> None:
    for seed in (7, 42):
        again = World(seed).run()
        assert again == all_histories[seed - 1].report
        assert again.messages == World(seed).run().messages


def test_another_seed_is_another_history(all_histories: list[History]) -> None:
    assert len({str(history.report) for history in all_histories[:25]}) == 25


def test_a_history_does_not_depend_on_the_hash_seed() -> None:
    script = (
        "from services.simulator.world import World\n"
        "for seed in (3, 11, 19):\n"
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
    assert len(outputs) == 1
