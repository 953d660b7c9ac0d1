"""Getting blocks back when the ledger has none: one victim at a time, and patience until its blocks
have come home.

Preempting again before the last victim's blocks are back would empty the batch for a shortage of
one block.

Pure.
"""

from __future__ import annotations

from .lanes import LaneTable
from .policy import victim
from .sequence import Sequence


class Reclaim:
    def __init__(self) -> None:
        self._victim: Sequence | None = None

    @property
    def under_way(self) -> bool:
        return self._victim is not None

    def choose(self, lanes: LaneTable) -> Sequence | None:
        """Whom to preempt; None where at most one runs, which always fits alone."""
        running = [seq for seq in lanes.sequences if seq is not None]
        return victim(running) if len(running) > 1 else None

    def begin(self, seq: Sequence) -> None:
        self._victim = seq

    def returned(self, seq: Sequence) -> None:
        if seq is self._victim:
            self._victim = None
