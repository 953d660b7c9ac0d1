"""What happens to an admission, and what it wants done: events in, effects out.

Pure. Effects name intent; the shell maps them to subjects.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from services.contracts.beats import Beat
from services.contracts.public import Encoding, Frame
from services.contracts.sequences import (
    AbortSequences,
    AdoptSequences,
    SequenceUpdates,
    SubmitReply,
    SubmitSequence,
)

from .open_request import Ticket


@dataclass(frozen=True, slots=True)
class CancelAsked:
    """`reply`: where the owner answers, or empty."""

    request_id: str
    reply: str = ""


@dataclass(frozen=True, slots=True)
class ResumeAsked:
    """Its client has `offset` output tokens and wants those after them."""

    request_id: str
    offset: int


@dataclass(frozen=True, slots=True)
class Unheard:
    """Nobody listened where a frame of the request went."""

    request_id: str


@dataclass(frozen=True, slots=True)
class BeatSent:
    """Our own beat has gone out."""


@dataclass(frozen=True, slots=True)
class SubmitFailed:
    """No answer to a submission."""

    seq_id: str


@dataclass(frozen=True, slots=True)
class Flush:
    """Show what has come: of the `most` requests whose news have waited longest, or of all."""

    most: int | None = None


@dataclass(frozen=True, slots=True)
class DrainAsked:
    """Take no new requests; those here run to their end."""


Event: TypeAlias = (
    Ticket
    | SubmitReply
    | SubmitFailed
    | SequenceUpdates
    | AdoptSequences
    | CancelAsked
    | ResumeAsked
    | Unheard
    | Beat
    | BeatSent
    | Flush
    | DrainAsked
)


@dataclass(frozen=True, slots=True)
class SendFrame:
    reply: str
    encoding: Encoding
    frame: Frame


@dataclass(frozen=True, slots=True)
class Submit:
    engine: str
    message: SubmitSequence


@dataclass(frozen=True, slots=True)
class Abort:
    engine: str
    message: AbortSequences


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The request was open here, and has ended."""

    request_id: str
    reply: str


@dataclass(frozen=True, slots=True)
class GivenAway:
    """Another admission has the request, which is forgotten here without a frame."""

    request_id: str


Effect: TypeAlias = SendFrame | Submit | Abort | Cancelled | GivenAway
