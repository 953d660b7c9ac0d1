"""A request as another admission can take it over: its envelope, and the ticket made of it.

Pure.
"""

from __future__ import annotations

from services.contracts.envelope import Envelope, seal, unseal
from services.contracts.sequences import SubmitSequence
from services.contracts.vectors import unpack

from .open_request import Ticket


def envelope_of(ticket: Ticket) -> bytes:
    """Raises RequestError where it is too large to be kept."""
    return seal(
        Envelope(
            model=ticket.model,
            reply=ticket.reply,
            encoding=ticket.encoding,
            stop_strings=list(ticket.stop_strings),
            include_stop=ticket.include_stop,
            stream=ticket.stream,
        )
    )


def ticket_of(message: SubmitSequence) -> Ticket:
    """The request behind an offered sequence, as a retry of it. Raises WireError."""
    envelope = unseal(message.envelope)
    return Ticket(
        request_id=message.seq_id,
        model=envelope.model,
        reply=envelope.reply,
        encoding=envelope.encoding,
        prompt_token_ids=unpack(message.prompt).tolist(),
        max_tokens=message.max_tokens,
        sampling=message.sampling,
        stop_token_ids=unpack(message.stop_token_ids).tolist(),
        stop_strings=envelope.stop_strings,
        include_stop=envelope.include_stop,
        stream=envelope.stream,
        salt=message.salt,
        priority=message.priority,
        deadline_ms=message.deadline_ms,
        retry=True,
        traceparent=message.traceparent,
    )
