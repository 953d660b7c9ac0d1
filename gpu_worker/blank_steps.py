"""Steps that read the null block and write nowhere: to warm up, and to capture.

Pure: numpy only.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from gpu_worker.inputs import NO_LOGPROBS, PenaltyBatch, SamplingBatch, StepInputs


def blank_step(num_tokens: int) -> StepInputs:
    """Tokens that read the null block and write nowhere; the last row is sampled."""
    return StepInputs(
        input_ids=np.zeros(num_tokens, dtype=np.int32),
        positions=np.arange(num_tokens, dtype=np.int32),
        slot_mapping=np.full(num_tokens, -1, dtype=np.int64),
        cu_seqlens_q=np.array([0, num_tokens], dtype=np.int32),
        seqlens_k=np.full(1, num_tokens, dtype=np.int32),
        block_table=np.zeros((1, num_tokens), dtype=np.int32),
        num_decodes=int(num_tokens == 1),
        logits_rows=np.full(1, num_tokens - 1, dtype=np.int32),
        sampling=_blank_sampling(1, 1.0, num_tokens),
    )


def blank_decodes(num_seqs: int) -> StepInputs:
    """So many sequences whose one token reads the null block and writes nowhere."""
    zeros = np.zeros(num_seqs, dtype=np.int32)
    return StepInputs(
        input_ids=zeros,
        positions=zeros,
        slot_mapping=np.full(num_seqs, -1, dtype=np.int64),
        cu_seqlens_q=np.arange(num_seqs + 1, dtype=np.int32),
        seqlens_k=zeros + 1,
        block_table=zeros[:, None],
        num_decodes=num_seqs,
        logits_rows=np.arange(num_seqs, dtype=np.int32),
        sampling=_blank_sampling(num_seqs, 0.0, 1),
    )


def blank_step_with_all() -> StepInputs:
    """One token, with penalties and log-probabilities."""
    step, zero = blank_step(1), np.zeros(1, dtype=np.int32)
    factors = np.array([[1.0, 0.0, 0.0]], dtype=np.float32)
    return dataclasses.replace(
        step,
        sampling=dataclasses.replace(step.sampling, num_logprobs=zero + 1),
        penalties=PenaltyBatch(zero, zero, zero, factors),
    )


def _blank_sampling(num_rows: int, temperature: float, position: int) -> SamplingBatch:
    return SamplingBatch(
        temperature=np.full(num_rows, temperature, dtype=np.float32),
        top_p=np.full(num_rows, 0.9, dtype=np.float32),
        top_k=np.full(num_rows, 50, dtype=np.int32),
        min_p=np.zeros(num_rows, dtype=np.float32),
        seed=np.ones(num_rows, dtype=np.uint64),
        position=np.full(num_rows, position, dtype=np.int64),
        num_logprobs=np.full(num_rows, NO_LOGPROBS, dtype=np.int32),
    )
