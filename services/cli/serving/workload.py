"""The requests of a serving measurement: the same for every engine that is asked.

Prompts of 32 to 256 common words, so that no tokenizer splits them much; output lengths log-normal
with a median of about 60 tokens, within 16 and 192. One seed gives one list, on any machine.

Pure: randomness is the seed's.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Final

PROMPT_WORDS: Final = (32, 256)
OUTPUT_TOKENS: Final = (16, 192)
LOG_MEAN: Final = 4.1
LOG_SIGMA: Final = 0.7

# The order matters: it is part of what the seed means.
_TEXT: Final = (
    "the of and to in a is that for it as was with be by on not he his but at are this have from "
    "or had an they which one you were all her she there would their we him been has when who "
    "will no more if out so up said what its about than into them can only other time new some "
    "could these two may first then do"
)
WORDS: Final = _TEXT.split()


@dataclass(frozen=True, slots=True)
class Job:
    prompt: str
    max_tokens: int


def jobs(count: int, seed: int) -> list[Job]:
    """`count` requests, each drawn in the order: length of the prompt, its words, its output."""
    rng = random.Random(seed)
    return [_draw(rng) for _ in range(count)]


def _draw(rng: random.Random) -> Job:
    num_words = rng.randint(*PROMPT_WORDS)
    prompt = " ".join(rng.choice(WORDS) for _ in range(num_words))
    low, high = OUTPUT_TOKENS
    return Job(prompt, max(low, min(high, int(rng.lognormvariate(LOG_MEAN, LOG_SIGMA)))))


def arrivals(count: int, rate: float, seed: int) -> list[float]:
    """Seconds from the start at which `count` requests arrive: a Poisson process of `rate` a
    second.
    """
    rng = random.Random(seed)
    times, at = [], 0.0
    for _ in range(count):
        times.append(at)
        at += rng.expovariate(rate)
    return times
