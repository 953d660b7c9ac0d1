"""What a plan computes, read from its diffs alone: the worker's lanes without a model.

Invariant: lanes hold what the plans so far have said, as the worker's mirror does.

Pure: numpy only.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from services.contracts.errors import InvariantError
from services.contracts.step import StepPlan
from services.contracts.vectors import Int32Array, unpack

from .step_time import StepLoad


class Scheduled(NamedTuple):
    """One step: its load, who computes, and who ends with a token.

    lanes, owners: int32, ascending lanes that compute, and the first prompt token of each one's
    sequence, which the simulation sets to the request's index. sampled, sampled_owners,
    num_outputs: lanes that end with a token, whose it is, and which of the output it is, from 1.
    """

    load: StepLoad
    lanes: Int32Array
    owners: Int32Array
    sampled: Int32Array
    sampled_owners: Int32Array
    num_outputs: Int32Array


class LaneTracker:
    """One row per lane: active bool; tokens (known or promised), prompt, computed, owner int32."""

    def __init__(self, num_lanes: int) -> None:
        self._active = np.zeros(num_lanes, dtype=np.bool_)
        self._tokens: Int32Array = np.zeros(num_lanes, dtype=np.int32)
        self._prompt: Int32Array = np.zeros(num_lanes, dtype=np.int32)
        self._computed: Int32Array = np.zeros(num_lanes, dtype=np.int32)
        self._owner: Int32Array = np.zeros(num_lanes, dtype=np.int32)

    def apply(self, plan: StepPlan) -> Scheduled:
        """Advance the lanes by `plan`. Raises InvariantError where it contradicts them."""
        self._take_and_leave(plan)
        chunk_lanes, chunks = unpack(plan.chunk_lanes), unpack(plan.chunk_tokens)
        decoding = self._active.copy() if plan.decode else np.zeros_like(self._active)
        decoding[chunk_lanes] = False
        decoding[unpack(plan.hold)] = False
        decodes = np.flatnonzero(decoding).astype(np.int32)
        if (self._tokens[decodes] - self._computed[decodes] != 1).any():
            raise InvariantError(f"step {plan.step_id} decodes a lane that is still catching up")
        self._computed[decodes] += 1
        self._computed[chunk_lanes] += chunks
        computing = decoding
        computing[chunk_lanes] = True
        lanes = np.flatnonzero(computing).astype(np.int32)
        sampled = lanes[self._computed[lanes] == self._tokens[lanes]]
        if (self._computed[lanes] > self._tokens[lanes]).any():
            raise InvariantError(f"step {plan.step_id} computes tokens that nobody knows")
        load = StepLoad(
            num_seqs=len(lanes),
            num_decode_tokens=len(decodes),
            num_prefill_tokens=int(chunks.sum()),
            num_kv_tokens=int(self._computed[lanes].sum()),
        )
        self._tokens[sampled] += 1
        return Scheduled(
            load=load,
            lanes=lanes,
            owners=self._owner[lanes],
            sampled=sampled,
            sampled_owners=self._owner[sampled],
            num_outputs=self._tokens[sampled] - self._prompt[sampled],
        )

    def _take_and_leave(self, plan: StepPlan) -> None:
        if plan.reset:
            self._active[:] = False
        self._active[unpack(plan.leave)] = False
        for join in plan.join:
            if self._active[join.lane]:
                raise InvariantError(f"step {plan.step_id} joins lane {join.lane}, which is taken")
            token_ids = unpack(join.token_ids)
            self._active[join.lane] = True
            self._tokens[join.lane] = len(token_ids)
            self._prompt[join.lane] = join.num_prompt_tokens
            self._computed[join.lane] = join.num_computed_tokens
            self._owner[join.lane] = token_ids[0]
