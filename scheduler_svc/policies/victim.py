"""Who gives way when blocks are short.

Pure.
"""

from __future__ import annotations

from collections.abc import Iterable

from scheduler_svc.sequence import Sequence


def choose_victim(running: Iterable[Sequence]) -> Sequence:
    """The newest of the lowest priority (largest number)."""
    return max(running, key=lambda seq: seq.order)
