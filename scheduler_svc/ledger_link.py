"""Which ledger this scheduler is bound to, and when another may take its place.

    nobody ─ the first one heard ─▶ bound ─ it leaves, or misses three beats, and another beats ─▶
    bound to that one

Invariants: of two that live, the one that is bound stays so; nobody is silent because this
scheduler was cut off itself. An epoch begins with the ledger whose blocks the worker has filled:
of it alone it is certain that what it has cached is what lies there.

Pure.
"""

from __future__ import annotations

from services.contracts.beats import Beat, ServiceKind

from .owners import CUT_OFF_NS, SUSPECT_NS


class LedgerLink:
    """name: of the ledger, "" before there is one. Names are new with every run of a ledger."""

    def __init__(self) -> None:
        self.name = ""
        self._heard_ns = 0
        self._leaving = False
        self._other = ""
        self._other_ns = 0
        self._last_beat_ns = 0

    def attached(self, last: str, now_ns: int) -> str:
        """An epoch begins at a worker that has filled blocks of `last`, or of nobody (""), -> the
        ledger to begin it with.
        """
        if not last:
            return self.choose(now_ns)
        if last != self.name:
            self.name, self._heard_ns, self._leaving = last, now_ns, False
        return self.name

    def hear(self, beat: Beat, now_ns: int) -> None:
        """A beat of any service."""
        if now_ns - self._last_beat_ns > CUT_OFF_NS:
            self._heard_ns = now_ns
        self._last_beat_ns = now_ns
        if beat.kind is not ServiceKind.KV_STORE:
            return
        if beat.service_id == self.name:
            self._heard_ns = now_ns
            self._leaving |= beat.leaving
        elif not beat.leaving:
            self._other, self._other_ns = beat.service_id, now_ns
        elif beat.service_id == self._other:
            self._other = ""

    def choose(self, now_ns: int) -> str:
        """The ledger to be bound to from now on."""
        gone = not self.name or self._leaving or now_ns - self._heard_ns > SUSPECT_NS
        if gone and self._other and now_ns - self._other_ns <= SUSPECT_NS:
            self.name, self._heard_ns, self._leaving = self._other, self._other_ns, False
            self._other = ""
        return self.name
