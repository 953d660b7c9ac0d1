"""Injects one fault into a running cluster and proves that it happened.

Invariants: a fault is verified only by what others saw of it: the wait status that the supervisor
got and a new process, the state in /proc, the line that a failpoint wrote before it acted; a
process that was stopped is let go on, whatever else goes wrong.

Shell: signals, /proc, files.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections import defaultdict
from pathlib import Path
from typing import Any, Final

from services.runtime import failpoints
from services.runtime.cluster import BESIDE, Cluster
from services.runtime.failpoints import Action
from services.simulator.drill.checker import Outcome
from services.simulator.drill.schedule import PROVOKED_BY, Fault, Kind
from services.simulator.drill.watch import Seen, Watch

ARMED_TIMEOUT_S: Final = 5.0
FIRED_TIMEOUT_S: Final = 10.0
DEATH_TIMEOUT_S: Final = 10.0
READY_TIMEOUT_S: Final = 120.0
HANG_TIMEOUT_S: Final = 15.0
DRAINED_TIMEOUT_S: Final = 60.0
STATE_TIMEOUT_S: Final = 2.0
MAX_TRIES: Final = 3
_POLL_S: Final = 0.03
_STOPPED: Final = {"T", "t"}
OF_THE_ONE_BEFORE: Final = {"draining", "drained"}


class Injector:
    """Faults of one mesh. expected_deaths: (service, time) of every death that it caused."""

    def __init__(self, cluster: Cluster, watch: Watch, mesh: int) -> None:
        self._cluster = cluster
        self._watch = watch
        self._mesh = mesh
        self.expected_deaths: list[Seen] = []
        self._one_at_a_time: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def inject(self, fault: Fault) -> Outcome:
        """Do it, and wait for its proof and for the service's return; one at a time of a service,
        or they would take each other's proof.
        """
        async with self._one_at_a_time[fault.service]:
            await self._until_running(fault.service)
            return await self._inject(fault)

    async def _inject(self, fault: Fault) -> Outcome:
        match fault.kind:
            case Kind.KILL:
                return await self._signal(fault, signal.SIGKILL, "was ended by SIGKILL")
            case Kind.TERMINATE:
                return await self._terminate(fault)
            case Kind.PAUSE:
                return await self._pause(fault, fault.seconds)
            case Kind.HANG:
                return await self._pause(fault, HANG_TIMEOUT_S)
            case Kind.FAILPOINT:
                return await self._failpoint(fault)

    async def _until_running(self, service: str) -> None:
        """After a fault that came together with another one, it may still be starting."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(READY_TIMEOUT_S):
                while not self._is_ready(service):
                    await asyncio.sleep(_POLL_S)

    def _is_ready(self, service: str) -> bool:
        mine = [
            seen.event.kind
            for seen in self._watch.seen
            if seen.event.service == service and seen.event.kind not in OF_THE_ONE_BEFORE
        ]
        return bool(mine) and mine[-1] == "ready" and service in self._cluster.pids

    # ---- from outside

    async def _signal(self, fault: Fault, number: signal.Signals, ending: str) -> Outcome:
        pid, began_s = self._cluster.pids[fault.service], time.monotonic()
        os.kill(pid, number)
        return await self._death(fault, began_s, pid, ending)

    async def _terminate(self, fault: Fault) -> Outcome:
        """SIGTERM. Some end what they have begun, while their successor is there already."""
        if fault.service.split("-")[0] not in BESIDE:
            return await self._signal(fault, signal.SIGTERM, "exited with 0")
        pid, began_s = self._cluster.pids[fault.service], time.monotonic()
        os.kill(pid, signal.SIGTERM)
        outcome = Outcome(fault, self._mesh, began_s, False, "no successor was seen")
        ready = await self._watch.until(fault.service, "ready", began_s, READY_TIMEOUT_S)
        if ready is None:
            return outcome
        outcome.ready_s = ready.at_s - began_s
        now = self._cluster.pids.get(fault.service, pid)
        ended = await self._watch.until(fault.service, "drained", began_s, DRAINED_TIMEOUT_S)
        if ended is not None:
            outcome.evidence = f"process {pid} {_ending(ended)}, before that {now}"
            outcome.verified = "exited with 0" in ended.event.text and now != pid
        return outcome

    async def _death(self, fault: Fault, began_s: float, pid: int, ending: str) -> Outcome:
        """Wait for the death that the supervisor sees, then for the next life."""
        outcome = Outcome(fault, self._mesh, began_s, False, "no death was seen")
        died = await self._watch.until(fault.service, "died", began_s, DEATH_TIMEOUT_S)
        if died is None:
            return outcome
        self.expected_deaths.append(died)
        outcome.noticed_s = died.at_s - began_s
        ready = await self._watch.until(fault.service, "ready", died.at_s, READY_TIMEOUT_S)
        outcome.evidence = f"process {pid} {_ending(died)}"
        if ready is None:
            outcome.evidence += f"; not back after {READY_TIMEOUT_S:g} s"
            return outcome
        outcome.ready_s = ready.at_s - began_s
        now = self._cluster.pids.get(fault.service, pid)
        outcome.evidence += f", now {now}"
        outcome.verified = ending in died.event.text and now != pid
        return outcome

    async def _pause(self, fault: Fault, seconds: float) -> Outcome:
        """Stop it for so long, or until the supervisor takes it for hung; a HANG has to be."""
        pid, began_s = self._cluster.pids[fault.service], time.monotonic()
        outcome = Outcome(fault, self._mesh, began_s, False, "/proc never said that it was stopped")
        os.kill(pid, signal.SIGSTOP)
        stopped = False
        try:
            stopped = await self._until_state(pid, stopped=True)
            if stopped:
                outcome.evidence = f"process {pid} was stopped for {seconds:g} s"
                died = await self._watch.until(fault.service, "died", began_s, seconds)
                if died is not None:
                    return await self._hung(outcome, died)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        goes_on = stopped and await self._until_state(pid, stopped=False)
        outcome.verified = goes_on and fault.kind is Kind.PAUSE
        return outcome

    async def _hung(self, outcome: Outcome, died: Seen) -> Outcome:
        """The supervisor has taken the stopped process for hung, and ended it."""
        self.expected_deaths.append(died)
        outcome.noticed_s = died.at_s - outcome.began_s
        outcome.evidence = f"stopped; after {outcome.noticed_s:.1f} s it {_ending(died)}"
        service = outcome.fault.service
        ready = await self._watch.until(service, "ready", died.at_s, READY_TIMEOUT_S)
        if ready is not None:
            outcome.ready_s = ready.at_s - outcome.began_s
            outcome.verified = True
        return outcome

    async def _until_state(self, pid: int, *, stopped: bool) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STATE_TIMEOUT_S):
                while (process_state(pid) in _STOPPED) is not stopped:
                    await asyncio.sleep(_POLL_S)
                return True
        return False

    # ---- from inside

    async def _failpoint(self, fault: Fault) -> Outcome:
        """Arm it and wait until it fires; a process that dies of something else is no proof."""
        began_s, reason = time.monotonic(), "it was never passed"
        for _ in range(MAX_TRIES):
            # A process that has only begun would die of the signal that tells it to read its order.
            await self._until_running(fault.service)
            pid = self._cluster.pids[fault.service]
            failpoints.arm(self._cluster.run_dir, pid, fault.spec)
            if await self._line("armed", pid, began_s, ARMED_TIMEOUT_S) is None:
                reason = "it was never armed"
                continue
            await self._provoke(fault)
            fired = await self._line("fired", pid, began_s, FIRED_TIMEOUT_S)
            if fired is not None:
                return await self._fired(fault, pid, fired["monotonic_ns"] / 1e9)
            if self._cluster.pids.get(fault.service) == pid:
                failpoints.arm(self._cluster.run_dir, pid, "")
                break
        return Outcome(fault, self._mesh, began_s, False, reason)

    async def _provoke(self, fault: Fault) -> None:
        """Some places are passed only when another service begins anew."""
        other = PROVOKED_BY.get(fault.place)
        if other is not None:
            await self._until_running(other)
            began_s = time.monotonic()
            os.kill(self._cluster.pids[other], signal.SIGKILL)
            died = await self._watch.until(other, "died", began_s, DEATH_TIMEOUT_S)
            if died is not None:
                self.expected_deaths.append(died)

    async def _fired(self, fault: Fault, pid: int, began_s: float) -> Outcome:
        match fault.action:
            case Action.KILL:
                return await self._death(fault, began_s, pid, "was ended by SIGKILL")
            case Action.RAISE:
                return await self._death(fault, began_s, pid, "exited with 1")
            case _:
                await asyncio.sleep(fault.seconds)
                evidence = f"process {pid} wrote that it fired"
                return Outcome(fault, self._mesh, began_s, True, evidence)

    async def _line(
        self, event: str, pid: int, after_s: float, timeout_s: float
    ) -> dict[str, Any] | None:
        """The first line of the failpoints' record that says so."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                is_alive = True
                while is_alive:
                    # What it wrote before its death is looked for once more after it.
                    is_alive = process_state(pid) not in {"", "Z"}
                    for line in failpoints.record(self._cluster.run_dir):
                        is_new = line["monotonic_ns"] >= after_s * 1e9
                        if is_new and (line["event"], line["pid"]) == (event, pid):
                            return line
                    await asyncio.sleep(_POLL_S)
        return None


def _ending(died: Seen) -> str:
    """How it ended, without its last words."""
    return died.event.text.removeprefix("it ").split(";")[0]


def process_state(pid: int) -> str:
    """The letter that /proc has for it: R, S, T ...; empty where there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""
