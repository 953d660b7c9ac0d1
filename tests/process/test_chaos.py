"""`streetcar chaos run`: the drill on real processes, as a person starts it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from services.simulator.drill.schedule import SERVICES
from tests.process.mesh import run

pytestmark = [pytest.mark.nats, pytest.mark.slow, pytest.mark.timeout(180)]

KEYS = {
    *("accepted", "finished", "failed", "faults", "faults_verified", "lost", "duplicated"),
    *("reordered", "blocks_leaked", "worst_recovery_s", "seed", "options"),
}


def test_the_quick_drill_passes_and_proves_its_faults(tmp_path: Path) -> None:
    done = run(
        *("chaos", "run", "--quick", "--seed", "1", "--json"),
        cwd=tmp_path,
        timeout_s=150,
        TMPDIR=str(tmp_path),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert set(report) >= KEYS
    assert report["passed"]
    assert report["faults"] == report["faults_verified"] == len(SERVICES) + 2
    assert set(report["faults_by_service"]) == set(SERVICES)
    assert report["finished"] > 0
    assert [report[name] for name in ("lost", "duplicated", "reordered", "wrong")] == [0] * 4
    assert report["blocks_leaked"] == 0
    assert not list(tmp_path.iterdir()), "a drill that has passed leaves nothing behind"


def test_a_seed_is_a_schedule_that_can_be_read_again(tmp_path: Path) -> None:
    done = run("chaos", "schedule", "--seed", "5", "--kills", "20", cwd=tmp_path)
    assert done.returncode == 0
    faults = json.loads(done.stdout)
    assert sum(fault["kind"] == "kill" for fault in faults) > 0
    (tmp_path / "faults.json").write_text('[{"service": "toaster", "kind": "kill"}]')
    refused = run("chaos", "run", "--schedule", "faults.json", cwd=tmp_path)
    assert refused.returncode == 1
    assert "toaster" in refused.stderr
