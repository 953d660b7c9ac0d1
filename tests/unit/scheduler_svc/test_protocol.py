"""With the worker and the admissions: losses, polls, stale messages, epochs, numbers."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from scheduler_svc.events import Note, WorkerSilent
from scheduler_svc.pipeline import POLL_AFTER_NS
from services.contracts.beats import Beat, KvPoolLoad, ServiceKind, StreamMark, WorkerLoad
from services.contracts.errors import ErrorCode, InvariantError
from services.contracts.kv import KvDelta, KvSnapshot, KvStatus, LeaseReply
from services.contracts.public import FinishReason
from services.contracts.sampling import SamplingParams
from services.contracts.sequences import Logprobs
from services.contracts.step import (
    Attach,
    LaneLogprobs,
    Poll,
    PollReply,
    PollState,
    StepEvent,
    StepPlan,
)
from services.contracts.vectors import pack
from tests.unit.scheduler_svc.rig import MS, Rig, answer, lanes_of


def _running(max_tokens: int = 12) -> Rig:
    rig = Rig()
    rig.submit("s1", [1], max_tokens)
    return rig


def _poll_reply(rig: Rig, state: PollState, **more: object) -> PollReply:
    asked = rig.last(Poll)
    return PollReply(asked.generation, asked.epoch, asked.step_id, state, **more)  # type: ignore[arg-type]


# ---- losses


def test_a_silent_step_is_polled_at_its_deadline() -> None:
    rig = _running()
    assert rig.core.wake_at_ns == POLL_AFTER_NS
    rig.tick(POLL_AFTER_NS - 1)
    assert not rig.all(Poll)
    rig.tick(1)
    assert [poll.step_id for poll in rig.all(Poll)] == [1]
    rig.tick(POLL_AFTER_NS)
    assert [poll.step_id for poll in rig.all(Poll)] == [1, 1]


def test_unknown_is_answered_by_the_same_plans() -> None:
    rig = _running()
    sent = list(rig.queue)
    rig.queue.clear()
    rig.tick(POLL_AFTER_NS)
    effects = rig.handle(_poll_reply(rig, PollState.UNKNOWN))
    assert [e for e in effects if isinstance(e, StepPlan)] == sent
    rig.drain()
    assert rig.tokens(1) == answer([1], 12)


def test_only_the_plans_from_the_unknown_step_on_come_again() -> None:
    rig = _running()
    rig.step()
    sent = list(rig.queue)
    assert [plan.step_id for plan in sent] == [2, 3]
    rig.queue.clear()
    rig.tick(POLL_AFTER_NS)
    effects = rig.handle(_poll_reply(rig, PollState.UNKNOWN))
    assert [e for e in effects if isinstance(e, StepPlan)] == sent


def test_running_is_patience() -> None:
    rig = _running()
    rig.tick(POLL_AFTER_NS)
    planned = len(rig.plans)
    assert not rig.handle(_poll_reply(rig, PollState.RUNNING))
    assert len(rig.plans) == planned
    assert rig.core.wake_at_ns == 2 * POLL_AFTER_NS


def test_a_lost_result_comes_with_the_poll() -> None:
    rig = _running()
    lost = rig.run(rig.queue.popleft())
    rig.tick(POLL_AFTER_NS)
    rig.handle(_poll_reply(rig, PollState.RESULT, result=lost))
    rig.drain()
    assert rig.tokens(1) == answer([1], 12)


def test_a_result_after_a_lost_one_asks_for_the_lost_one() -> None:
    rig = _running()
    lost, second = rig.run(rig.queue.popleft()), rig.run(rig.queue.popleft())
    rig.handle(second)
    assert [poll.step_id for poll in rig.all(Poll)] == [1]
    assert rig.tokens(1) == []
    rig.handle(_poll_reply(rig, PollState.RESULT, result=lost))
    rig.tick(POLL_AFTER_NS)
    rig.handle(_poll_reply(rig, PollState.RESULT, result=second))
    assert rig.tokens(1) == answer([1], 2)


def test_repeated_and_stale_results_are_ignored() -> None:
    rig = _running()
    rig.step()
    rig.step()
    known = rig.tokens(1)
    for result in rig.results:
        assert not rig.handle(result)
    rig.handle(msgspec.structs.replace(rig.results[0], step_id=3, generation=99))
    rig.handle(msgspec.structs.replace(rig.results[0], step_id=3, epoch=0))
    assert rig.tokens(1) == known
    rig.drain()
    assert rig.tokens(1) == answer([1], 12)


def test_a_result_of_other_lanes_stops_the_scheduler() -> None:
    rig = _running()
    result = rig.run(rig.queue.popleft())
    with pytest.raises(InvariantError, match="sampled lanes"):
        rig.core.handle(msgspec.structs.replace(result, lanes=pack([3])), 0)


# ---- epochs and generations


def test_the_first_plan_of_an_epoch_resets_the_mirror() -> None:
    rig = _running()
    rig.drain()
    assert [plan.reset for plan in rig.plans] == [True] + [False] * (len(rig.plans) - 1)
    assert [plan.step_id for plan in rig.plans] == list(range(1, len(rig.plans) + 1))


def test_attach_is_asked_again_and_an_old_answer_is_ignored() -> None:
    rig = Rig(attach=False)
    rig.tick()
    (first,) = rig.all(Attach)
    rig.handle(WorkerSilent(gone=False))
    assert rig.core.wake_at_ns == 250 * MS
    rig.tick(250 * MS)
    assert rig.all(Attach) == [first, first], "the same attempt: a lost reply costs no epoch"
    rig.attached(attempt="somebody-else")
    assert not rig.core.beat().engine.ready  # type: ignore[union-attr]
    rig.attached()
    assert rig.core.beat().engine.ready  # type: ignore[union-attr]
    rig.attached()
    assert len(rig.all(KvSnapshot)) == 1


def test_a_new_generation_recomputes_what_ran() -> None:
    rig = _running()
    for _ in range(3):
        rig.step()
    rig.generation = 2
    rig.new_worker()
    rig.handle(_worker_beat(2))
    assert rig.submit("s2", [2], 3).code is ErrorCode.NO_WORKER
    rig.tick()
    rig.attached()
    (join,) = rig.queue[0].join
    assert rig.queue[0].reset and lanes_of(join.token_ids) == [1, *answer([1], 3)]
    assert join.num_prompt_tokens == 1 and join.num_computed_tokens == 0
    rig.drain()
    assert rig.tokens(1) == answer([1], 12)
    assert [end.num_output_tokens for end in rig.ends(1)] == [12]


def _worker_beat(generation: int, epoch: int = 0) -> Beat:
    load = WorkerLoad("shadow", 0, 64)
    return Beat(ServiceKind.GPU_WORKER, "worker-0", generation, epoch, worker=load)


def test_nobody_at_the_workers_subject_means_detach() -> None:
    rig = _running()
    rig.handle(WorkerSilent(gone=False))
    assert rig.core.beat().engine.ready  # type: ignore[union-attr]
    rig.handle(WorkerSilent(gone=True))
    assert not rig.core.beat().engine.ready  # type: ignore[union-attr]
    assert [note.event for note in rig.all(Note)] == ["attached", "detached"]


def test_a_higher_epoch_of_the_same_generation_supersedes() -> None:
    rig = _running()
    result = rig.run(rig.queue.popleft())
    with pytest.raises(InvariantError, match="taken over"):
        rig.core.handle(msgspec.structs.replace(result, epoch=rig.epoch + 1), 0)


def test_a_ledger_that_knows_a_higher_epoch_of_a_worker_before_makes_it_attach_above() -> None:
    rig = _running()
    pool = KvPoolLoad("engine-0", 0, 41, 64, 0, 0, 0, False)
    rig.handle(Beat(ServiceKind.KV_STORE, "kv-0", pools=[pool]))
    rig.tick()
    assert rig.last(Attach).epoch_seen == 41


@pytest.mark.parametrize("by", ["ledger's beat", "lease reply", "worker's beat"])
def test_whoever_knows_a_higher_epoch_of_this_worker_supersedes(by: str) -> None:
    """Found by the simulator (seeds 75, 90, 144): two schedulers attached in turn for ever, and an
    idle one never noticed.
    """
    rig = _running()
    pool = KvPoolLoad("engine-0", 1, 41, 64, 0, 0, 0, False)
    event = {
        "ledger's beat": Beat(ServiceKind.KV_STORE, "kv-0", pools=[pool]),
        "lease reply": LeaseReply(1, 41, 7, KvStatus.STALE),
        "worker's beat": _worker_beat(1, 41),
    }[by]
    with pytest.raises(InvariantError, match="has taken over"):
        rig.core.handle(event, 0)


def test_a_late_beat_of_the_worker_before_changes_nothing() -> None:
    rig = _running()
    rig.handle(_worker_beat(0, 99))
    assert rig.core.link.is_ready


def test_a_ledger_that_missed_a_delta_gets_a_snapshot() -> None:
    rig = _running()
    before = len(rig.all(KvSnapshot))
    pool = KvPoolLoad("engine-0", 1, rig.epoch, 64, 0, 0, 0, True)
    rig.handle(Beat(ServiceKind.KV_STORE, "kv-0", pools=[pool]))
    assert len(rig.all(KvSnapshot)) == before + 1
    rig.drain()
    assert rig.tokens(1) == answer([1], 12)


# ---- numbers


def test_updates_are_numbered_per_admission_and_beats_name_the_last() -> None:
    rig = Rig()
    rig.submit("s1", [1], 4, admission_id="admission-a")
    rig.submit("s2", [2], 6, admission_id="admission-b")
    rig.drain()
    from scheduler_svc.events import SendUpdates

    numbers: dict[str, list[int]] = {}
    for send in rig.all(SendUpdates):
        numbers.setdefault(send.admission_id, []).append(send.updates.number)
    assert set(numbers) == {"admission-a", "admission-b"}
    for series in numbers.values():
        assert series == list(range(1, len(series) + 1))
    marks = {mark.name: mark.number for mark in rig.core.beat().streams}
    assert marks["admission-a"] == numbers["admission-a"][-1]
    assert marks["admission-b"] == numbers["admission-b"][-1]
    assert marks["engine-0"] == rig.last(KvDelta).number


def test_updates_begin_anew_with_an_epoch() -> None:
    rig = _running()
    rig.step()
    rig.new_worker()
    rig.generation = 2
    rig.handle(_worker_beat(2))
    rig.tick()
    rig.attached()
    seen = len(rig.updates)
    rig.step()
    rig.step()
    assert [updates.number for updates in rig.updates[seen:]][:2] == [1, 2]
    assert {updates.epoch for updates in rig.updates[seen:]} == {rig.epoch}


def test_snapshots_and_deltas_are_numbered_without_a_hole() -> None:
    rig = _running(40)
    rig.drain()
    sent = [effect for effect in rig.effects if isinstance(effect, KvSnapshot | KvDelta)]
    assert isinstance(sent[0], KvSnapshot) and isinstance(sent[-1], KvDelta)
    assert [message.number for message in sent] == list(range(1, len(sent) + 1))


def test_an_idle_beat_counts_what_was_done() -> None:
    rig = Rig(block_size=4)
    rig.submit("s1", list(range(9)), 3)
    rig.drain()
    load = rig.core.beat().engine
    assert load is not None
    assert (load.num_running, load.num_waiting, load.num_blocks_held) == (0, 0, 0)
    assert (load.num_prompt_tokens, load.num_output_tokens) == (9, 3)
    assert load.num_steps == len(rig.plans) == 3 and load.num_step_seqs == 3
    assert load.num_blocks_total == 63 and load.num_prefix_queries == 8


def test_a_step_event_tells_decodes_from_prompts() -> None:
    rig = Rig()
    rig.submit("s1", [1, 2, 3], 3)
    rig.step()
    rig.submit("s2", [4, 5], 3)
    rig.drain()
    events = [(e.num_decode_tokens, e.num_prefill_tokens) for e in rig.all(StepEvent)]
    assert events[0] == (0, 3)
    assert (1, 2) in events or (0, 2) in events
    assert [event.step_id for event in rig.all(StepEvent)] == list(range(1, len(events) + 1))


# ---- numerics and log-probabilities


def test_logits_that_are_not_finite_end_their_sequence_alone_and_are_not_cached() -> None:
    rig = Rig(block_size=2)
    rig.submit("s1", [1, 2, 3], 5)
    rig.step()
    rig.submit("s2", [4, 5], 5)
    plan = rig.queue.popleft()
    result = rig.run(plan)
    lane = lanes_of(result.lanes)[0]
    before = len([d for d in rig.all(KvDelta) if d.commits])
    rig.handle(msgspec.structs.replace(result, failed=pack([lane])))
    assert [(e.reason, e.code) for e in rig.ends(1)] == [(FinishReason.ERROR, ErrorCode.NUMERICS)]
    assert len([d for d in rig.all(KvDelta) if d.commits]) == before, "its block may hold NaN"
    rig.drain()
    assert rig.tokens(2) == answer([4, 5], 5)


def test_the_last_token_of_a_sequence_may_fail_too() -> None:
    rig = Rig(block_size=2)
    rig.submit("s1", [1, 2, 3], 2)
    rig.step()
    before = len([d for d in rig.all(KvDelta) if d.commits])
    result = rig.run(rig.queue.popleft())
    rig.handle(msgspec.structs.replace(result, failed=result.lanes))
    assert [(e.reason, e.code) for e in rig.ends(1)] == [(FinishReason.ERROR, ErrorCode.NUMERICS)]
    assert rig.tokens(1) == answer([1, 2, 3], 1)
    assert len([d for d in rig.all(KvDelta) if d.commits]) == before
    assert rig.core.batch.lease.num_held == 0


def test_logprobs_travel_with_their_token_and_are_kept_for_repair() -> None:
    rig = Rig()
    rig.submit("s1", [1], 4, sampling=SamplingParams(num_logprobs=0))
    entry = Logprobs(np.array([-0.5], "<f4").tobytes())
    while rig.queue:
        result = rig.run(rig.queue.popleft())
        lanes = [LaneLogprobs(lane, entry) for lane in lanes_of(result.lanes)]
        rig.handle(msgspec.structs.replace(result, logprobs=lanes))
    told = [(e.tag, e.offset) for updates in rig.updates for e in updates.logprobs]
    assert told == [(1, 0), (1, 1), (1, 2), (1, 3)]
    rig.submit("s1", [1], 4, accepted=answer([1], 2))
    assert [e.offset for e in rig.updates[-1].logprobs] == [2, 3]


def test_beats_of_strangers_are_harmless() -> None:
    rig = _running()
    marks = [StreamMark("admission-0", 99)]
    rig.handle(Beat(ServiceKind.ADMISSION, "admission-0", streams=marks))
    rig.handle(Beat(ServiceKind.KV_STORE, "kv-0"))
    rig.drain()
    assert rig.tokens(1) == answer([1], 12)
