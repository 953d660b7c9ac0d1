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


class SamplingParams(Message, frozen=True):
    """temperature: 0 is greedy. seed: uint64; the draw at a position depends on (seed, position)
    alone.

    num_logprobs, num_prompt_logprobs: -1 none, else the chosen token and this many of the
    likeliest.
    """

    temperature: Annotated[float, Meta(ge=0, le=limits.MAX_TEMPERATURE)] = 0.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Meta(ge=0, le=limits.MAX_TOKEN_ID)] = 0
    seed: int = 0
    num_logprobs: Annotated[int, Meta(ge=-1, le=limits.MAX_LOGPROBS)] = NO_LOGPROBS
    num_prompt_logprobs: Annotated[int, Meta(ge=-1, le=limits.MAX_LOGPROBS)] = NO_LOGPROBS


def uint64(seed: int) -> int:
    """A client's signed seed as the worker's unsigned one; -1 -> 2**64 - 1."""
    return seed & _MAX_UINT64
