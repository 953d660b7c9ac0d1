"""How long will a step take? t = a + b * tokens + c * KV, fitted online; and when to publish a
plan.

Pure.
"""

from __future__ import annotations

from typing import Final

FORGET: Final = 0.98
# Weight of the last estimate against new steps: keeps a slope that no recent step has tested.
MEMORY: Final = 1e-3
# Steps after which the fit is renewed; at each of the first ones.
REFIT_EVERY: Final = 8
FIRST_STEPS: Final = 64
# Scales that bring the three terms near 1: tokens of a step, tokens of KV, milliseconds.
TOKENS: Final = 1e-2
KV: Final = 1e-4
MS: Final = 1e-6

MIN_LEAD_NS: Final = 300_000
MAX_LEAD_NS: Final = 20_000_000
FIRST_LEAD_NS: Final = 2_000_000
# A late plan costs a whole lead of idle worker, an early one only keeps a newcomer waiting: rise
# fast, fall slowly.
LEAD_UP: Final = 1.3
LEAD_DOWN: Final = 0.995
SLACK_NS: Final = 200_000

_Vector = list[float]


class StepTimeModel:
    """Least squares with exponential forgetting, pulled weakly to the estimate before: O(1) a step.

    longest_seen: most tokens of any step so far. _moments: weighted sums over the steps of 1, x, k,
    xx, xk, kk, y, xy, ky (x: tokens, k: KV, y: time).
    """

    def __init__(self) -> None:
        self.longest_seen = 0
        self._moments: _Vector = [0.0] * 9
        self._fit: _Vector = [0.0] * 3
        self._num_steps = 0
        self._num_unfitted = 0

    def observe(self, num_tokens: int, num_kv_tokens: int, elapsed_ns: int) -> None:
        self.longest_seen = max(self.longest_seen, num_tokens)
        x, k, y = num_tokens * TOKENS, num_kv_tokens * KV, elapsed_ns * MS
        news = (1.0, x, k, x * x, x * k, k * k, y, x * y, k * y)
        self._moments = [old * FORGET + new for old, new in zip(self._moments, news, strict=True)]
        self._num_steps += 1
        self._num_unfitted += 1

    def predict_ns(self, num_tokens: int, num_kv_tokens: int) -> int:
        """0 before the first observation: the plan after an unknown step is published at once."""
        wait = 1 if self._num_steps <= FIRST_STEPS else REFIT_EVERY
        if self._num_unfitted >= wait:
            self._refit()
        a, b, c = self._fit
        return max(0, round((a + b * num_tokens * TOKENS + c * num_kv_tokens * KV) / MS))

    def _refit(self) -> None:
        n, x, k, xx, xk, kk, *products = self._moments
        matrix = [[n + MEMORY, x, k], [x, xx + MEMORY, xk], [k, xk, kk + MEMORY]]
        a, b, c = _solve(
            matrix, [p + MEMORY * fit for p, fit in zip(products, self._fit, strict=True)]
        )
        # A step does not get shorter by doing more: noise must not make the budget think so.
        self._fit = [a, max(0.0, b), max(0.0, c)]
        self._num_unfitted = 0


def _solve(m: list[_Vector], v: _Vector) -> _Vector:
    """x of m x = v, for a symmetric positive definite m of 3 rows (Gauss, no pivoting needed)."""
    rows = [[*m[i], v[i]] for i in range(3)]
    for i in range(3):
        for j in range(i + 1, 3):
            factor = rows[j][i] / rows[i][i]
            rows[j] = [rows[j][k] - factor * rows[i][k] for k in range(4)]
    x = [0.0] * 3
    for i in (2, 1, 0):
        known = sum(rows[i][k] * x[k] for k in range(i + 1, 3))
        x[i] = (rows[i][3] - known) / rows[i][i]
    return x


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
