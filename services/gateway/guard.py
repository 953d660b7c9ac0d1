"""The door of the gateway: how long a request's head may be, and who gets past it.

Invariants: where keys are asked for, every path needs one but those in OPEN_PATHS; the decision is
made of the path that the router will see, and of nothing that a client can dress up (no Host, no
method, no prefix). Where none are, on loopback, a web page of somebody else cannot use a browser on
this machine as its way in: neither by its own origin nor by a name that leads here.

Shell: HTTP.
"""

from __future__ import annotations

from typing import Final
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from services.gateway.api_keys import ApiKeys
from services.gateway.connection import MAX_HEAD_BYTES, MAX_HEADERS, head_too_large
from services.gateway.refusals import Refusal
from services.runtime.bus_url import is_loopback

OPEN_PATHS: Final = frozenset({"/livez", "/readyz"})
"""For probes; they tell nothing of models or requests."""

UNAUTHORIZED: Final = 401
FORBIDDEN: Final = 403


class Guard:
    """An ASGI application before another one.

    keys: who may pass; None for everybody. local: the gateway listens on loopback.
    """

    def __init__(self, app: ASGIApp, keys: ApiKeys | None, *, local: bool) -> None:
        self._app = app
        self._keys = keys
        self._local = local

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
            # The parser cuts only a head that comes in pieces.
            return head_too_large()
        if scope["path"] in OPEN_PATHS:
            return None
        if self._keys is None:
            return _refuse_foreign(headers) if self._local else None
        if self._keys.allow(_only(headers, b"authorization")):
            return None
        return Refusal(UNAUTHORIZED, "invalid_api_key", "an API key of this server is needed")


def _refuse_foreign(headers: list[tuple[bytes, bytes]]) -> Refusal | None:
    """A browser says which page asks (`Origin`), and by which name it came here (`Host`)."""
    host, origin = _only(headers, b"host"), _only(headers, b"origin")
    places = [f"//{host}"] * bool(host) + [origin] * bool(origin)
    if all(is_loopback(_hostname(place)) for place in places):
        return None
    message = "without API keys this server answers to loopback names only, and to no foreign page"
    return Refusal(FORBIDDEN, "foreign_origin", message)


def _hostname(place: str) -> str:
    try:
        return urlsplit(place).hostname or ""
    except ValueError:
        return ""


def _only(headers: list[tuple[bytes, bytes]], wanted: bytes) -> str:
    """The one header of this name; "" where there is none, or more than one."""
    values = [value for name, value in headers if name == wanted]
    return values[0].decode("latin-1") if len(values) == 1 else ""
