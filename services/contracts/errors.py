"""The table of errors a client can see: code, HTTP status, whether the same request may be retried.

Pure. Internal detail never goes into a message; a code not in this table never leaves the mesh.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class ErrorCode(StrEnum):
    INVALID_REQUEST = "invalid_request"
    CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
    MODEL_NOT_FOUND = "model_not_found"
    DUPLICATE_REQUEST = "duplicate_request"
    PAYLOAD_TOO_LARGE = "payload_too_large"
    NEVER_FITS = "never_fits"
    QUEUE_FULL = "queue_full"
    NO_WORKER = "no_worker"
    DRAINING = "draining"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    SLOW_CLIENT = "slow_client"
    LOG_OVERFLOW = "log_overflow"
    LOGPROBS_LOST = "logprobs_lost"
    NUMERICS = "numerics"
    POISONED = "poisoned"
    OUT_OF_MEMORY = "out_of_memory"
    INTERNAL = "internal"


@dataclass(frozen=True, slots=True)
class ErrorKind:
    """`status`: HTTP status and `Nats-Service-Error-Code`. `retryable`: the same request may pass
    later.
    """

    status: int
    retryable: bool


ERRORS: dict[ErrorCode, ErrorKind] = {
    ErrorCode.INVALID_REQUEST: ErrorKind(400, False),
    ErrorCode.CONTEXT_LENGTH_EXCEEDED: ErrorKind(400, False),
    ErrorCode.MODEL_NOT_FOUND: ErrorKind(404, False),
    ErrorCode.DUPLICATE_REQUEST: ErrorKind(409, False),
    ErrorCode.PAYLOAD_TOO_LARGE: ErrorKind(413, False),
    ErrorCode.NEVER_FITS: ErrorKind(400, False),
    ErrorCode.QUEUE_FULL: ErrorKind(429, True),
    ErrorCode.NO_WORKER: ErrorKind(503, True),
    ErrorCode.DRAINING: ErrorKind(503, True),
    ErrorCode.DEADLINE_EXCEEDED: ErrorKind(504, True),
    ErrorCode.SLOW_CLIENT: ErrorKind(499, False),
    ErrorCode.LOG_OVERFLOW: ErrorKind(500, True),
    ErrorCode.LOGPROBS_LOST: ErrorKind(500, True),
    ErrorCode.NUMERICS: ErrorKind(500, False),
    ErrorCode.POISONED: ErrorKind(500, False),
    ErrorCode.OUT_OF_MEMORY: ErrorKind(500, False),
    ErrorCode.INTERNAL: ErrorKind(500, True),
}

assert set(ERRORS) == set(ErrorCode)


class StreetcarError(Exception):
    """Root of the errors of this project."""


class RequestError(StreetcarError):
    """A refused or failed request: a value for its client, never a traceback."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message

    @property
    def status(self) -> int:
        return ERRORS[self.code].status


class InvariantError(StreetcarError):
    """State that must not be: the actor that finds it stops loudly."""


class WireError(StreetcarError):
    """A peer sent bytes that are no message of ours: counted and dropped by the shell."""
