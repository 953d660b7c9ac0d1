"""Finds stop strings in text that arrives in pieces, and says what may be shown.

Invariants: the answer does not depend on how the text was cut into pieces; text is held back only
while it may still be the beginning of a stop string; after a match nothing more is shown.

Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopStep:
    """`text` may be shown now; `matched`: a stop string has ended, and the sequence with it."""

    text: str
    matched: bool


class _Needle:
    """One stop string as a Knuth-Morris-Pratt automaton; `length` characters of it are matched."""

    __slots__ = ("failure", "length", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.length = 0
        self.failure = _failure_table(text)

    def advance(self, character: str) -> bool:
        """Take one character; True where the whole string has been seen. Amortised O(1)."""
        while self.length and self.text[self.length] != character:
            self.length = self.failure[self.length - 1]
        if self.text[self.length] == character:
            self.length += 1
        return self.length == len(self.text)


class StopMatcher:
    """Stops at the first place in the text where any of `stops` ends.

    Where several end at the same character, the longest wins. With `include` the stop string is
    shown, else the text ends just before it. Empty stop strings are refused before they come here.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        assert all(stops), "an empty stop string would match everywhere"
        self._needles = [_Needle(stop) for stop in stops]
        self._first = frozenset(stop[0] for stop in stops)
        self._include = include
        self._held = ""
        self.matched = False

    @property
    def waits_for_nothing(self) -> bool:
        return not self._needles

    def push(self, text: str) -> StopStep:
        """Take the next piece of text."""
        assert not self.matched, "text after a stop"
        if not self._held and self._first.isdisjoint(text):
            return StopStep(text, False)
        known = self._held + text
        for index in range(len(self._held), len(known)):
            length = self._advance(known[index])
            if length:
                self._held = ""
                self.matched = True
                end = index + 1
                return StopStep(known[: end if self._include else end - length], True)
        num_held = max(needle.length for needle in self._needles)
        cut = len(known) - num_held
        self._held = known[cut:]
        return StopStep(known[:cut], False)

    def flush(self) -> str:
        """The text that was held back; for the end of a sequence that did not match."""
        held, self._held = self._held, ""
        return held

    def _advance(self, character: str) -> int:
        """Length of the longest stop string that ends at `character`, or 0."""
        longest = 0
        for needle in self._needles:
            if needle.advance(character):
                longest = max(longest, len(needle.text))
        return longest


def _failure_table(text: str) -> list[int]:
    """[i]: length of the longest proper prefix of text[: i + 1] that ends it. "aab" -> 0 1 0."""
    table = [0] * len(text)
    length = 0
    for index in range(1, len(text)):
        while length and text[index] != text[length]:
            length = table[length - 1]
        if text[index] == text[length]:
            length += 1
        table[index] = length
    return table
