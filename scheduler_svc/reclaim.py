"""Getting blocks back when the ledger has none: idle pins first, then one victim at a time.

Preempting again before the last victim's blocks are back would empty the batch for a shortage of
one block, so there is patience until they have come home.

Pure.
"""

from __future__ import annotations

from collections.abc import Iterable

from .policies.victim import choose_victim
from .sequence import Sequence


class Reclaim:
    """`under_way`: a victim's blocks are still named by steps in flight."""

    def __init__(self) -> None:
        self._victim: Sequence | None = None

    @property
    def under_way(self) -> bool:
        return self._victim is not None

    def choose(self, running: Iterable[Sequence | None]) -> Sequence | None:
        """Whom to preempt; None where at most one runs, which always fits alone."""
        candidates = [seq for seq in running if seq is not None]
        if len(candidates) < 2:
            return None
        self._victim = choose_victim(candidates)
        return self._victim

    def returned(self, seq: Sequence) -> None:
        if seq is self._victim:
            self._victim = None
