"""One generation as the scheduler knows it: tokens catching up (DESIGN section 4).

There is no prefill phase and no decode phase: a step schedules some of `num_tokens -
num_computed_tokens`.

Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

import numpy as np

from services.contracts.hashing import block_hash, root_hash
from services.contracts.sampling import SamplingParams
from services.contracts.sequences import Logprobs
from services.contracts.vectors import Int32Array

NO_LANE: Final = -1


class SequenceStatus(StrEnum):
    """DRAINING: every token it may have is planned; it has left its lane and waits for the last
    result.
    """

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    DRAINING = "draining"
    FINISHED = "finished"


S = SequenceStatus

TRANSITIONS: Final[dict[SequenceStatus, frozenset[SequenceStatus]]] = {
    S.WAITING: frozenset({S.RUNNING, S.FINISHED}),
    S.RUNNING: frozenset({S.PREEMPTED, S.DRAINING, S.FINISHED}),
    # In-flight results still count, so a preempted sequence may end before it runs again.
    S.PREEMPTED: frozenset({S.WAITING, S.FINISHED}),
    # A reset voids the step that a draining sequence waits for.
    S.DRAINING: frozenset({S.PREEMPTED, S.FINISHED}),
    S.FINISHED: frozenset(),
}


@dataclass(slots=True, eq=False)
class Sequence:
    """State of one sequence; while it has a lane, the lane's row holds the moving parts.

    uid: serial number in order of arrival. tag: the admission's number for it.
    token_ids: little-endian int32 [max_total_tokens]; the first `num_tokens` are known.
    num_computed_tokens: by steps whose result has arrived. num_in_flight: steps under way that name
    it.
    block_ids: blocks it holds, in order; the first `num_committed_blocks` are committed (hash known
    to the ledger).
    hashes: chain hashes of its full blocks, as far as they were needed.
    looked_up: the ledger was asked for its prefix since it last began to wait.
    num_cached_tokens: of its first prefix hit, -1 before its first join.
    num_passed: how many went before it because it did not fit.
    num_deaths: of workers while they computed tokens died_from .. died_before - 1 of it, since it
    last got past them; runs_alone: nobody else may be computed in its steps; num_trials: how often
    that began (`suspects.py`). num_unfit: small steps of it alone that the worker had no memory for
    (`step_memory.py`).
    logprobs, prompt_logprobs: kept by (offset or first position) for as long as they may be asked
    for again.
    """

    uid: int
    seq_id: str
    admission_id: str
    tag: int
    token_ids: Int32Array
    num_prompt_tokens: int
    num_tokens: int
    max_total_tokens: int
    sampling: SamplingParams
    stop_token_ids: Int32Array
    salt: bytes
    priority: int
    deadline_ns: int
    arrival_ns: int
    envelope: bytes = b""
    traceparent: str = ""
    status: SequenceStatus = SequenceStatus.WAITING
    lane: int = NO_LANE
    num_computed_tokens: int = 0
    num_in_flight: int = 0
    block_ids: list[int] = field(default_factory=list)
    num_committed_blocks: int = 0
    hashes: list[bytes] = field(default_factory=list)
    looked_up: bool = False
    num_cached_tokens: int = -1
    num_preemptions: int = 0
    num_passed: int = 0
    num_deaths: int = 0
    died_from: int = 0
    died_before: int = 0
    runs_alone: bool = False
    num_trials: int = 0
    num_unfit: int = 0
    logprobs: list[tuple[int, Logprobs]] = field(default_factory=list)
    prompt_logprobs: list[tuple[int, Logprobs]] = field(default_factory=list)

    def move(self, status: SequenceStatus) -> None:
        assert status in TRANSITIONS[self.status], f"{self.seq_id}: {self.status} -> {status}"
        self.status = status

    @property
    def order(self) -> tuple[int, int]:
        """Lower runs first: priority, then arrival. A preempted sequence keeps its arrival, so it
        comes back first.
        """
        return (self.priority, self.uid)

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    @property
    def reads_cache(self) -> bool:
        """Log-probabilities of the prompt exist only where the prompt is computed, so such a
        request reads no cache.
        """
        return self.sampling.num_prompt_logprobs < 0

    def num_blocks_for(self, num_tokens: int, block_size: int) -> int:
        return -(-num_tokens // block_size)

    def hash_of(self, index: int, token_ids: Int32Array, block_size: int) -> bytes:
        """Chain hash of its block `index`, whose tokens are known in `token_ids`; computed once,
        then kept.
        """
        while len(self.hashes) <= index:
            at = len(self.hashes)
            parent = self.hashes[-1] if at else root_hash(self.salt)
            block = token_ids[at * block_size : (at + 1) * block_size]
            self.hashes.append(block_hash(parent, block.tobytes()))
        return self.hashes[index]

    def append(self, token_id: int) -> None:
        """A token accepted after the sequence left its lane."""
        self.token_ids[self.num_tokens] = token_id
        self.num_tokens += 1

    def is_stop(self, token_id: int) -> bool:
        return bool(np.any(self.stop_token_ids == token_id))
