"""One invariant of the simulation: what it is told of, and how it says that it does not hold.

Pure.
"""

from __future__ import annotations

from typing import Any

from services.contracts.public import Frame
from services.contracts.spans import TimedSpan
from services.contracts.step import StepEvent, StepPlan, StepResult

from .clients import Client


class Violation(AssertionError):
    """An invariant does not hold."""


class Check:
    """One invariant. Each method is told of one kind of event; `world` may be looked at."""

    name = ""

    def __init__(self, world: Any) -> None:
        self.world = world
        self.num_checked = 0

    def hears(self, client: Client, frame: Frame) -> None:
        """A frame has reached `client`, which has not looked at it yet."""

    def ends(self, client: Client) -> None:
        """`client` has its terminal frame."""

    def planned(self, node: Any, plan: StepPlan) -> None:
        """Scheduler `node` publishes `plan`."""

    def executes(self, node: Any, plan: StepPlan) -> None:
        """Worker `node` is about to run `plan`."""

    def answered(self, node: Any, result: StepResult) -> None:
        """Scheduler `node` is about to handle `result`."""

    def settled(self, node: Any) -> None:
        """`node` has handled an event."""

    def step_event(self, node: Any, event: StepEvent) -> None:
        """Scheduler `node` reports a step."""

    def span(self, node: Any, span: TimedSpan) -> None:
        """`node` has closed a span."""

    def cancelled(self, request_id: str) -> None:
        """An admission says that it has cancelled the request."""

    def at_rest(self) -> None:
        """All requests have ended, and the mesh has had time to come to rest."""

    def require(self, condition: bool, text: str) -> None:
        self.num_checked += 1
        if not condition:
            raise Violation(f"{self.name}: {text}")
