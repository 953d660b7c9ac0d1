"""Numbered streams: how a receiver knows that it has missed, or already has, a message.

Core NATS loses silently, so every stream that matters is numbered from 1 by its publisher, and
beats name the last number sent, so that a lost last message is noticed too.

Pure.
"""

from __future__ import annotations

from enum import StrEnum


class Arrival(StrEnum):
    NEXT = "next"
    DUPLICATE = "duplicate"
    GAP = "gap"


class StreamReceiver:
    """Receiver's side of one numbered stream.

    Invariant: `last` only grows between restarts.
    """

    __slots__ = ("last",)

    def __init__(self, last: int = 0) -> None:
        self.last = last

    def arrive(self, number: int) -> Arrival:
        """Classify message `number`; only NEXT moves the stream on.

        last = 4: 5 -> NEXT, 4 -> DUPLICATE, 6 -> GAP (5 is missing, and 6 is not taken).
        """
        if number == self.last + 1:
            self.last = number
            return Arrival.NEXT
        return Arrival.DUPLICATE if number <= self.last else Arrival.GAP

    def behind(self, last_sent: int) -> bool:
        """True where a beat that names `last_sent` proves that a message is missing."""
        return last_sent > self.last

    def restart(self, last: int) -> None:
        """The gap was repaired by other means (a snapshot, a resubmission): go on after `last`."""
        self.last = last
