"""When a step has taken so long that it will not end: the worker's own judgement of itself.

A worker knows its steps by their size. It cannot know more of one that is larger than all it has
run; then the time is taken to grow with the tokens.

Pure.
"""

from __future__ import annotations

from typing import Final

from services.contracts.limits import MIN_STEP_LIMIT_S, STEP_LIMIT_FACTOR

SECOND_NS: Final = 1_000_000_000
# Before any step has ended: it may be a long prompt on a slow machine, and its first.
FIRST_STEP_LIMIT_S: Final = 300
# An overlong step must not stretch the limit of all later ones for ever.
FORGET: Final = 0.9


class StepTimes:
    """The longest lately, by size class: 1, 2-3, 4-7, ... tokens."""

    def __init__(self) -> None:
        self._longest_ns: dict[int, float] = {}

    def observe(self, num_tokens: int, elapsed_ns: int) -> None:
        size = num_tokens.bit_length()
        self._longest_ns[size] = max(elapsed_ns, self._longest_ns.get(size, 0.0) * FORGET)

    def limit_ns(self, num_tokens: int) -> int:
        """max(10 s, 10 x predicted) for a step of so many tokens.

        128 tokens took 2 s, nothing larger was seen: 512 may take 4 x 2 x 10 = 80 s.
        """
        size = num_tokens.bit_length()
        known = [other for other in self._longest_ns if other <= size]
        if known:
            nearest = max(known)
            predicted_ns = self._longest_ns[nearest] * (1 << (size - nearest))
        elif self._longest_ns:
            predicted_ns = self._longest_ns[min(self._longest_ns)]
        else:
            return FIRST_STEP_LIMIT_S * SECOND_NS
        return max(MIN_STEP_LIMIT_S * SECOND_NS, round(STEP_LIMIT_FACTOR * predicted_ns))
