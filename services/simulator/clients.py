"""A client of the simulation, which does what `services/client.py` does: it trims what it has, asks
its owner to resume after a silence or a gap, and sends the request again where nobody owns it.

Invariant: whatever comes, the tokens that it keeps are the one right stream.

Shell of the simulation; no clock, no socket.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Final

from services.admission import core as adm
from services.admission.open_request import Ticket
from services.contracts.public import FinishReason, Frame

ASK_AFTER_NS: Final = 1_000_000_000
UNANSWERED: Final = 3


class SimulationError(AssertionError):
    """What a client saw, or what the books say at the end, is wrong."""


@dataclass(slots=True)
class Client:
    """One request, what it must get, and what it got."""

    ticket: Ticket
    expected: list[int]
    stopped: bool
    may_end_early: bool
    frames: list[Frame] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    heard_ns: int = 0
    num_unanswered: int = 0

    @property
    def name(self) -> str:
        return f"client-{self.ticket.request_id}"

    @property
    def done(self) -> bool:
        return bool(self.frames) and self.frames[-1].finish_reason is not None

    # ---- what it does

    def start(self, world: Any) -> None:
        self._send(world, retry=False)
        self._wait(world)

    def cancel(self, world: Any) -> None:
        if self.done:
            return
        event = adm.CancelAsked(self.ticket.request_id)
        for node in world.admissions:
            world.network.send(self.name, node.name, "cancel", b"", lambda _, n=node: n.hear(event))

    def _send(self, world: Any, *, retry: bool) -> None:
        """To one admission of the queue group; where there is none, it is lost."""
        self.heard_ns = world.clock.now_ns
        self.num_unanswered = 0
        node = world.any_admission()
        ticket = dataclasses.replace(self.ticket, retry=retry)
        if node is not None:
            world.network.send(self.name, node.name, "generate", b"", lambda _: node.hear(ticket))

    def _resume(self, world: Any) -> None:
        self.heard_ns = world.clock.now_ns
        self.num_unanswered += 1
        event = adm.ResumeAsked(self.ticket.request_id, len(self.token_ids))
        for node in world.admissions:
            world.network.send(self.name, node.name, "resume", b"", lambda _, n=node: n.hear(event))

    def _wait(self, world: Any) -> None:
        if self.done:
            return
        if world.clock.now_ns - self.heard_ns >= ASK_AFTER_NS:
            if self.num_unanswered < UNANSWERED:
                self._resume(world)
            else:
                self._send(world, retry=True)
        world.clock.at(world.clock.now_ns + ASK_AFTER_NS, lambda: self._wait(world))

    # ---- what it hears

    def hear(self, frame: Frame, world: Any) -> None:
        """Every frame while it is open."""
        name, known = self.ticket.request_id, len(self.token_ids)
        self.num_unanswered = 0
        if frame.offset > known and frame.error is None:
            self._resume(world)
            return
        self.heard_ns = world.clock.now_ns
        self.frames.append(frame)
        self.token_ids.extend(frame.token_ids[known - frame.offset :])
        if self.token_ids != self.expected[: len(self.token_ids)]:
            raise SimulationError(f"{name}: got {self.token_ids}, must be {self.expected}")
        if frame.finish_reason is not None:
            self._check_end(frame)

    def _check_end(self, frame: Frame) -> None:
        name, reason = self.ticket.request_id, frame.finish_reason
        if reason in (FinishReason.ABORT, FinishReason.ERROR):
            if not self.may_end_early:
                raise SimulationError(f"{name}: ended with {reason}: {frame.error}")
            return
        if len(self.token_ids) != len(self.expected):
            raise SimulationError(f"{name}: {len(self.token_ids)} of {len(self.expected)} tokens")
        if reason is not (FinishReason.STOP if self.stopped else FinishReason.LENGTH):
            raise SimulationError(f"{name}: finish_reason {reason}")
        usage = frame.usage
        if usage is None or usage.completion_tokens != len(self.token_ids):
            raise SimulationError(f"{name}: usage {usage}")
