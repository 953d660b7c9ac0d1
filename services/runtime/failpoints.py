"""Named places in the services where a drill makes a process die, hang, fail or lose a message.

Invariants: nothing is armed unless the setting `fault_injection` is on; an armed point fires once,
at its count-th passing, and is written down before it acts; off, a point costs a call and a test,
and none is passed once per token.

A spec is `NAME:ACTION@COUNT`, several with commas; a stall says how long: `NAME:stall=2.5@10`.
Specs come from the setting `failpoints` at the start, and later from the file that `arm` writes,
which the process reads at SIGUSR1.

Shell: files, signals, the end of its own process.
"""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from services.runtime.problem import Problem
from services.runtime.settings import Settings

MAX_ARMED: Final = 64
MAX_STALL_S: Final = 600.0
RECORD: Final = "failpoints.jsonl"
"""In the run directory: a line for every spec that was armed and every point that fired."""


class Action(StrEnum):
    KILL = "kill"
    STALL = "stall"
    RAISE = "raise"
    DROP = "drop"


class Failure(Exception):
    """What a point with the action `raise` raises; nothing handles it."""


@dataclass(frozen=True, slots=True)
class Place:
    """loses: what the action `drop` loses there; empty where it has no meaning."""

    loses: str = ""


PLACES: Final[Mapping[str, Place]] = {
    # A request has been checked and tokenised, and is not known to the core yet.
    "admission.after_ticket": Place("the request"),
    # The scheduler has acknowledged it.
    "admission.after_submit": Place("the acknowledgement"),
    # New text of all requests has been shown.
    "admission.after_flush": Place(),
    "admission.before_terminal_frame": Place("the terminal frame"),
    # The client has its end, the scheduler has not been told.
    "admission.after_terminal_frame": Place(),
    # A sequence has arrived and is not acknowledged yet.
    "scheduler.after_submit": Place("the submission"),
    "scheduler.before_plan": Place("the plan"),
    "scheduler.after_plan": Place(),
    # A result has arrived and is not read yet.
    "scheduler.after_result": Place("the result"),
    "scheduler.before_updates": Place("the updates"),
    "scheduler.before_delta": Place("the delta"),
    # The epoch has been issued, the scheduler has not heard it.
    "worker.after_attach": Place("the answer"),
    "worker.before_forward": Place(),
    "worker.no_memory": Place("the memory for the step"),
    # Computed, and the result is not out yet.
    "worker.after_forward": Place("the result"),
    "worker.after_result": Place(),
    "kv_store.before_grant": Place("the grant"),
    "kv_store.before_lookup_reply": Place("the pins"),
    # It has arrived and is not applied yet.
    "kv_store.before_delta": Place("the delta"),
    "gateway.before_request": Place(),
    # The mesh has begun to answer a stream, its client has seen nothing.
    "gateway.after_first_frame": Place(),
    "gateway.before_done": Place(),
}
"""Every point, by its name: the service, then where it is."""

_SPEC: Final = re.compile(r"([a-z_]+\.[a-z_]+):([a-z]+)(?:=([0-9.]+))?@([0-9]{1,9})")


@dataclass(slots=True)
class Armed:
    """One spec. passings: how often the place was passed since; it fires when that is `count`."""

    name: str
    action: Action
    count: int
    stall_s: float = 0.0
    passings: int = 0


