"""How a sequence's next token is drawn, as the worker sees it.

Pure.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from . import limits
from .codec import Message

NO_LOGPROBS = -1
_MAX_UINT64 = 2**64 - 1

Penalty = Annotated[float, Meta(ge=-limits.MAX_PENALTY, le=limits.MAX_PENALTY)]


class SamplingParams(Message, frozen=True):
    """temperature: 0 is greedy. seed: uint64; the draw at a position depends on (seed, position)
    alone.

    num_logprobs, num_prompt_logprobs: -1 none, else the chosen token and this many of the
    likeliest.

    min_p: tokens less likely than this share of the likeliest are left out; 0 is off.
    repetition_penalty counts the tokens of the prompt as well, presence_penalty and
    frequency_penalty those of the output alone; 1, 0 and 0 are off.
    """

    temperature: Annotated[float, Meta(ge=0, le=limits.MAX_TEMPERATURE)] = 0.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Meta(ge=0, le=limits.MAX_TOKEN_ID)] = 0
    seed: int = 0
    num_logprobs: Annotated[int, Meta(ge=-1, le=limits.MAX_LOGPROBS)] = NO_LOGPROBS
    num_prompt_logprobs: Annotated[int, Meta(ge=-1, le=limits.MAX_LOGPROBS)] = NO_LOGPROBS
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Meta(gt=0, le=limits.MAX_REPETITION_PENALTY)] = 1.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0

    @property
    def penalises(self) -> bool:
        """Whether a token depends on how often those before it occurred."""
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        return penalties != (1.0, 0.0, 0.0)


def uint64(seed: int) -> int:
    """A client's signed seed as the worker's unsigned one; -1 -> 2**64 - 1."""
    return seed & _MAX_UINT64
