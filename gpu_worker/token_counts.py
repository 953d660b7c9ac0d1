"""Which tokens a lane has, and how often in its output: what penalties are computed from.

Invariants: the counts are those of the lane's tokens, however it came by them: at its join, or one
by one; a token is listed once.

Pure: numpy only.
"""

from __future__ import annotations

import numpy as np

from gpu_worker.inputs import Int32s

MIN_ROOM = 64


class TokenCounts:
    """Of one lane.

    token_ids:         (n) int32 - prompt, then output
    num_prompt_tokens: where the output begins
    """

    def __init__(self, token_ids: Int32s, num_prompt_tokens: int) -> None:
        seen, inverse = np.unique(token_ids, return_inverse=True)
        self._size = len(seen)
        self._ids: Int32s = np.zeros(max(MIN_ROOM, 2 * self._size), dtype=np.int32)
        self._counts: Int32s = np.zeros_like(self._ids)
        self._ids[: self._size] = seen
        output = inverse[num_prompt_tokens:]
        self._counts[: self._size] = np.bincount(output, minlength=self._size)
        self._index = {token: at for at, token in enumerate(seen.tolist())}

    def add(self, token_id: int) -> None:
        """One more token of the output."""
        at = self._index.setdefault(token_id, self._size)
        if at == self._size:
            if at == len(self._ids):
                self._ids = np.concatenate((self._ids, np.zeros_like(self._ids)))
                self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
            self._ids[at] = token_id
            self._size += 1
        self._counts[at] += 1

    def columns(self) -> tuple[Int32s, Int32s]:
        """(token ids, how often each stands in the output), views that the next ``add`` changes."""
        return self._ids[: self._size], self._counts[: self._size]
