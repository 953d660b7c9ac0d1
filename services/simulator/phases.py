"""The moments of a request's life at which the nemesis may strike, each named by the message that
is about to leave, or by what a service is doing.

Pure.
"""

from __future__ import annotations

from enum import StrEnum

from services.contracts.kv import KvDelta
from services.contracts.step import StepPlan
from services.contracts.vectors import unpack


class Phase(StrEnum):
    """In the order in which an undisturbed request passes them."""

    REQUESTED = "request in flight"
    SUBMITTED = "submission in flight"
    SUBMIT_ANSWERED = "submission answered"
    ATTACHING = "attach in flight"
    ATTACHED = "attach answered"
    SNAPSHOT = "snapshot in flight"
    LOOKING_UP = "lookup in flight"
    LOOKED_UP = "lookup answered"
    LEASING = "lease in flight"
    LEASED = "lease answered"
    PLANNED = "plan in flight"
    JOINED = "plan with a join in flight"
    CHUNKED = "plan with a chunk in flight"
    COPYING = "plan with copies in flight"
    STEP_RUNS = "step runs"
    RESULT = "result in flight"
    TOKENS = "updates in flight"
    COMMITTED = "commit in flight"
    RELEASED = "release in flight"
    PREEMPTED = "preempted"
    POLLED = "poll in flight"
    FIRST_FRAME = "first frame in flight"
    FRAME = "frame in flight"
    ADOPTED = "offer in flight"
    RESUMED = "resume in flight"
    CANCELLED = "cancel in flight"
    ENDED = "end in flight"
    TERMINAL = "terminal frame in flight"
    ACKNOWLEDGED = "acknowledgement in flight"


def of_plan(plan: StepPlan) -> tuple[Phase, ...]:
    phases = [Phase.PLANNED]
    if plan.join:
        phases.append(Phase.JOINED)
    if len(unpack(plan.chunk_lanes)):
        phases.append(Phase.CHUNKED)
    if plan.copies_in or plan.copies_out:
        phases.append(Phase.COPYING)
    return tuple(phases)


def of_delta(delta: KvDelta) -> tuple[Phase, ...]:
    phases = []
    if delta.commits is not None:
        phases.append(Phase.COMMITTED)
    if delta.released:
        phases.append(Phase.RELEASED)
    return tuple(phases)
