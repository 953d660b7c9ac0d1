"""Requests whose right answers are known, and the plans of the streams that ask them.

Pure: a seed is an argument.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from gpu_worker.shadow import expected_token_ids

STUB_VOCAB_SIZE: Final = 32_768
NUM_STUB_CASES: Final = 64
MAX_STUB_TOKENS: Final = 400
NUM_MODEL_CASES: Final = 16
MAX_MODEL_TOKENS: Final = 64
LEAST_VOCAB_SIZE: Final = 16_000
"""Token ids below it are in the vocabulary of every model that is served here."""

NUM_PREFIXES: Final = 4
SHARED: Final = 0.6
CANCELLED: Final = 0.08
DEADLINES: Final = 0.06
OVER_HTTP: Final = 0.25


@dataclass(frozen=True, slots=True)
class Case:
    """A prompt and the greedy tokens that follow it without faults."""

    prompt_token_ids: list[int]
    expected: list[int]


@dataclass(frozen=True, slots=True)
class Plan:
    """One stream. cancel_after: tokens, 0 for to the end; deadline_ms: 0 for none."""

    case: Case
    max_tokens: int
    over_http: bool = False
    cancel_after: int = 0
    deadline_ms: int = 0

    @property
    def expected(self) -> list[int]:
        return self.case.expected[: self.max_tokens]

    @property
    def fields(self) -> dict[str, Any]:
        """The request, as both edges take it."""
        fields: dict[str, Any] = {
            "max_tokens": self.max_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
        }
        return fields | ({"deadline_ms": self.deadline_ms} if self.deadline_ms else {})


def stub_cases(seed: int) -> list[Case]:
    """Prompts of 1 to 240 tokens, most of them with one of a few prefixes."""
    rng = random.Random(seed)
    prefixes = [_tokens(rng, rng.randint(40, 200)) for _ in range(NUM_PREFIXES)]
    return [_stub_case(rng, prefixes) for _ in range(NUM_STUB_CASES)]


def draw_plan(rng: random.Random, cases: Sequence[Case], http_share: float = OVER_HTTP) -> Plan:
    """A stream of any kind: short or long, over either edge, to its end or not."""
    case = rng.choice(cases)
    whole = len(case.expected)
    lengths = [(1, 8), (whole // 20, whole // 3), (whole // 2, whole)]
    low, high = rng.choices(lengths, [2, 5, 3])[0]
    max_tokens = min(rng.randint(low, high), whole)
    over_http, kind = rng.random() < http_share, rng.random()
    if kind < CANCELLED:
        return Plan(case, max_tokens, over_http, cancel_after=rng.randint(1, max_tokens))
    if kind < CANCELLED + DEADLINES:
        return Plan(case, max_tokens, over_http, deadline_ms=rng.randint(50, 1500))
    return Plan(case, max_tokens, over_http)


def model_prompts(seed: int) -> list[list[int]]:
    """Prompts for a model whose answers have to be learnt from it first."""
    rng = random.Random(seed)
    return [
        [rng.randrange(LEAST_VOCAB_SIZE) for _ in range(rng.randint(4, 48))]
        for _ in range(NUM_MODEL_CASES)
    ]


def _stub_case(rng: random.Random, prefixes: Sequence[list[int]]) -> Case:
    prefix = rng.choice(prefixes) if rng.random() < SHARED else []
    prompt = prefix + _tokens(rng, rng.randint(1, 40))
    array = np.array(prompt, dtype=np.int32)
    return Case(prompt, expected_token_ids(array, MAX_STUB_TOKENS, STUB_VOCAB_SIZE))


def _tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(STUB_VOCAB_SIZE) for _ in range(count)]
