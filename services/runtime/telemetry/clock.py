"""Wall time from the monotonic clock, by an offset taken once.

Invariant: a wall clock that is set while the service runs changes no span: two spans of one process
are as far apart as its monotonic clock says.

Shell: reads both clocks.
"""

from __future__ import annotations

import time


class WallClock:
    """Taken at construction."""

    def __init__(self) -> None:
        self._offset_ns = time.time_ns() - time.monotonic_ns()

    def unix_ns(self, monotonic_ns: int) -> int:
        return monotonic_ns + self._offset_ns
