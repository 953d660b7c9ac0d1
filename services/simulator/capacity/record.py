"""What a simulated run was like: every token's time, every step, and what they cost.

Invariant: a run that has ended holds each request's tokens once, in order.

Pure: numpy only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from services.contracts.sequences import SequenceUpdates
from services.contracts.vectors import Int32Array, unpack

from .step_time import StepLoad
from .workload import Request

Int64Array = npt.NDArray[np.int64]
NEVER: Final = -1


class StepRecord(NamedTuple):
    """start_ns, end_ns: of the forward pass. owners, lanes: which request computed in which
    lane.
    """

    start_ns: int
    end_ns: int
    load: StepLoad
    owners: Int32Array
    lanes: Int32Array


class Gaps(NamedTuple):
    """Inter-token times that ended at `at_ns`: int64 ns, one for each of `requests` (int32)."""

    at_ns: int
    requests: Int32Array
    gaps_ns: Int64Array


@dataclass(slots=True)
class Record:
    """By request, int64 [n], ns or -1: `first_ns` token, `last_ns` token; num_tokens: produced.

    refused: requests that the engine would not take, with its words. num_cached_tokens: of first
    prefix hits. num_discarded_tokens: computed after a stop token that was still under way.
    num_slots: rows of a padded batch, filled or not; 0 where nothing is padded.
    """

    requests: Sequence[Request]
    first_ns: Int64Array
    last_ns: Int64Array
    num_tokens: Int64Array
    steps: list[StepRecord] = field(default_factory=list)
    gaps: list[Gaps] = field(default_factory=list)
    refused: dict[int, str] = field(default_factory=dict)
    num_finished: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    num_discarded_tokens: int = 0
    num_slots: int = 0

    @classmethod
    def empty(cls, requests: Sequence[Request]) -> Record:
        count = len(requests)
        return cls(
            requests=requests,
            first_ns=np.full(count, NEVER, dtype=np.int64),
            last_ns=np.full(count, NEVER, dtype=np.int64),
            num_tokens=np.zeros(count, dtype=np.int64),
        )

    @property
    def is_complete(self) -> bool:
        return self.num_finished + len(self.refused) == len(self.requests)

    def add_updates(self, updates: SequenceUpdates, at_ns: int) -> list[int]:
        """Tags are request indices -> those that have ended."""
        self.num_cached_tokens += sum(each.num_cached_tokens for each in updates.started)
        tags = unpack(updates.tags)
        if len(tags):
            self.add_tokens(tags, at_ns)
        self.num_finished += len(updates.finished)
        return [each.tag for each in updates.finished]

    def add_tokens(self, requests: Int32Array, at_ns: int) -> None:
        """One token of each of `requests`, none named twice."""
        last = self.last_ns[requests]
        later = last != NEVER
        self.first_ns[requests[~later]] = at_ns
        if later.any():
            self.gaps.append(Gaps(at_ns, requests[later], at_ns - last[later]))
        self.last_ns[requests] = at_ns
        self.num_tokens[requests] += 1

    # ---- what came of it

    @property
    def end_ns(self) -> int:
        return int(self.last_ns.max(initial=0))

    def gaps_between(self, start_ns: int, end_ns: int) -> Int64Array:
        """Inter-token times, ns, that ended in (start, end]."""
        parts = [each.gaps_ns for each in self.gaps if start_ns < each.at_ns <= end_ns]
        return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)

    @property
    def num_computed_tokens(self) -> int:
        return sum(step.load.num_tokens for step in self.steps)

    @property
    def num_recomputed_tokens(self) -> int:
        """Beyond what the requests need once (all but their last token, hits apart), and what was
        discarded.
        """
        prompts = np.array([request.num_prompt_tokens for request in self.requests])
        done = self.num_tokens > 0
        needed = int((prompts + self.num_tokens - 1)[done].sum()) - self.num_cached_tokens
        return max(0, self.num_computed_tokens - needed - self.num_discarded_tokens)
