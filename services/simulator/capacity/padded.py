"""Static batching as the deep dive charges it: padded rows until the last member ends.

A group of `batch_size` requests is one unchunked prefill of all its prompts, then one step for each
output token of its longest member, always at the full width of the group: the padding tax. This is
a formula, not the scheduler: the scheduler pads nothing.

Pure: numpy only.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .record import Record, StepRecord
from .step_time import StepLoad, StepTime
from .workload import Request

_MS_NS = 1_000_000


def run_padded(step_time: StepTime, batch_size: int, requests: Sequence[Request]) -> Record:
    """Groups in order of arrival, each started when it is full and the one before has ended."""
    record = Record.empty(requests)
    now_ns = 0
    for first in range(0, len(requests), batch_size):
        members = np.arange(first, min(first + batch_size, len(requests)), dtype=np.int32)
        now_ns = max(now_ns, *(requests[i].arrival_ns for i in members.tolist()))
        now_ns = _run_group(step_time, members, now_ns, record)
    return record


def _run_group(
    step_time: StepTime, members: np.typing.NDArray[np.int32], now_ns: int, record: Record
) -> int:
    prompts = np.array([record.requests[i].num_prompt_tokens for i in members.tolist()])
    outputs = np.array([record.requests[i].num_output_tokens for i in members.tolist()])
    width = len(members)
    load = StepLoad(width, 0, int(prompts.sum()), int(prompts.sum()))
    now_ns = _step(step_time, load, members, now_ns, record)
    for step in range(int(outputs.max())):
        # Each row reads its padded context, whether or not its sequence has ended.
        load = StepLoad(width, width, 0, int(prompts.sum()) + width * (step + 1))
        now_ns = _step(step_time, load, members, now_ns, record)
        record.add_tokens(members[outputs > step], now_ns)
        record.num_slots += width
    record.num_finished += width
    return now_ns


def _step(
    step_time: StepTime,
    load: StepLoad,
    members: np.typing.NDArray[np.int32],
    now_ns: int,
    record: Record,
) -> int:
    end_ns = now_ns + round(step_time.ms(load) * _MS_NS)
    lanes = np.arange(len(members), dtype=np.int32)
    record.steps.append(StepRecord(now_ns, end_ns, load, members, lanes))
    return end_ns
