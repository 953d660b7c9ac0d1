"""The routes of the gateway.

Invariant: whatever is asked, the answer is JSON (or events, or metrics), errors included.

Shell: HTTP.
"""

from __future__ import annotations

import time
from typing import Any, Final

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from services.contracts.errors import ErrorCode
from services.gateway import asking
from services.gateway.answers import ChatDialect, CompletionDialect
from services.gateway.disconnect import ClientGone
from services.gateway.refusals import JSON, Refusal
from services.gateway.serving import Gateway, serve
from services.runtime.log import get_logger

OWNER: Final = "streetcar"
CLIENT_GONE: Final = 499

_encode = msgspec.json.Encoder().encode


def build_app(gateway: Gateway) -> Starlette:
    """The ASGI application over `gateway`."""
    completion_dialect, chat_dialect = CompletionDialect(), ChatDialect()
    started = int(time.time())

    async def completions(request: Request) -> Response:
        return await serve(gateway, request, asking.completion, completion_dialect)

    async def chat_completions(request: Request) -> Response:
        return await serve(gateway, request, asking.chat, chat_dialect)

    async def models(_request: Request) -> Response:
        known = gateway.view.models(time.monotonic_ns())
        data = [_model(name, length, started) for name, length in known.items()]
        return _json({"object": "list", "data": data})

    async def model(request: Request) -> Response:
        name = request.path_params["name"]
        known = gateway.view.models(time.monotonic_ns())
        if name not in known:
            listed = ", ".join(known) or "none yet"
            message = f"model {name[:64]!r} is not served here; known: {listed}"
            raise Refusal(404, ErrorCode.MODEL_NOT_FOUND.value, message)
        return _json(_model(name, known[name], started))

    async def livez(_request: Request) -> Response:
        return _json({"live": True})

    async def readyz(_request: Request) -> Response:
        missing = gateway.missing(time.monotonic_ns())
        return _json({"ready": not missing, "missing": missing}, 503 if missing else 200)

    async def metrics(_request: Request) -> Response:
        return Response(gateway.metrics.exposition(), media_type=CONTENT_TYPE_LATEST)

    return Starlette(
        routes=[
            Route("/v1/completions", completions, methods=["POST"]),
            Route("/v1/chat/completions", chat_completions, methods=["POST"]),
            Route("/v1/models", models),
            Route("/v1/models/{name}", model),
            Route("/livez", livez),
            Route("/readyz", readyz),
            Route("/metrics", metrics),
        ],
        exception_handlers={
            Refusal: _on_refusal,
            ClientGone: _on_client_gone,
            HTTPException: _on_http_error,
            Exception: _on_failure,
        },
    )


def _model(name: str, max_model_len: int, created: int) -> dict[str, Any]:
    entry = {"id": name, "object": "model", "created": created, "owned_by": OWNER}
    return entry | ({"max_model_len": max_model_len} if max_model_len else {})


def _json(value: object, status: int = 200) -> Response:
    return Response(_encode(value), status, media_type=JSON)


async def _on_refusal(_request: Request, error: Exception) -> Response:
    assert isinstance(error, Refusal)
    return error.response()


async def _on_client_gone(_request: Request, _error: Exception) -> Response:
    """Nobody reads it; the server wants an answer all the same."""
    return Response(status_code=CLIENT_GONE)


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path[:200]}: {error.detail}"
    response = Refusal(error.status_code, "http_error", message).response()
    response.headers.update(error.headers or {})
    return response


async def _on_failure(_request: Request, error: Exception) -> Response:
    get_logger("gateway").error("request_failed", kind=type(error).__name__)
    return Refusal(500, ErrorCode.INTERNAL.value, "the gateway failed; see its log").response()
