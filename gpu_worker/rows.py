"""Lane columns of the worker: one row per lane, persistent between steps.

Pure: numpy only.
"""

from __future__ import annotations

import numpy as np

from gpu_worker.inputs import Bools, Float32s, Int32s, UInt64s
from services.contracts.sampling import SamplingParams


class Rows:
    """active bool [L]; tokens, computed, prompt_tokens, num_blocks int32 [L]; token_ids int32 [L,
    max_model_len]; block_table int32 [L, P]; penalties float32 [L, 3]; the rest
    [L] of the sampler's types.
    """

    def __init__(self, num_lanes: int, max_model_len: int, max_blocks: int) -> None:
        self.num_lanes = num_lanes
        self.active: Bools = np.zeros(num_lanes, dtype=np.bool_)
        self.tokens: Int32s = np.zeros(num_lanes, dtype=np.int32)
        self.computed: Int32s = np.zeros(num_lanes, dtype=np.int32)
        self.prompt_tokens: Int32s = np.zeros(num_lanes, dtype=np.int32)
        self.num_blocks: Int32s = np.zeros(num_lanes, dtype=np.int32)
        self.token_ids: Int32s = np.zeros((num_lanes, max_model_len), dtype=np.int32)
        self.block_table: Int32s = np.zeros((num_lanes, max_blocks), dtype=np.int32)
        self.temperature: Float32s = np.zeros(num_lanes, dtype=np.float32)
        self.top_p: Float32s = np.ones(num_lanes, dtype=np.float32)
        self.top_k: Int32s = np.zeros(num_lanes, dtype=np.int32)
        self.min_p: Float32s = np.zeros(num_lanes, dtype=np.float32)
        self.penalties: Float32s = np.zeros((num_lanes, 3), dtype=np.float32)
        self.seed: UInt64s = np.zeros(num_lanes, dtype=np.uint64)
        self.num_logprobs: Int32s = np.full(num_lanes, -1, dtype=np.int32)
        self.num_prompt_logprobs: Int32s = np.full(num_lanes, -1, dtype=np.int32)

    def set_sampling(self, lane: int, sampling: SamplingParams) -> None:
        self.temperature[lane] = sampling.temperature
        self.top_p[lane] = sampling.top_p
        self.top_k[lane] = sampling.top_k
        self.min_p[lane] = sampling.min_p
        self.penalties[lane] = (
            sampling.repetition_penalty,
            sampling.presence_penalty,
            sampling.frequency_penalty,
        )
        self.seed[lane] = sampling.seed
        self.num_logprobs[lane] = sampling.num_logprobs
        self.num_prompt_logprobs[lane] = sampling.num_prompt_logprobs
