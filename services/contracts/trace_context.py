"""W3C trace context: which trace a message belongs to, and whether it is recorded.

https://www.w3.org/TR/trace-context/: `traceparent` is `00-<32 hex>-<16 hex>-<2 hex>`, lower case,
neither id all zeros; bit 0 of the flags says that the trace is sampled. What does not parse is
ignored, as if it were absent.

Pure.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Final

from .limits import MAX_TRACESTATE_CHARS

TRACEPARENT: Final = "traceparent"
TRACESTATE: Final = "tracestate"

_SAMPLED: Final = 1
_PARENT: Final = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_MEMBER: Final = re.compile(r"[a-z0-9][a-z0-9_\-*/@]{0,255}=[\x20-\x2b\x2d-\x3c\x3e-\x7e]{0,256}")
_MAX_MEMBERS: Final = 32
_RATIO_BITS: Final = 64


@dataclass(frozen=True, slots=True)
class TraceContext:
    """A span's place: trace_id 32 and span_id 16 lower-case hex digits."""

    trace_id: str
    span_id: str
    sampled: bool
    tracestate: str = ""

    @property
    def traceparent(self) -> str:
        return f"00-{self.trace_id}-{self.span_id}-{'01' if self.sampled else '00'}"

    def child(self, span_id: str) -> TraceContext:
        """The place of a span below this one."""
        return replace(self, span_id=span_id)


def parse_traceparent(text: str, tracestate: str = "") -> TraceContext | None:
    """The context in `text`, or None where it is not one.

    Of a version later than 00 the four known fields are read and the rest is left alone.
    """
    match = _PARENT.fullmatch(text)
    if match is None:
        return None
    version, trace_id, span_id, flags, rest = match.groups()
    if version == "ff" or (version == "00" and rest is not None):
        return None
    if not trace_id.strip("0") or not span_id.strip("0"):
        return None
    sampled = bool(int(flags, 16) & _SAMPLED)
    return TraceContext(trace_id, span_id, sampled, clean_tracestate(tracestate))


def clean_tracestate(text: str) -> str:
    """`text` where it is a list of at most 32 members and 512 characters, else ""."""
    if len(text) > MAX_TRACESTATE_CHARS:
        return ""
    members = [member.strip(" \t") for member in text.split(",")]
    members = [member for member in members if member]
    if len(members) > _MAX_MEMBERS or not all(map(_MEMBER.fullmatch, members)):
        return ""
    return ",".join(members)


def is_sampled(traceparent: str) -> bool:
    """Whether `traceparent`, as our own services write it, asks to be recorded."""
    return traceparent.endswith("1")


def within_ratio(trace_id: str, ratio: float) -> bool:
    """Whether a new trace is sampled: the low 64 bits of its id against the ratio, so that all
    services agree (as OpenTelemetry's TraceIdRatioBased).
    """
    return int(trace_id[16:], 16) < round(ratio * (1 << _RATIO_BITS))
