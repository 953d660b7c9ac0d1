"""Measuring a loaded model against known numbers, through the same paged path that serves.

Invariants: text is fed in chunks of the step budget, as a long prompt would be; the numbers are
means over tokens, in nats.

Device: runs a ModelRunner; reads a reference file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gpu_worker.inputs import (
    Int32s,
    PromptLogprobRequest,
    SamplingBatch,
    StepInputs,
    TokenLogprobs,
)
from gpu_worker.runner import ModelRunner

CHUNK_TOKENS = 512


def token_logprobs(
    runner: ModelRunner, token_ids: Sequence[int], chunk_tokens: int = CHUNK_TOKENS
) -> list[float]:
    """Log-probability of each token after the first, given those before it; one sequence.

    Uses blocks 1, 2, ... of the runner's pool and overwrites what they held. Raises ValueError when
    the tokens do not fit the pool or the model's positions, or when a logit is not finite.
    """
    num_inputs = len(token_ids) - 1
    num_blocks = -(-num_inputs // runner.block_size)
    if num_inputs > runner.max_model_len or num_blocks >= runner.num_blocks:
        raise ValueError(
            f"{num_inputs} tokens do not fit: {runner.max_model_len} positions, "
            f"{(runner.num_blocks - 1) * runner.block_size} slots"
        )
    known = np.asarray(token_ids, dtype=np.int32)
    logprobs: list[float] = []
    for start in range(0, num_inputs, chunk_tokens):
        end = min(start + chunk_tokens, num_inputs)
        outputs = runner.execute(_chunk(known, start, end, runner.block_size))
        logprobs.extend(_finite(entry) for entry in outputs.prompt_logprobs[0])
    return logprobs


def perplexity(
    runner: ModelRunner,
    token_ids: Sequence[int],
    num_tokens: int,
    chunk_tokens: int = CHUNK_TOKENS,
) -> float:
    """exp of the mean negative log-probability of the first num_tokens tokens.

    One context; every token but the first is scored, given all those before it, and nothing is put
    in front. Raises ValueError for fewer than two tokens.
    """
    logprobs = token_logprobs(runner, token_ids[:num_tokens], chunk_tokens)
    if not logprobs:
        raise ValueError("perplexity needs at least two tokens")
    return math.exp(-math.fsum(logprobs) / len(logprobs))


def teacher_forced_logprobs(runner: ModelRunner, reference: Path) -> dict[str, Any]:
    """Mean log-probability of a reference's greedy tokens, each given the reference's own past.

    reference: JSON with ``cases``, each with ``name``, ``prompt_token_ids`` and
               ``greedy_token_ids``, and ``logprobs`` where the reference knows them
    returns:   ``mean_logprob``, ``num_tokens``; ``reference_mean_logprob`` and
               ``max_abs_difference`` (None where not known); ``cases`` with the same by name

    Raises ValueError for a file of another form.
    """
    cases = [_check_case(runner, case) for case in _read_cases(reference)]
    num_tokens = sum(case["num_tokens"] for case in cases)
    known = [case for case in cases if case["reference_mean_logprob"] is not None]
    differences = [case["max_abs_difference"] for case in known]
    complete = len(known) == len(cases)
    return {
        "mean_logprob": _weighted_mean(cases, "mean_logprob"),
        "num_tokens": num_tokens,
        "reference_mean_logprob": (
            _weighted_mean(cases, "reference_mean_logprob") if complete else None
        ),
        "max_abs_difference": max(differences) if differences else None,
        "cases": cases,
    }


def _weighted_mean(cases: list[dict[str, Any]], name: str) -> float:
    num_tokens: int = sum(case["num_tokens"] for case in cases)
    return math.fsum(case[name] * case["num_tokens"] for case in cases) / num_tokens


def _check_case(runner: ModelRunner, case: dict[str, Any]) -> dict[str, Any]:
    prompt, greedy = case["prompt_token_ids"], case["greedy_token_ids"]
    logprobs = token_logprobs(runner, [*prompt, *greedy])[len(prompt) - 1 :]
    expected = case.get("logprobs")
    result = {
        "name": case["name"],
        "num_tokens": len(greedy),
        "mean_logprob": math.fsum(logprobs) / len(greedy),
        "reference_mean_logprob": None,
        "max_abs_difference": None,
    }
    if expected is not None:
        pairs = zip(logprobs, expected, strict=True)
        result["reference_mean_logprob"] = math.fsum(expected) / len(greedy)
        result["max_abs_difference"] = max(abs(ours - theirs) for ours, theirs in pairs)
    return result


def _read_cases(path: Path) -> list[dict[str, Any]]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: is not readable JSON: {error}") from error
    cases = content.get("cases") if isinstance(content, dict) else None
    if not isinstance(cases, list) or not cases:
        raise ValueError(f"{path}: has no list of cases")
    for number, case in enumerate(cases):
        if not _is_case(case):
            raise ValueError(
                f"{path}: case {number} needs name, prompt_token_ids and greedy_token_ids "
                "(and, if any, one log-probability for each greedy token)"
            )
    return cases


def _is_case(case: object) -> bool:
    if not isinstance(case, dict) or not isinstance(case.get("name"), str):
        return False
    for name in ("prompt_token_ids", "greedy_token_ids"):
        tokens = case.get(name)
        if not isinstance(tokens, list) or not tokens:
            return False
        if not all(isinstance(token, int) for token in tokens):
            return False
    expected = case.get("logprobs")
    if expected is None:
        return True
    return isinstance(expected, list) and len(expected) == len(case["greedy_token_ids"])


def _finite(entry: TokenLogprobs | None) -> float:
    if entry is None:
        raise ValueError("the model gave logits that are not finite")
    return entry.chosen_logprob


def _chunk(known: Int32s, start: int, end: int, block_size: int) -> StepInputs:
    """Tokens [start, end) of one sequence in blocks 1, 2, ...; scores tokens start + 1 to end."""
    num_rows = end - start
    positions = np.arange(start, end)
    num_blocks = -(-end // block_size)
    return StepInputs(
        input_ids=known[start:end].copy(),
        positions=positions.astype(np.int32),
        # Position p lies in block 1 + p // block_size, so its slot is block_size + p.
        slot_mapping=(positions + block_size).astype(np.int64),
        cu_seqlens_q=np.array([0, num_rows], dtype=np.int32),
        seqlens_k=np.array([end], dtype=np.int32),
        block_table=np.arange(1, num_blocks + 1, dtype=np.int32)[None, :],
        num_decodes=int(num_rows == 1),
        logits_rows=np.zeros(0, dtype=np.int32),
        sampling=_no_sampling(),
        prompt_logprobs=(PromptLogprobRequest(0, num_rows, known[start + 1 : end + 1].copy(), 0),),
    )


def _no_sampling() -> SamplingBatch:
    return SamplingBatch(
        temperature=np.zeros(0, dtype=np.float32),
        top_p=np.zeros(0, dtype=np.float32),
        top_k=np.zeros(0, dtype=np.int32),
        min_p=np.zeros(0, dtype=np.float32),
        seed=np.zeros(0, dtype=np.uint64),
        position=np.zeros(0, dtype=np.int64),
        num_logprobs=np.zeros(0, dtype=np.int32),
    )
