"""What a step computes and what waits, as planners of other systems count it (Dynamo's
ForwardPassMetrics).

Pure.
"""

from __future__ import annotations

import numpy as np

from services.contracts.step import QueuedRequests, ScheduledRequests
from services.contracts.vectors import Int32Array

from .lanes import LaneTable
from .sequence import Sequence

_NOTHING = QueuedRequests()


def scheduled_requests(
    lanes: LaneTable, context: Int32Array, chunks: list[tuple[int, int]]
) -> ScheduledRequests:
    """Of a step that decodes lanes with `context` tokens [number of decodes] and computes `chunks`
    (lane, tokens), once the planned columns have moved.
    """
    lengths = context.astype(np.float64)
    num_decodes, decode_sum = len(lengths), float(lengths.sum())
    decode_var = _variance(num_decodes, decode_sum, float(lengths @ lengths))
    if not chunks:
        return ScheduledRequests(
            num_decode_requests=num_decodes,
            sum_decode_kv_tokens=int(decode_sum),
            var_decode_kv_tokens=decode_var,
        )
    at = np.array([lane for lane, _ in chunks], dtype=np.int32)
    num_tokens = sum(count for _, count in chunks)
    return ScheduledRequests(
        num_prefill_requests=len(chunks),
        sum_prefill_tokens=num_tokens,
        var_prefill_length=float(np.var(lanes.accepted_tokens[at])),
        sum_prefill_kv_tokens=int(lanes.computed[at].sum()) - num_tokens,
        num_decode_requests=num_decodes,
        sum_decode_kv_tokens=int(decode_sum),
        var_decode_kv_tokens=decode_var,
    )


class QueueLoad:
    """Sums over the sequences that wait, kept while they come and go: O(1) each."""

    def __init__(self) -> None:
        self._prefill = [0, 0, 0]
        self._decode = [0, 0, 0]

    def add(self, seq: Sequence) -> None:
        self._change(seq, 1)

    def remove(self, seq: Sequence) -> None:
        self._change(seq, -1)

    def _change(self, seq: Sequence, sign: int) -> None:
        sums = self._decode if seq.num_output_tokens else self._prefill
        sums[0] += sign
        sums[1] += sign * seq.num_tokens
        sums[2] += sign * seq.num_tokens**2

    def queued_requests(self) -> QueuedRequests:
        prefill, decode = self._prefill, self._decode
        if not prefill[0] and not decode[0]:
            return _NOTHING
        return QueuedRequests(
            num_prefill_requests=prefill[0],
            sum_prefill_tokens=prefill[1],
            var_prefill_length=_variance(*prefill),
            num_decode_requests=decode[0],
            sum_decode_kv_tokens=decode[1],
            var_decode_kv_tokens=_variance(*decode),
        )


def _variance(number: int, total: float, squares: float) -> float:
    """Of a population, from its size, its sum and its sum of squares."""
    return max(0.0, squares / number - (total / number) ** 2) if number else 0.0
