"""Ended requests, kept for a while: a client whose last frames were lost asks for them again.

Invariant: at most MAX_ENDED of them with MAX_ENDED_BYTES in all, for ENDED_SECONDS; the oldest go
first, and whose they were then hears nothing and asks for the request anew.

Pure.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

from services.contracts.limits import ENDED_SECONDS, MAX_ENDED, MAX_ENDED_BYTES
from services.contracts.public import Frame

from .open_request import OpenRequest

ENDED_NS: Final = ENDED_SECONDS * 1_000_000_000


@dataclass(frozen=True, slots=True)
class Ended:
    """`frame`: its terminal one, which is sent again as it was."""

    request: OpenRequest
    frame: Frame
    forget_ns: int
    num_bytes: int

    def frames(self, offset: int) -> list[Frame]:
        """From output token `offset` on; from the first where it ended before that."""
        first = offset if offset <= self.frame.offset else 0
        return [*self.request.shown_frames(first, self.frame.offset), self.frame]


class EndedRequests:
    def __init__(self) -> None:
        self._ended: OrderedDict[str, Ended] = OrderedDict()
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._ended)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._ended

    def find(self, request_id: str) -> Ended | None:
        return self._ended.get(request_id)

    def keep(self, request: OpenRequest, frame: Frame, now_ns: int) -> None:
        self.drop(request.request_id)
        ended = Ended(request, frame, now_ns + ENDED_NS, request.num_bytes)
        self._ended[request.request_id] = ended
        self._num_bytes += ended.num_bytes
        while len(self._ended) > MAX_ENDED or self._num_bytes > MAX_ENDED_BYTES:
            self.drop(next(iter(self._ended)))

    def drop(self, request_id: str) -> None:
        ended = self._ended.pop(request_id, None)
        if ended is not None:
            self._num_bytes -= ended.num_bytes

    def forget_old(self, now_ns: int) -> None:
        while self._ended and next(iter(self._ended.values())).forget_ns <= now_ns:
            self.drop(next(iter(self._ended)))
