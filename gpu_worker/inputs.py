"""What one step feeds to the model, and what comes back: packed arrays, no padding.

The packed layout, by the worked example of the design: prompts of 5 and 3 tokens, and a sequence
with 100 cached tokens and 2 new ones, scheduled in the order prompt, cached, prompt::

    seqlens_q    = [5, 2, 3]
    seqlens_k    = [5, 102, 3]
    cu_seqlens_q = [0, 5, 7, 10]
    cu_seqlens_k = [0, 5, 107, 110]           (implied by seqlens_k; not sent)
    positions    = [0 1 2 3 4 | 100 101 | 0 1 2]

With block_size 16, a sequence holding blocks [7, 3] writes position 18 to slot 3 * 16 + 2 = 50.

Pure: frozen values of numpy arrays.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

Int32s: TypeAlias = npt.NDArray[np.int32]
Int64s: TypeAlias = npt.NDArray[np.int64]
UInt64s: TypeAlias = npt.NDArray[np.uint64]
Float32s: TypeAlias = npt.NDArray[np.float32]
Bools: TypeAlias = npt.NDArray[np.bool_]

NO_LOGPROBS = -1


@dataclass(frozen=True, slots=True, eq=False)
class SamplingBatch:
    """How to sample each of the S rows of ``logits_rows``.

    temperature:  (S) float32; 0 is greedy
    top_p:        (S) float32 in (0, 1]; 1 is off
    top_k:        (S) int32; 0 or less is off
    min_p:        (S) float32 in [0, 1]; 0 is off
    seed:         (S) uint64
    position:     (S) int64 - absolute position of the token to be sampled
    num_logprobs: (S) int32 - likeliest tokens to report beside the sampled one; -1 reports nothing
    """

    temperature: Float32s
    top_p: Float32s
    top_k: Int32s
    min_p: Float32s
    seed: UInt64s
    position: Int64s
    num_logprobs: Int32s


class PenaltyBatch(NamedTuple):
    """Tokens that sampled rows with penalties have already: see ``kernels.penalties``.

    rows:      (n) int32, of ``logits_rows``
    token_ids: (n) int32; counts: (n) int32, in the output
    factors:   (S, 3) float32 - repetition, presence and frequency of every row
    """

    rows: Int32s
    token_ids: Int32s
    counts: Int32s
    factors: Float32s


class PromptLogprobRequest(NamedTuple):
    """Packed rows [first_row, first_row + num_rows), whose next tokens are known.

    target_ids:   (num_rows) int32 - the token that follows each row
    num_logprobs: likeliest tokens to report beside the target; at least 0
    """

    first_row: int
    num_rows: int
    target_ids: Int32s
    num_logprobs: int


class TokenLogprobs(NamedTuple):
    """Log-probabilities at one row, of the unscaled distribution.

    chosen_logprob: of the sampled token, or of the target
    ids, values:    (n) int32 and (n) float32, the likeliest tokens, best first
    """

    chosen_logprob: float
    ids: Int32s
    values: Float32s


class CopyLists(NamedTuple):
    """Copies of one step, outs first: int32 [n] blocks and [n] host slots of each direction."""

    out_blocks: Int32s
    out_slots: Int32s
    in_slots: Int32s
    in_blocks: Int32s


@dataclass(frozen=True, slots=True, eq=False)
class StepInputs:
    """One step: T packed tokens of B sequences, the S rows to sample from.

    input_ids:       (T) int32
    positions:       (T) int32
    slot_mapping:    (T) int64 - where each token's KV goes; -1 is skipped
    cu_seqlens_q:    (B + 1) int32
    seqlens_k:       (B) int32 - tokens of each sequence after this step
    block_table:     (B, P) int32, padded with 0
    num_decodes:     the first num_decodes sequences have one token each
    logits_rows:     (S) int32 - packed rows that are sampled
    prompt_logprobs: rows whose target's log-probability is wanted
    input_lanes:     (T) int32, or None for no such token: the lane whose last sampled token is fed
                     in place of input_ids, which the host does not know yet; -1 for the others
    output_lanes:    (S) int32, or None: the lane that keeps each sampled token for that
    penalties:       None where no row has any; else all tokens are known, and input_lanes is None
    """

    input_ids: Int32s
    positions: Int32s
    slot_mapping: Int64s
    cu_seqlens_q: Int32s
    seqlens_k: Int32s
    block_table: Int32s
    num_decodes: int
    logits_rows: Int32s
    sampling: SamplingBatch
    prompt_logprobs: tuple[PromptLogprobRequest, ...] = ()
    input_lanes: Int32s | None = None
    output_lanes: Int32s | None = None
    penalties: PenaltyBatch | None = None


@dataclass(frozen=True, slots=True, eq=False)
class StepOutputs:
    """What the step sampled.

    token_ids:       (S) int32; 0 where the row is not finite
    finite:          (S) bool - False where the row's logits held NaN or infinity
    logprobs:        one entry for each sampled row; None where not asked for, or not finite
    prompt_logprobs: one list for each request, one entry for each of its rows; None where the row
                     is not finite
    """

    token_ids: Int32s
    finite: Bools
    logprobs: list[TokenLogprobs | None]
    prompt_logprobs: list[list[TokenLogprobs | None]]
