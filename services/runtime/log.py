"""How a service speaks: structured logs on standard error, status lines on standard output.

Invariants: a log line is one JSON object; what a person wrote or a model said is never logged
(fields of those names are replaced); a status line is one JSON object of at most 4,096 bytes,
written at once, so that lines of several threads never mix.

Shell: writes to file descriptors 1 and 2.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
from collections.abc import MutableMapping
from typing import Any, Final

import structlog

PRIVATE_FIELDS: Final = frozenset(
    {
        "authorization",
        "content",
        "messages",
        "prompt",
        "prompt_token_ids",
        "stop",
        "text",
        "token_ids",
        "api_key",
    }
)
MAX_STATUS_BYTES: Final = 4096
MAX_STATUS_TEXT_BYTES: Final = 1500
_STATUS_FD: Final = 1

Logger = structlog.stdlib.BoundLogger


def configure_logging(service: str, level: str = "info") -> None:
    """Send structlog and the standard library's logs to standard error as JSON lines."""
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.PositionalArgumentsFormatter(),
        _hide_private_fields,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
    ]
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.stdlib.BoundLogger,
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                structlog.processors.JSONRenderer(),
            ],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    structlog.contextvars.bind_contextvars(service=service, pid=os.getpid())


def get_logger(name: str) -> Logger:
    """A logger; its fields are names and numbers, never text of a request."""
    logger: Logger = structlog.stdlib.get_logger(name)
    return logger


def report_ready(**fields: str | int | float) -> None:
    """Tell the supervisor that this service serves; `fields` are addresses, ids, sizes."""
    _report({"event": "ready", "fields": fields})


def report_progress(fraction: float, text: str) -> None:
    """Tell the supervisor how far a start has come: `fraction` in [0, 1], and of what."""
    clamped = min(max(fraction, 0.0), 1.0)
    _report({"event": "progress", "fraction": round(clamped, 4), "text": _clip(text)})


def report_leaving() -> None:
    """Tell the supervisor that this service begins nothing new; a successor may take its place."""
    _report({"event": "leaving"})


def report_fatal(code: str, message: str, fix: str = "") -> None:
    """Tell the supervisor that a restart would not help; the caller exits with 1 next.

    `code` is a Problem's code (`E3xx` for model files); `message` is shown to the person as is.
    """
    _report(
        {
            "event": "fatal",
            "code": code,
            "message": _clip(message),
            "fix": _clip(fix),
        }
    )


def _clip(text: str) -> str:
    return text.encode()[:MAX_STATUS_TEXT_BYTES].decode(errors="ignore")


def _report(status: dict[str, Any]) -> None:
    line = json.dumps(status, separators=(",", ":"), ensure_ascii=False).encode() + b"\n"
    if len(line) > MAX_STATUS_BYTES:
        # Only text full of control characters grows so in JSON; the rest still goes through.
        line = json.dumps(status | {"text": "", "message": "", "fix": ""}).encode() + b"\n"
    # A reader that is gone is the supervisor's end, which ends this process by other means.
    with contextlib.suppress(BrokenPipeError):
        os.write(_STATUS_FD, line)


def _hide_private_fields(
    _logger: object, _method: str, event: MutableMapping[str, Any]
) -> MutableMapping[str, Any]:
    for name in PRIVATE_FIELDS & event.keys():
        event[name] = "[hidden]"
    return event
