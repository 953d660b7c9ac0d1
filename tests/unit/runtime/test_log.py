"""Status lines that fit a pipe, and logs that keep what people wrote to themselves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from services.runtime.log import MAX_STATUS_BYTES

ROOT = Path(__file__).parents[3]


def _run(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", "from services.runtime.log import *\n" + script],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


def test_status_lines() -> None:
    out = _run(
        "report_progress(7, 'loading')\n"
        "report_ready(port=3)\n"
        "report_fatal('E301', '\\u6a21' * 5000, 'fix')\n"
    ).stdout.splitlines()
    progress, ready, fatal = map(json.loads, out)
    assert progress == {"event": "progress", "fraction": 1.0, "text": "loading"}
    assert ready == {"event": "ready", "fields": {"port": 3}}
    assert (fatal["event"], fatal["code"]) == ("fatal", "E301")
    assert fatal["message"]
    assert all(len(line.encode()) < MAX_STATUS_BYTES for line in out)


def test_logs_are_json_and_hide_what_people_wrote() -> None:
    err = _run(
        "import logging\n"
        "configure_logging('worker', 'info')\n"
        "log = get_logger('a')\n"
        "log.info('accepted', prompt='canary', num_tokens=3)\n"
        "log.debug('not shown')\n"
        "logging.getLogger('library').warning('of %s', 'theirs')\n"
        "try:\n    1 / 0\nexcept ZeroDivisionError:\n    log.exception('failed')\n"
    ).stderr
    first, second, third = map(json.loads, err.splitlines())
    assert "canary" not in err
    assert (first["event"], first["num_tokens"], first["service"]) == ("accepted", 3, "worker")
    assert (second["event"], second["level"]) == ("of theirs", "warning")
    assert "ZeroDivisionError" in third["exception"]
