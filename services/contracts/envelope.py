"""What another admission needs to take over a request, beside its sequence.

The scheduler keeps it with the sequence, unread: text settings and the inbox are the client's and
admission's affair. With `SubmitSequence` it is the whole request.

Pure.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from . import codec, limits
from .errors import ErrorCode, RequestError
from .ids import Id
from .public import Encoding

_StopString = Annotated[str, Meta(min_length=1, max_length=limits.MAX_STOP_CHARS)]
_StopStrings = Annotated[list[_StopString], Meta(max_length=limits.MAX_STOP_STRINGS)]


class Envelope(codec.Message, frozen=True, tag="envelope", kw_only=True):
    """reply, encoding: where frames go, and how they are written."""

    model: Id
    reply: str
    encoding: Encoding
    stop_strings: _StopStrings = []
    include_stop: bool = False
    stream: bool = True


_envelope = codec.Decoder(Envelope)


def seal(envelope: Envelope) -> bytes:
    """As it travels. Raises RequestError(PAYLOAD_TOO_LARGE) over MAX_ENVELOPE_BYTES."""
    sealed = codec.encode(envelope)
    if len(sealed) > limits.MAX_ENVELOPE_BYTES:
        raise RequestError(
            ErrorCode.PAYLOAD_TOO_LARGE,
            f"reply subject and stop strings make {len(sealed)} bytes, at most "
            f"{limits.MAX_ENVELOPE_BYTES} are kept",
        )
    return sealed


def unseal(sealed: bytes) -> Envelope:
    """Raises WireError."""
    return _envelope.decode(sealed)
