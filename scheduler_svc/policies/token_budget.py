"""How many tokens may a step have? A fixed number, or what keeps the inter-token time.

Pure.
"""

from __future__ import annotations

from typing import Final, Protocol

# Where nothing is known of longer steps yet, a chunk may be so many times the longest one seen.
GROWTH: Final = 2
FIRST_CHUNK: Final = 64


# With nobody decoding, only a newcomer waits for the end of a step: so many inter-token times.
IDLE_STEPS: Final = 10


def step_target_ms(itl_target_ms: float, num_decodes: int) -> float:
    """How long a step may last."""
    return itl_target_ms if num_decodes else IDLE_STEPS * itl_target_ms


def default_budget(max_model_len: int, max_num_seqs: int, num_speculative_tokens: int = 0) -> int:
    """Most tokens of a step where nobody says: a whole prompt, 4,096, or every lane's decode.

    The rule of the DeepInfer engine. 8,192-token model, 64 lanes: 8,192.
    """
    return max(max_model_len, 4096, max_num_seqs * (1 + num_speculative_tokens))


class StepTimes(Protocol):
    """The fitted step-time model: t = a + b * tokens + c * KV."""

    @property
    def longest_seen(self) -> int: ...

    def predict_ns(self, num_tokens: int, num_kv_tokens: int) -> int: ...


def adaptive_budget(
    itl_target_ms: float, most: int, num_decodes: int, num_kv_tokens: int, times: StepTimes
) -> int:
    """Most tokens, at most `most`, whose step is predicted to stay below the target.

    Decodes always run, whatever the target says; where even they are too slow there is room for one
    prompt token, so that no prompt waits for ever. Extrapolation is bounded: twice the longest step
    that was seen.
    """
    seen = max(FIRST_CHUNK + num_decodes, GROWTH * times.longest_seen)
    low, high = num_decodes + 1, min(most, max(seen, num_decodes + 1))
    target_ns = itl_target_ms * 1e6
    while low < high:
        middle = (low + high + 1) // 2
        if times.predict_ns(middle, num_kv_tokens) <= target_ns:
            low = middle
        else:
            high = middle - 1
    return low
