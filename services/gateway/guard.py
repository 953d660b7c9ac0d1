"""The door of the gateway: how long a request's head may be, and who gets past it.

Invariants: where keys are asked for, every path needs one but those in OPEN_PATHS; the decision is
made of the path that the router will see, and of nothing that a client can dress up (no Host, no
method, no prefix).

Shell: HTTP.
"""

from __future__ import annotations

from typing import Final

from starlette.types import ASGIApp, Receive, Scope, Send

from services.gateway.api_keys import ApiKeys
from services.gateway.refusals import Refusal

OPEN_PATHS: Final = frozenset({"/livez", "/readyz"})
"""For probes; they tell nothing of models or requests."""

MAX_HEADERS: Final = 128
MAX_HEAD_BYTES: Final = 32 * 1024
"""Request target and headers. The parser cuts a head that comes in pieces at the same length."""

UNAUTHORIZED: Final = 401
HEAD_TOO_LARGE: Final = 431


class Guard:
    """An ASGI application before another one; without `keys` everybody may pass."""

    def __init__(self, app: ASGIApp, keys: ApiKeys | None) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(scope)
        if refusal is None:
            await self._app(scope, receive, send)
            return
        response = refusal.response()
        if refusal.status == UNAUTHORIZED:
            response.headers["www-authenticate"] = "Bearer"
        await response(scope, receive, send)

    def _refusal(self, scope: Scope) -> Refusal | None:
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        size = len(scope["raw_path"]) + sum(len(name) + len(value) for name, value in headers)
        if len(headers) > MAX_HEADERS or size > MAX_HEAD_BYTES:
            message = f"a request may have {MAX_HEADERS} headers and {MAX_HEAD_BYTES} bytes of them"
            return Refusal(HEAD_TOO_LARGE, "headers_too_large", message)
        if self._keys is None or scope["path"] in OPEN_PATHS:
            return None
        if self._keys.allow(_authorization(headers)):
            return None
        return Refusal(UNAUTHORIZED, "invalid_api_key", "an API key of this server is needed")


def _authorization(headers: list[tuple[bytes, bytes]]) -> str:
    """The one `Authorization` header; "" where there is none, or more than one."""
    values = [value for name, value in headers if name == b"authorization"]
    return values[0].decode("latin-1") if len(values) == 1 else ""
