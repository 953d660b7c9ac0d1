"""How large a step may be, where the worker has had no memory for one.

    a step of n tokens did not fit ─▶ at most n / 2 tokens and sequences ─▶ ... ─▶ one sequence
    GOOD_STEPS that fit ─▶ twice as much ─▶ ... ─▶ no ceiling

Invariants: the ceiling is 1 at least; after a step that did not fit, the next one is smaller, or
one of the MAX_TRIES of a sequence that was alone in a small step is used up, so that tries end.

Pure.
"""

from __future__ import annotations

from typing import Final

from .sequence import Sequence

NO_CEILING: Final = 1 << 30
# A sequence alone that does not fit with so few tokens is not helped by fewer.
SMALL_STEP_TOKENS: Final = 16
MAX_TRIES: Final = 2
GOOD_STEPS: Final = 256

DOES_NOT_FIT: Final = (
    "the worker's memory does not hold the smallest step of this request alone; shorten it, or run"
    " the engine with fewer KV blocks (--num-blocks) or more memory"
)


def lowered(ceiling: int, num_tokens: int) -> int:
    """The ceiling after a step of `num_tokens` did not fit: a step of 100 under 512: 50."""
    return max(1, min(ceiling, num_tokens) // 2)


class StepMemory:
    """ceiling: tokens of a step, and sequences that run; it outlives the epochs."""

    def __init__(self) -> None:
        self.ceiling = NO_CEILING
        self._num_good = 0

    def did_not_fit(self, num_tokens: int, seqs: list[Sequence]) -> Sequence | None:
        """A step of `num_tokens` of `seqs` -> the one that can never fit, if it was alone."""
        self.ceiling = lowered(self.ceiling, num_tokens)
        self._num_good = 0
        if len(seqs) > 1 or num_tokens > SMALL_STEP_TOKENS:
            return None
        seqs[0].num_unfit += 1
        return seqs[0] if seqs[0].num_unfit >= MAX_TRIES else None

    def fitted(self) -> None:
        """A step has run."""
        if self.ceiling == NO_CEILING:
            return
        self._num_good += 1
        if self._num_good == GOOD_STEPS:
            self.ceiling = min(2 * self.ceiling, NO_CEILING)
            self._num_good = 0
