"""The script for a GPU runs here as far as the interpreter goes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("check_gpu.py")


@pytest.mark.timeout(180)
def test_the_dry_run_checks_measures_and_writes_its_json(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    command = [sys.executable, "-W", "ignore", str(SCRIPT), "--dry-run", "--out", str(out)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    found = json.loads(out.read_text(encoding="utf-8"))
    assert found["ok"] and not found["failed"] and not found["skipped"]
    names = {check["name"] for check in found["checks"]}
    assert {"rms_norm", "sampling", "attention, mixed", "engine tokens, one by one"} <= names
    assert all(figure["ms"] > 0 for figure in found["speed"])
    assert found["ceilings"]["copy_gb_s"] > 0
