"""Errors as HTTP clients of the OpenAI interface expect them.

Invariant: a body of ours is always `{"error": {"message", "type", "param", "code"}}`, whatever went
wrong, and never holds a traceback.

Pure: builds responses, sends nothing.
"""

from __future__ import annotations

import re
from typing import Final

import msgspec
from starlette.responses import Response

from services.client import StreetcarClientError
from services.contracts.errors import ERRORS, ErrorCode

RETRY_AFTER_S: Final = 1
"""For 429 and 503: a queue moves, and a service restarts, within about a second."""

JSON: Final = "application/json"
_FIELD: Final = re.compile(r"`([A-Za-z_]+)[^`]*`")
_encode = msgspec.json.Encoder().encode


class ErrorDetail(msgspec.Struct, frozen=True):
    """type: the OpenAI family of the error. param: the field at fault. code: of the error table."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorAnswer(msgspec.Struct, frozen=True):
    error: ErrorDetail


class Refusal(Exception):
    """A request ends here with an HTTP error. `status` as in HTTP, `code` as in the error table."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message

    @property
    def answer(self) -> ErrorAnswer:
        field = _FIELD.search(self.message) if self.status == 400 else None
        param = field[1] if field else None
        return ErrorAnswer(ErrorDetail(self.message, _family(self.status), param, self.code))

    def event(self) -> bytes:
        """The error's JSON, for a stream that has begun."""
        return _encode(self.answer)

    def response(self) -> Response:
        headers = {"retry-after": str(RETRY_AFTER_S)} if self.status in {429, 503} else None
        return Response(self.event(), self.status, headers, JSON)


def invalid(message: str) -> Refusal:
    """The client's mistake: 400."""
    return Refusal(400, ErrorCode.INVALID_REQUEST.value, message)


def from_mesh(error: StreetcarClientError) -> Refusal:
    """What the mesh, or the way to it, says."""
    if error.code in ERRORS:
        return Refusal(ERRORS[ErrorCode(error.code)].status, error.code, error.message)
    return Refusal(error.status, error.code, error.message)


def _family(status: int) -> str:
    if status == 429:
        return "rate_limit_error"
    return "invalid_request_error" if status < 500 else "server_error"
