"""How long will it get? What finished sequences teach of the output that is still to come.

Pure: numpy only.
"""

from __future__ import annotations

from collections import deque
from typing import Final

import numpy as np

from services.contracts.vectors import Int32Array

WINDOW: Final = 512
MIN_LEARNED: Final = 4


class OutputLengths:
    """Lengths of the last WINDOW finished outputs."""

    def __init__(self) -> None:
        self._recent: deque[int] = deque(maxlen=WINDOW)
        self._sorted = np.zeros(0, dtype=np.int64)
        self._suffix_sums = np.zeros(1, dtype=np.int64)
        self._stale = False

    @property
    def has_learned(self) -> bool:
        """Whether enough have finished to expect anything."""
        return len(self._recent) >= MIN_LEARNED

    def observe(self, num_output_tokens: int) -> None:
        """A sequence ended by itself, with so many output tokens."""
        self._recent.append(num_output_tokens)
        self._stale = True

    def expected_more(self, outputs: Int32Array, at_most: Int32Array) -> Int32Array:
        """int32 [n]: tokens still to come of sequences that have `outputs`, at most `at_most`.

        The mean of those finished outputs that were longer; past the longest of them, half of what
        is allowed. Nothing before MIN_LEARNED have finished: then the watermark alone decides.
        """
        if self._stale:
            self._sorted = np.sort(np.array(self._recent, dtype=np.int64))
            self._suffix_sums = np.append(np.cumsum(self._sorted[::-1])[::-1], 0)
            self._stale = False
        if len(self._sorted) < MIN_LEARNED:
            return np.zeros(len(outputs), dtype=np.int32)
        half = -(-at_most // 2)
        first = np.searchsorted(self._sorted, outputs, side="right")
        num_longer = len(self._sorted) - first
        mean = self._suffix_sums[first] // np.maximum(num_longer, 1) - outputs
        more = np.where(num_longer > 0, np.maximum(mean, 1), half)
        return np.minimum(more, at_most).astype(np.int32)
