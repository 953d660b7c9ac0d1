"""The eight prompts of `streetcar demo`: from a few tokens to several hundred.

Pure: data.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

SYSTEM: Final = (
    "You are the conductor of a streetcar in a small town by the sea. You answer passengers in "
    "plain words, kindly and briefly, and you never make up a stop that is not on the line."
)
"""Common to all prompts: its blocks are computed once and shared."""

_STOPS: Final = (
    "Harbour, Fish Market, Old Bridge, Town Hall, Museum, Library, Theatre, Park Gate, Hospital, "
    "University, Stadium, Brewery, Windmill, Lighthouse, Beach"
)
_LOG: Final = " ".join(
    f"At {6 + i // 4:02d}:{15 * (i % 4):02d} car {i % 5 + 1} left stop {i + 1} with "
    f"{(7 * i) % 31 + 2} passengers; {(5 * i) % 11} got off and {(3 * i) % 13} got on."
    for i in range(24)
)


@dataclass(frozen=True, slots=True)
class DemoPrompt:
    """What is asked, under which title, and how many tokens may answer."""

    title: str
    text: str
    max_tokens: int


PROMPTS: Final = (
    DemoPrompt("a word", "Hello!", 16),
    DemoPrompt("a fact", "What is the capital of France?", 24),
    DemoPrompt("a list", "Name three fruits that grow near the sea.", 48),
    DemoPrompt("a poem", "Write four lines about a streetcar in the rain.", 64),
    DemoPrompt("the stops", f"The stops are: {_STOPS}. Which stop is right after Library?", 32),
    DemoPrompt(
        "a story",
        "A child has lost a red balloon between two stops. Tell what happened, in a few sentences, "
        "with a happy end, and let the conductor play a part in it.",
        64,
    ),
    DemoPrompt("a summary", f"Sum up the log of this morning in one sentence. {_LOG[:900]}", 40),
    DemoPrompt("the whole log", f"Which car was the fullest, and when? {_LOG}", 40),
)
