"""How long will a step take? t = a + b * tokens, fitted online with forgetting; and how early to
publish a plan.

Pure.
"""

from __future__ import annotations

from typing import Final

FORGET: Final = 0.98
MIN_LEAD_NS: Final = 300_000
MAX_LEAD_NS: Final = 20_000_000
FIRST_LEAD_NS: Final = 2_000_000
# A late plan costs a whole lead of idle worker, an early one only keeps a newcomer waiting: rise
# fast, fall slowly.
LEAD_UP: Final = 1.3
LEAD_DOWN: Final = 0.995
SLACK_NS: Final = 200_000


class StepTimeModel:
    """Least squares over (tokens, ns) with exponential forgetting: five running sums, O(1) per
    step.
    """

    __slots__ = ("_n", "_t", "_tt", "_ty", "_y")

    def __init__(self) -> None:
        self._n = self._t = self._tt = self._y = self._ty = 0.0

    def observe(self, num_tokens: int, elapsed_ns: int) -> None:
        self._n = self._n * FORGET + 1.0
        self._t = self._t * FORGET + num_tokens
        self._tt = self._tt * FORGET + num_tokens * num_tokens
        self._y = self._y * FORGET + elapsed_ns
        self._ty = self._ty * FORGET + num_tokens * elapsed_ns

    def predict_ns(self, num_tokens: int) -> int:
        """0 before the first observation: the plan after an unknown step is published at once."""
        if self._n == 0.0:
            return 0
        mean_t, mean_y = self._t / self._n, self._y / self._n
        variance = self._tt / self._n - mean_t * mean_t
        covariance = self._ty / self._n - mean_t * mean_y
        slope = covariance / variance if variance > 1e-9 else 0.0
        return max(0, round(mean_y + max(0.0, slope) * (num_tokens - mean_t)))


class Lead:
    """How long before a step's predicted end its successor's plan is published.

    Follows the slack that the worker reports: how long a plan had lain there when its step began.
    """

    __slots__ = ("_ns",)

    def __init__(self) -> None:
        self._ns = float(FIRST_LEAD_NS)

    @property
    def ns(self) -> int:
        return round(self._ns)

    def observe(self, waited_ns: int) -> None:
        factor = LEAD_UP if waited_ns < SLACK_NS else LEAD_DOWN
        self._ns = min(MAX_LEAD_NS, max(MIN_LEAD_NS, self._ns * factor))
