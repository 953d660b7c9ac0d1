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
# Where the peak is looked for, in expected remaining lengths.
FRACTIONS: Final = (0.25, 0.5, 1.0, 2.0)
# Standard deviations above what is expected, which is exceeded half the time.
SPREAD: Final = 2.5


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

    def peak_tokens(self, tokens: Int32Array, outputs: Int32Array, at_most: Int32Array) -> int:
        """Most tokens that sequences will hold at once from now on, as far as can be told.

        tokens, outputs, at_most: int32 [n], what each holds, has put out, and may still add. Of
        those finished outputs that were longer than its own, a share was longer by `ahead` or more:
        so likely is a sequence still there then, and has grown by `ahead`. With outputs of 50, two
        sequences that hold 10 and 50, and have put out 0 and 40: the peak is 20 + 60, just before
        the second ends. Past the longest output known a sequence is taken to run half of what it
        may.
        """
        more = self.expected_more(outputs, at_most)
        first = np.searchsorted(self._sorted, outputs, side="right")
        num_longer = len(self._sorted) - first
        peak = float(tokens.sum())
        typical = np.sort(more)[[0, len(more) // 2, -1]].tolist()
        for ahead in {max(1, round(fraction * some)) for fraction in FRACTIONS for some in typical}:
            num_left = len(self._sorted) - np.searchsorted(self._sorted, outputs + ahead)
            known = num_left / np.maximum(num_longer, 1)
            share = np.where(num_longer > 0, known, ahead <= more) * (ahead <= at_most)
            grown = tokens + float(ahead)
            variance = (share * (1 - share) * grown * grown).sum()
            peak = max(peak, float((share * grown).sum() + SPREAD * np.sqrt(variance)))
        return round(peak)
