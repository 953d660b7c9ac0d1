"""Failpoints: off unless allowed, one place in the code each, and every action as it says."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.runtime import failpoints
from services.runtime.failpoints import PLACES, RECORD, Action, Failure, failpoint, parse, record
from services.runtime.problem import Problem
from services.runtime.settings import Settings, SettingsError, load

ROOT = Path(__file__).parents[3]
PACKAGES = ("services", "scheduler_svc", "kv_store", "gpu_worker")
PLACE = "worker.after_forward"
WAIT_S = 20.0


@pytest.fixture(autouse=True)
def _disarmed() -> Iterator[None]:
    yield
    failpoints.disable()


def _settings(folder: Path, spec: str = "") -> Settings:
    return load(
        environ={},
        flags={"fault_injection": "on", "failpoints": spec, "run_dir": str(folder)},
    )


def _passed_in_the_code() -> Counter[str]:
    names: Counter[str] = Counter()
    for path in (path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "failpoint":
                names[ast.literal_eval(node.args[0])] += 1
    return names


def test_every_name_of_the_table_is_one_place_in_the_code() -> None:
    assert _passed_in_the_code() == Counter(dict.fromkeys(PLACES, 1))


def test_nothing_can_be_armed_without_the_setting_that_allows_it(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="fault_injection is off"):
        load(environ={"STREETCAR_FAILPOINTS": f"{PLACE}:kill@1"})
    failpoints.enable(load(environ={}, flags={"run_dir": str(tmp_path)}))
    assert not failpoint(PLACE)
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
    assert not list(tmp_path.iterdir())


def test_a_drop_is_told_once_at_its_passing_and_written_down(tmp_path: Path) -> None:
    failpoints.enable(_settings(tmp_path, f"{PLACE}:drop@3,{PLACE}:drop@5"))
    assert [failpoint(PLACE) for _ in range(6)] == [False, False, True, False, True, False]
    assert not failpoint("worker.after_attach")
    lines = list(record(tmp_path))
    assert [line["event"] for line in lines] == ["armed", "fired", "fired"]
    assert [line["passing"] for line in lines[1:]] == [3, 5]
    assert {line["pid"] for line in lines} == {os.getpid()}


def test_raise_raises(tmp_path: Path) -> None:
    failpoints.enable(_settings(tmp_path, f"{PLACE}:raise@1"))
    with pytest.raises(Failure, match=PLACE):
        failpoint(PLACE)
    assert not failpoint(PLACE)


def test_stall_takes_its_time(tmp_path: Path) -> None:
    failpoints.enable(_settings(tmp_path, f"{PLACE}:stall=0.2@2"))
    failpoint(PLACE)
    started = time.monotonic()
    assert not failpoint(PLACE)
    assert time.monotonic() - started >= 0.2


PASSING_FOR_EVER = f"""
import sys, time
from services.runtime import failpoints
from services.runtime.settings import for_service
failpoints.enable(for_service())
print("ready", flush=True)
while True:
    failpoints.failpoint({PLACE!r})
    time.sleep(0.001)
"""


def test_another_process_is_armed_and_kills_itself(tmp_path: Path) -> None:
    variables = {"STREETCAR_FAULT_INJECTION": "on", "STREETCAR_RUN_DIR": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, "-c", PASSING_FOR_EVER],
        env={**os.environ, "PYTHONPATH": str(ROOT), **variables},
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        failpoints.arm(tmp_path, process.pid, f"{PLACE}:kill@5")
        assert process.wait(WAIT_S) == -signal.SIGKILL
    armed, fired = record(tmp_path)
    assert (armed["event"], armed["pid"]) == ("armed", process.pid)
    assert (fired["name"], fired["action"], fired["passing"]) == (PLACE, "kill", 5)


def test_an_order_that_cannot_be_read_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    failpoints.enable(_settings(tmp_path, f"{PLACE}:drop@1"))
    failpoints.order_path(tmp_path, os.getpid()).write_text("nowhere.at_all:kill@1")
    os.kill(os.getpid(), signal.SIGUSR1)
    assert [line["event"] for line in record(tmp_path)] == ["armed", "refused"]
    assert failpoint(PLACE)
    failpoints.arm(tmp_path, os.getpid(), "")
    assert not failpoint(PLACE)


@pytest.mark.parametrize(
    "spec",
    [
        "worker.after_forward",
        "worker.after_forward:kill",
        "worker.after_forward:kill@0",
        "worker.after_forward:explode@1",
        "worker.after_lunch:kill@1",
        "worker.after_forward:stall@1",
        "worker.after_forward:kill=2@1",
        "worker.after_forward:stall=1e9@1",
        "worker.before_forward:drop@1",
        ",".join([f"{PLACE}:kill@1"] * 65),
    ],
)
def test_a_spec_that_means_nothing_is_refused(spec: str) -> None:
    with pytest.raises(Problem) as caught:
        parse(spec)
    assert caught.value.code == "E105"


def test_every_action_is_parsed() -> None:
    words = [f"{PLACE}:{action}{'=0.5' if action == 'stall' else ''}@2" for action in Action]
    assert [point.action for point in parse(",".join(words))] == list(Action)


def test_off_a_place_writes_nothing(tmp_path: Path) -> None:
    failpoints.enable(_settings(tmp_path))
    assert not any(failpoint(name) for name in PLACES)
    assert not (tmp_path / RECORD).exists()
