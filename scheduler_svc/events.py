"""What happens to a scheduler, and what it wants done: events in, effects out.

Pure. Effects name intent; the shell maps them to subjects.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from services.contracts.beats import Beat
from services.contracts.codec import Message
from services.contracts.kv import (
    KvDelta,
    KvSnapshot,
    LeaseReply,
    LeaseRequest,
    LookupReply,
    LookupRequest,
)
from services.contracts.sequences import (
    AbortSequences,
    AdoptSequences,
    SequenceUpdates,
    SubmitSequence,
)
from services.contracts.spans import TimedSpan
from services.contracts.step import (
    Attach,
    Attached,
    Poll,
    PollReply,
    StepEvent,
    StepPlan,
    StepResult,
)


@dataclass(frozen=True, slots=True)
class Submitted:
    """`reply` is opaque: it comes back in the Reply effect."""

    message: SubmitSequence
    reply: str


@dataclass(frozen=True, slots=True)
class AbortAsked:
    message: AbortSequences
    reply: str


@dataclass(frozen=True, slots=True)
class WorkerSilent:
    """An attach or a poll got no answer. `gone`: nobody even listens."""

    gone: bool


@dataclass(frozen=True, slots=True)
class DrainAsked:
    """Stop: take no new sequences and plan no more steps; what is in flight is still taken."""


Event: TypeAlias = (
    Submitted
    | AbortAsked
    | Attached
    | StepResult
    | PollReply
    | WorkerSilent
    | LookupReply
    | LeaseReply
    | Beat
    | DrainAsked
)


@dataclass(frozen=True, slots=True)
class Reply:
    reply: str
    message: Message


@dataclass(frozen=True, slots=True)
class SendUpdates:
    admission_id: str
    updates: SequenceUpdates


@dataclass(frozen=True, slots=True)
class OfferAdoption:
    """To any one admission."""

    message: AdoptSequences


@dataclass(frozen=True, slots=True)
class Note:
    """Something a person may want to read in the log."""

    event: str
    fields: dict[str, int | float | str]


Effect: TypeAlias = (
    Reply
    | SendUpdates
    | OfferAdoption
    | Note
    | StepPlan
    | StepEvent
    | KvDelta
    | KvSnapshot
    | LookupRequest
    | LeaseRequest
    | Attach
    | Poll
    | TimedSpan
)
