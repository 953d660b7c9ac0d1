"""The drill's proofs: a fault counts only where somebody else saw that it happened."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import pytest

from services.runtime.cluster import Cluster
from services.runtime.failpoints import Action
from services.runtime.supervisor import EventKind, SupervisorEvent
from services.simulator.drill import faults
from services.simulator.drill.faults import Injector, process_state
from services.simulator.drill.schedule import Fault, Kind
from services.simulator.drill.watch import Seen, Watch

ROOT = Path(__file__).parents[3]
SERVICE = """
import sys, time
from services.runtime import failpoints
from services.runtime.settings import for_service
failpoints.enable(for_service())
print("ready", flush=True)
while True:
    failpoints.failpoint("worker.before_forward")
    time.sleep(0.002)
"""


@dataclass
class _Cluster:
    """As much of a cluster as an injector looks at, around one process."""

    run_dir: Path
    pids: dict[str, int]


@pytest.fixture
def process(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    variables = {"STREETCAR_FAULT_INJECTION": "on", "STREETCAR_RUN_DIR": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, "-c", SERVICE],
        env={**os.environ, "PYTHONPATH": str(ROOT), **variables},
        stdout=subprocess.PIPE,
    ) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == b"ready\n"
        yield running
        running.kill()


class _Watch(Watch):
    """Tells when somebody waits for an event."""

    def __init__(self) -> None:
        super().__init__()
        self.waits = asyncio.Event()

    async def until(
        self, service: str, kind: EventKind, after_s: float, timeout_s: float
    ) -> Seen | None:
        self.waits.set()
        return await super().until(service, kind, after_s, timeout_s)


class _Rig:
    def __init__(self, folder: Path, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self.watch = _Watch()
        self.cluster = _Cluster(folder, {"worker": process.pid})
        self.injector = Injector(cast(Cluster, self.cluster), self.watch, 0)
        self.say("ready")

    def say(self, kind: EventKind, text: str = "") -> None:
        self.watch(SupervisorEvent("worker", kind, text))

    async def reborn(self, ending: str) -> None:
        """What a supervisor says after it has seen the end of the process."""
        while process_state(self.process.pid) not in {"Z", ""}:
            await asyncio.sleep(0.005)
        self.say("died", f"it {ending}")
        self.cluster.pids["worker"] = self.process.pid + 1
        self.say("ready")


@pytest.fixture
async def rig(tmp_path: Path, process: subprocess.Popen[bytes]) -> _Rig:
    return _Rig(tmp_path, process)


async def test_a_kill_is_proven_by_wait_status_and_new_process(rig: _Rig) -> None:
    outcome, _ = await asyncio.gather(
        rig.injector.inject(Fault("worker", Kind.KILL)), rig.reborn("was ended by SIGKILL")
    )
    assert outcome.verified
    assert outcome.noticed_s is not None
    assert outcome.ready_s is not None
    assert 0 <= outcome.noticed_s <= outcome.ready_s
    assert len(rig.injector.expected_deaths) == 1


async def test_another_end_is_no_proof_of_a_kill(rig: _Rig) -> None:
    outcome, _ = await asyncio.gather(
        rig.injector.inject(Fault("worker", Kind.KILL)), rig.reborn("exited with 1")
    )
    assert not outcome.verified
    assert "exited with 1" in outcome.evidence


async def test_a_failpoint_kills_from_inside(rig: _Rig) -> None:
    fault = Fault("worker", Kind.FAILPOINT, "worker.before_forward", Action.KILL, count=3)
    outcome, _ = await asyncio.gather(
        rig.injector.inject(fault), rig.reborn("was ended by SIGKILL")
    )
    assert outcome.verified


async def test_a_place_that_is_never_passed_is_not_verified_and_is_disarmed(
    rig: _Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(faults, "FIRED_TIMEOUT_S", 0.2)
    fault = Fault("worker", Kind.FAILPOINT, "worker.after_attach", Action.KILL)
    monkeypatch.setattr(faults, "PROVOKED_BY", {})
    outcome = await rig.injector.inject(fault)
    assert (outcome.verified, outcome.evidence) == (False, "it was never passed")
    assert rig.process.poll() is None


async def test_a_pause_is_seen_in_proc_and_undone(rig: _Rig) -> None:
    outcome = await rig.injector.inject(Fault("worker", Kind.PAUSE, seconds=0.1))
    assert outcome.verified
    assert process_state(rig.process.pid) not in {"T", "Z", ""}


async def test_a_pause_that_nobody_felt_is_not_verified(
    rig: _Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(faults, "STATE_TIMEOUT_S", 0.1)
    monkeypatch.setattr(signal, "SIGSTOP", signal.SIGWINCH)
    outcome = await rig.injector.inject(Fault("worker", Kind.PAUSE, seconds=0.1))
    assert not outcome.verified


async def test_a_hang_that_the_supervisor_does_not_notice_is_not_verified(
    rig: _Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(faults, "HANG_TIMEOUT_S", 0.2)
    outcome = await rig.injector.inject(Fault("worker", Kind.HANG))
    assert not outcome.verified
    assert process_state(rig.process.pid) not in {"T", "Z", ""}


async def test_a_hung_service_that_the_supervisor_ends_is_an_expected_death(rig: _Rig) -> None:
    async def supervise() -> None:
        await rig.watch.waits.wait()
        rig.process.kill()
        await rig.reborn("was ended by SIGKILL")

    outcome, _ = await asyncio.gather(rig.injector.inject(Fault("worker", Kind.HANG)), supervise())
    assert outcome.verified
    assert outcome.noticed_s is not None
    assert len(rig.injector.expected_deaths) == 1
