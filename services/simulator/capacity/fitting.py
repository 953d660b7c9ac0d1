"""A step-time model from the steps of a live engine: least squares, no term below zero.

Pure: numpy only.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Final, NamedTuple

import numpy as np

from services.contracts.errors import StreetcarError
from services.contracts.step import StepEvent

from .step_time import LinearStepTime

MIN_STEPS: Final = 20
# A term whose column does not vary cannot be told from the constant.
_MIN_SPREAD: Final = 1e-9


class TooFewSteps(StreetcarError):
    """Not enough steps to fit a model to."""


class Fit(NamedTuple):
    """r2: share of the variance explained; 1 where all steps take the same time."""

    step_time: LinearStepTime
    num_steps: int
    r2: float


def fit(steps: Sequence[StepEvent], block_size: int) -> Fit:
    """t = a + b · tokens + c · KV tokens over `elapsed_us`; KV by the blocks held.

    Of all choices of terms whose coefficients are not negative, the one with the least squared
    error. Raises TooFewSteps below MIN_STEPS.
    """
    if len(steps) < MIN_STEPS:
        raise TooFewSteps(f"{len(steps)} steps; {MIN_STEPS} are needed")
    tokens = np.array([s.num_decode_tokens + s.num_prefill_tokens for s in steps], dtype=float)
    kv = np.array([s.num_blocks_held * block_size for s in steps], dtype=float)
    elapsed_ms = np.array([s.elapsed_us for s in steps], dtype=float) / 1e3
    columns = {"token_ms": tokens, "kv_token_ms": kv}
    names = [name for name, column in columns.items() if column.std() > _MIN_SPREAD]
    total = float(((elapsed_ms - elapsed_ms.mean()) ** 2).sum())
    best: tuple[float, float, dict[str, float]] = (total, float(elapsed_ms.mean()), {})
    for count in range(1, len(names) + 1):
        for chosen in combinations(names, count):
            matrix = np.column_stack([np.ones(len(steps)), *(columns[name] for name in chosen)])
            solution = np.linalg.lstsq(matrix, elapsed_ms, rcond=None)[0]
            error = float(((elapsed_ms - matrix @ solution) ** 2).sum())
            if (solution >= 0).all() and error < best[0]:
                factors = dict(zip(chosen, solution[1:].tolist(), strict=True))
                best = (error, float(solution[0]), factors)
    error, base_ms, factors = best
    r2 = 1 - error / total if total > 0 else 1.0
    return Fit(LinearStepTime(base_ms, **factors), len(steps), r2)