class _Switchboard:
    """What is armed in this process. The one mutable global: a place in the code has no owner that
    could hand it anything, and off it must cost nothing.
    """

    def __init__(self) -> None:
        self.armed: dict[str, list[Armed]] = {}
        self._run_dir = Path()

    def enable(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        signal.signal(signal.SIGUSR1, lambda _number, _frame: self._read_order())

    def disable(self) -> None:
        self.armed = {}
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)

    def arm(self, spec: str) -> None:
        armed: dict[str, list[Armed]] = {}
        for point in parse(spec):
            armed.setdefault(point.name, []).append(point)
        self.armed = armed
        self._record({"event": "armed", "spec": spec})

    def pass_by(self, name: str) -> bool:
        points = self.armed.get(name, [])
        for point in points:
            point.passings += 1
        due = [point for point in points if point.passings == point.count]
        lost = [self._fire(point) for point in due]
        return any(lost)

    def _fire(self, point: Armed) -> bool:
        fields = {"name": point.name, "action": point.action.value, "passing": point.passings}
        self._record({"event": "fired", **fields})
        if point.action is Action.KILL:
            os.kill(os.getpid(), signal.SIGKILL)
        if point.action is Action.STALL:
            time.sleep(point.stall_s)
        if point.action is Action.RAISE:
            raise Failure(f"{point.name} was told to fail")
        return point.action is Action.DROP

    def _read_order(self) -> None:
        try:
            self.arm(order_path(self._run_dir, os.getpid()).read_text())
        except (OSError, ValueError, Problem) as error:
            self._record({"event": "refused", "reason": str(error)})

    def _record(self, fields: Mapping[str, Any]) -> None:
        """One line in one write, so that the lines of several processes never mix."""
        line = json.dumps({"pid": os.getpid(), "monotonic_ns": time.monotonic_ns(), **fields})
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        file = os.open(self._run_dir / RECORD, flags, 0o600)
        try:
            os.write(file, line.encode() + b"\n")
        finally:
            os.close(file)


_switchboard: Final = _Switchboard()


def failpoint(name: str) -> bool:
    """Pass the place `name` of PLACES; True where the caller must lose what it has in hand."""
    if not _switchboard.armed:
        return False
    return _switchboard.pass_by(name)


def enable(settings: Settings) -> None:
    """Arm what the settings say and listen for more; does nothing unless they allow it.

    Raises Problem where a spec is wrong.
    """
    if settings.fault_injection != "on":
        return
    _switchboard.enable(Path(settings.run_dir or "."))
    if settings.failpoints:
        _switchboard.arm(settings.failpoints)


def disable() -> None:
    """Disarm everything in this process."""
    _switchboard.disable()


def parse(spec: str) -> list[Armed]:
    """The points of `spec`; an empty one has none. Raises Problem."""
    words = [word for word in spec.strip().split(",") if word]
    if len(words) > MAX_ARMED:
        raise _refusal(f"{len(words)} points are more than {MAX_ARMED}")
    return [_parse_one(word) for word in words]


def _parse_one(word: str) -> Armed:
    found = _SPEC.fullmatch(word)
    if found is None:
        raise _refusal(f"{word!r} is not NAME:ACTION@COUNT")
    name, action, seconds, count = found.groups()
    if name not in PLACES:
        raise _refusal(f"there is no place {name!r}")
    if action not in set(Action):
        raise _refusal(f"there is no action {action!r}")
    if action == Action.DROP and not PLACES[name].loses:
        raise _refusal(f"nothing can be dropped at {name}")
    stall_s = float(seconds or 0.0)
    if (action == Action.STALL) != bool(seconds) or stall_s > MAX_STALL_S:
        raise _refusal(f"{word!r}: a stall, and nothing else, says how long, up to {MAX_STALL_S:g}")
    if int(count) < 1:
        raise _refusal(f"{word!r}: the first passing is number 1")
    return Armed(name, Action(action), int(count), stall_s)


def _refusal(cause: str) -> Problem:
    return Problem("E105", "Failpoint refused", cause=cause, fix=f"places: {', '.join(PLACES)}")


# ---- for the drill


def order_path(run_dir: Path, pid: int) -> Path:
    """The file that the process reads at SIGUSR1."""
    return run_dir / f"failpoints.{pid}.order"


def arm(run_dir: Path, pid: int, spec: str) -> None:
    """Tell the process `pid` of the cluster in `run_dir` to arm `spec` instead of what it has."""
    parse(spec)
    order_path(run_dir, pid).write_text(spec)
    os.kill(pid, signal.SIGUSR1)


def record(run_dir: Path) -> Iterable[dict[str, Any]]:
    """All lines of the cluster in `run_dir`: `event`, `pid`, `monotonic_ns`, and the event's."""
    path = run_dir / RECORD
    if not path.exists():
        return
    for line in path.read_text().splitlines():
        yield json.loads(line)
