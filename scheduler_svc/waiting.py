"""Sequences that wait for a lane, in the order in which they will get one.

Pure.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator

from .load import QueueLoad
from .sequence import Sequence


class WaitingQueue:
    """Ordered by (priority, arrival); a sequence with an open lookup is passed over until it is
    answered.
    """

    def __init__(self) -> None:
        self._queue: list[Sequence] = []
        self._looking_up: set[int] = set()
        self.load = QueueLoad()

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._queue)

    def add(self, seq: Sequence) -> None:
        self.load.add(seq)
        insort(self._queue, seq, key=lambda other: other.order)

    def remove(self, seq: Sequence) -> None:
        self._queue.remove(seq)
        self.load.remove(seq)
        self._looking_up.discard(seq.uid)

    def ready(self) -> Iterator[Sequence]:
        """A copy of the order, without those whose lookup is under way."""
        return iter([seq for seq in self._queue if seq.uid not in self._looking_up])

    def begin_lookup(self, seq: Sequence) -> None:
        self._looking_up.add(seq.uid)

    def end_lookup(self, seq: Sequence) -> None:
        self._looking_up.discard(seq.uid)

    def is_passed_over(self, seq: Sequence) -> bool:
        return seq.uid in self._looking_up

    def head(self, count: int) -> list[Sequence]:
        return self._queue[:count]
