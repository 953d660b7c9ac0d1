"""Sequences for tests of the small parts."""

from __future__ import annotations

import numpy as np

from scheduler_svc.sequence import Sequence
from services.contracts.sampling import SamplingParams


def sequence(
    uid: int, *, prompt: int = 4, max_tokens: int = 4, priority: int = 0, stop: tuple[int, ...] = ()
) -> Sequence:
    token_ids = np.zeros(prompt + max_tokens, dtype=np.int32)
    token_ids[:prompt] = np.arange(prompt) + 100 * uid
    return Sequence(
        uid=uid,
        seq_id=f"s{uid}",
        admission_id="admission-0",
        tag=uid,
        token_ids=token_ids,
        num_prompt_tokens=prompt,
        num_tokens=prompt,
        max_total_tokens=prompt + max_tokens,
        sampling=SamplingParams(),
        stop_token_ids=np.array(stop, dtype=np.int32),
        salt=b"",
        priority=priority,
        deadline_ns=0,
        arrival_ns=0,
    )
