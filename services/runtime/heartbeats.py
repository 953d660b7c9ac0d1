"""Which of the services that should beat have fallen silent.

A process that lives and does not beat hangs: it is stopped, or its loop is stuck. Whoever listens
must be sure of its own ears first: after any trouble with the bus, or a sleep of its own, it
forgives everybody and begins to count anew.

Pure: the time is an argument.
"""

from __future__ import annotations

from typing import Final

SILENT_S: Final = 4.0


class Heartbeats:
    """By name of the service; times in seconds, monotonic."""

    def __init__(self, silent_s: float = SILENT_S) -> None:
        self._silent_s = silent_s
        self._ready: set[str] = set()
        self._heard: dict[str, float] = {}

    def expect(self, name: str) -> None:
        """It has become ready: from its next beat on it must be heard."""
        self._ready.add(name)

    def forget(self, name: str) -> None:
        """It has ended, or is being stopped."""
        self._ready.discard(name)
        self._heard.pop(name, None)

    def heard(self, name: str, now_s: float) -> None:
        # A beat may be late, and its sender gone.
        if name in self._ready:
            self._heard[name] = now_s

    def forgive(self, now_s: float) -> None:
        """What was not heard until now does not count."""
        self._heard = dict.fromkeys(self._heard, now_s)

    def silent(self, now_s: float) -> dict[str, float]:
        """Those that have not been heard for too long, and for how long; each is told once."""
        found = {
            name: now_s - then
            for name, then in self._heard.items()
            if now_s - then > self._silent_s
        }
        for name in found:
            self.forget(name)
        return found
