"""When a dead service is started again, and when that is given up.

Invariant: a service that keeps dying before it is ready is given up after `MAX_FAILED_STARTS`
tries; one that becomes ready in between may die any number of times, but not more than
`MAX_DEATHS` times within `WINDOW_S` seconds.

Pure: the time is an argument.
"""

from __future__ import annotations

from collections import deque
from typing import Final

FIRST_DELAY_S: Final = 0.05
MAX_DELAY_S: Final = 5.0
MAX_FAILED_STARTS: Final = 5
MAX_DEATHS: Final = 30
WINDOW_S: Final = 60.0


class RestartPolicy:
    """The deaths of one service, and the delay before its next start."""

    def __init__(self) -> None:
        self._failed_starts = 0
        self._deaths: deque[float] = deque(maxlen=MAX_DEATHS)

    def on_ready(self) -> None:
        """The service serves: its earlier failed starts are forgotten."""
        self._failed_starts = 0

    def on_death(self, now_s: float, *, was_ready: bool) -> float | None:
        """Seconds to wait before the next start, or None to give up.

        `now_s` is monotonic. The delay doubles with each start that failed in a row.
        """
        self._failed_starts = 0 if was_ready else self._failed_starts + 1
        self._deaths.append(now_s)
        crowded = len(self._deaths) == MAX_DEATHS and now_s - self._deaths[0] < WINDOW_S
        if crowded or self._failed_starts >= MAX_FAILED_STARTS:
            return None
        return min(MAX_DELAY_S, FIRST_DELAY_S * 2.0**self._failed_starts)
