"""The running sequences, column by column: one row per lane, so that a step is a few vector
operations.

Planned columns run ahead of accepted ones by what the steps in flight will have done:

    accepted_computed <= computed <  tokens        (of an active lane)
    accepted_tokens   <=             tokens

Sets of lanes are arrays of numpy's own index type: with any other it converts them at each of the
dozen gathers of a step, which cost more than the gathers.

Pure.
"""

from __future__ import annotations

import heapq
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from services.contracts.vectors import INT32_LE, BoolArray, Int32Array

from .sequence import NO_LANE, Sequence

LaneIndices: TypeAlias = npt.NDArray[np.intp]

NO_TOKEN: Final = -1
NO_LANES: Final[LaneIndices] = np.zeros(0, dtype=np.intp)


class LaneTable:
    """Rows of `max_num_seqs` lanes.

    active: bool; decoding: active and one token behind; uid: which sequence (0 where free); tokens,
    computed: planned counts; capacity: tokens that its blocks can hold; limit: tokens at most;
    accepted_tokens, accepted_computed: by results that have arrived;
    committed_blocks: whose hash the ledger knows; stop_ids: int32 [k, lanes], padded with -1;
    token_ids: int32 [lanes, max_model_len]; admission: index of the admission that hears of it;
    tag: its number there.
    """

    def __init__(self, max_num_seqs: int, max_model_len: int) -> None:
        n = max_num_seqs
        self.num_lanes = n
        self.sequences: list[Sequence | None] = [None] * n
        self.active: BoolArray = np.zeros(n, dtype=np.bool_)
        self.decoding: BoolArray = np.zeros(n, dtype=np.bool_)
        self.uid = np.zeros(n, dtype=np.int64)
        self.tokens: Int32Array = np.zeros(n, dtype=np.int32)
        self.computed: Int32Array = np.zeros(n, dtype=np.int32)
        self.capacity: Int32Array = np.zeros(n, dtype=np.int32)
        self.limit: Int32Array = np.zeros(n, dtype=np.int32)
        self.prompt_tokens: Int32Array = np.zeros(n, dtype=np.int32)
        self.accepted_tokens: Int32Array = np.zeros(n, dtype=np.int32)
        self.accepted_computed: Int32Array = np.zeros(n, dtype=np.int32)
        self.committed_blocks: Int32Array = np.zeros(n, dtype=np.int32)
        self.admission: Int32Array = np.zeros(n, dtype=np.int32)
        self.tag: Int32Array = np.zeros(n, dtype=np.int32)
        self.stop_ids: Int32Array = np.full((1, n), NO_TOKEN, dtype=np.int32)
        self.token_ids: Int32Array = np.zeros((n, max_model_len), dtype=INT32_LE)
        self._flat_token_ids = self.token_ids.reshape(-1)
        self._row_start = np.arange(n, dtype=np.intp) * max_model_len
        self._free = list(range(n))

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_active(self) -> int:
        return self.num_lanes - len(self._free)

    def join(self, seq: Sequence, admission: int, block_size: int) -> int:
        """Give `seq` the lowest free lane -> that lane."""
        assert seq.lane == NO_LANE
        lane = heapq.heappop(self._free)
        seq.lane = lane
        self.sequences[lane] = seq
        self.active[lane] = True
        self.uid[lane] = seq.uid
        self.tokens[lane] = self.accepted_tokens[lane] = seq.num_tokens
        self.computed[lane] = self.accepted_computed[lane] = seq.num_computed_tokens
        self.decoding[lane] = seq.num_tokens - seq.num_computed_tokens == 1
        self.committed_blocks[lane] = seq.num_committed_blocks
        self.capacity[lane] = len(seq.block_ids) * block_size
        self.limit[lane] = seq.max_total_tokens
        self.prompt_tokens[lane] = seq.num_prompt_tokens
        self.admission[lane] = admission
        self.tag[lane] = seq.tag
        self.token_ids[lane, : seq.num_tokens] = seq.token_ids[: seq.num_tokens]
        self._set_stop_ids(lane, seq.stop_token_ids)
        return lane

    def leave(self, lane: int) -> Sequence:
        """Free `lane`; what it had accepted goes back into its sequence."""
        seq = self.sequences[lane]
        assert seq is not None and seq.lane == lane
        known = int(self.accepted_tokens[lane])
        seq.token_ids[seq.num_tokens : known] = self.token_ids[lane, seq.num_tokens : known]
        seq.num_tokens = known
        seq.num_computed_tokens = int(self.accepted_computed[lane])
        seq.num_committed_blocks = int(self.committed_blocks[lane])
        seq.lane = NO_LANE
        self.sequences[lane] = None
        self.active[lane] = self.decoding[lane] = False
        self.uid[lane] = 0
        heapq.heappush(self._free, lane)
        return seq

    def occupant(self, lane: int) -> Sequence:
        seq = self.sequences[lane]
        assert seq is not None, f"lane {lane} is free"
        return seq

    def occupants(self, lanes: LaneIndices) -> list[Sequence]:
        """Of each of `lanes`, none of which is free."""
        sequences = self.sequences
        found = [seq for lane in lanes.tolist() if (seq := sequences[lane]) is not None]
        assert len(found) == len(lanes), "a lane is free"
        return found

    def accept(self, lanes: LaneIndices, token_ids: Int32Array) -> Int32Array:
        """One more known token for each of `lanes` -> how many each knew before, int32 [n]."""
        known = self.accepted_tokens[lanes]
        self._flat_token_ids[self._row_start[lanes] + known] = token_ids
        self.accepted_tokens[lanes] = known + 1
        return known

    def block_tokens(self, lanes: LaneIndices, indices: Int32Array, block_size: int) -> bytes:
        """Tokens of block `indices[i]` of `lanes[i]` -> int32 [n, block_size] as bytes."""
        width = self.token_ids.shape[1] // block_size * block_size
        # A view: whole blocks are gathered instead of single tokens.
        blocks = self.token_ids[:, :width].reshape(self.num_lanes, -1, block_size)
        tokens: Int32Array = blocks[lanes, indices]
        return tokens.tobytes()

    def stopped(self, lanes: LaneIndices, token_ids: Int32Array) -> BoolArray:
        """Which of `token_ids` is a stop token of its lane; bool [n]."""
        stopped: BoolArray = self.stop_ids[0][lanes] == token_ids
        for column in self.stop_ids[1:]:
            stopped |= column[lanes] == token_ids
        return stopped

    def known_token_ids(self, seq: Sequence) -> Int32Array:
        """int32 [number known so far]: from the lane's row while it has one."""
        if seq.lane == NO_LANE:
            return seq.token_ids[: seq.num_tokens]
        return self.token_ids[seq.lane, : self.accepted_tokens[seq.lane]]

    def _set_stop_ids(self, lane: int, stop_ids: Int32Array) -> None:
        width = len(self.stop_ids)
        if len(stop_ids) > width:
            # Grows to the widest list seen, which the request schema bounds.
            wider = np.full((len(stop_ids), self.num_lanes), NO_TOKEN, dtype=np.int32)
            wider[:width] = self.stop_ids
            self.stop_ids = wider
        self.stop_ids[:, lane] = NO_TOKEN
        self.stop_ids[: len(stop_ids), lane] = stop_ids

    def check_invariants(self, block_size: int) -> None:
        for lane, seq in enumerate(self.sequences):
            assert (seq is not None) == bool(self.active[lane])
            behind = int(self.tokens[lane] - self.computed[lane])
            assert bool(self.decoding[lane]) == (seq is not None and behind == 1)
            if seq is None:
                continue
            assert seq.lane == lane and self.uid[lane] == seq.uid
            assert 0 <= self.accepted_computed[lane] <= self.computed[lane] < self.tokens[lane]
            assert self.accepted_tokens[lane] <= self.tokens[lane] <= self.limit[lane]
            assert self.computed[lane] <= self.capacity[lane] == len(seq.block_ids) * block_size
            assert self.committed_blocks[lane] * block_size <= self.accepted_computed[lane]
        assert self.num_active == int(self.active.sum())
