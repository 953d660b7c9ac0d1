"""StepEvents count as Dynamo's ForwardPassMetrics do."""

from __future__ import annotations

import numpy as np

from scheduler_svc.load import QueueLoad
from services.contracts.step import QueuedRequests, ScheduledRequests, StepEvent
from tests.unit.scheduler_svc.rig import Rig
from tests.unit.scheduler_svc.sequences import sequence


def test_a_mixed_step_by_hand() -> None:
    rig = Rig(budget=8, max_num_seqs=2)
    rig.submit("s1", [1, 2, 3], 9)
    rig.step()
    rig.submit("s2", list(range(12)), 2)
    rig.submit("s3", [5, 5], 1)
    rig.drain()
    events = [event for event in rig.all(StepEvent) if event.scheduled.num_prefill_requests]
    assert events[0].scheduled == ScheduledRequests(
        num_prefill_requests=1, sum_prefill_tokens=3, var_prefill_length=0.0
    )
    # The second prompt comes in chunks of seven and five beside one decode.
    first, second = events[1].scheduled, events[2].scheduled
    assert (first.num_decode_requests, first.sum_prefill_tokens) == (1, 7)
    assert (second.sum_prefill_tokens, second.sum_prefill_kv_tokens) == (5, 7)
    assert second.sum_decode_kv_tokens == first.sum_decode_kv_tokens + 1
    assert events[1].queued == QueuedRequests(num_prefill_requests=1, sum_prefill_tokens=2)


def test_variances_are_of_the_population() -> None:
    rig = Rig(budget=64)
    lengths = [3, 7, 12]
    for n, length in enumerate(lengths, start=1):
        rig.submit(f"s{n}", [n] * length, 8)
    rig.drain()
    events = rig.all(StepEvent)
    prefill = next(e for e in events if e.scheduled.num_prefill_requests == 2).scheduled
    assert prefill.var_prefill_length == np.var(lengths[1:])
    decode = next(e for e in events if e.scheduled.num_decode_requests == 3).scheduled
    assert decode.var_decode_kv_tokens > 0
    assert decode.sum_decode_kv_tokens >= sum(lengths)


def test_the_queue_is_counted_as_it_comes_and_goes() -> None:
    load = QueueLoad()
    waiting = [sequence(1, prompt=4), sequence(2, prompt=10), sequence(3, prompt=5)]
    waiting[2].append(7)
    for seq in waiting:
        load.add(seq)
    assert load.queued_requests() == QueuedRequests(
        num_prefill_requests=2,
        sum_prefill_tokens=14,
        var_prefill_length=9.0,
        num_decode_requests=1,
        sum_decode_kv_tokens=6,
        var_decode_kv_tokens=0.0,
    )
    for seq in waiting:
        load.remove(seq)
    assert load.queued_requests() == QueuedRequests()
