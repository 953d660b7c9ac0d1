"""What the plans say, step by step, in small worked examples."""

from __future__ import annotations

from scheduler_svc.lease import LOOKUP_WAIT_NS
from services.contracts import codec
from services.contracts.errors import ErrorCode
from services.contracts.kv import (
    KvDelta,
    KvStatus,
    LeaseRequest,
    LookupReply,
    LookupRequest,
)
from services.contracts.public import FinishReason
from services.contracts.sampling import SamplingParams
from services.contracts.vectors import pack, unpack
from tests.unit.scheduler_svc.rig import MS, Rig, answer, lanes_of


def test_a_long_prompt_goes_in_chunks_of_the_budget() -> None:
    """The seeds' example: 10,000 tokens under a budget of 4,096."""
    rig = Rig(budget=4096, block_size=16, num_blocks=4096, max_model_len=10_100)
    prompt = [token % 500 for token in range(10_000)]
    rig.submit("s1", prompt, 2)
    rig.drain()
    chunks = [lanes_of(plan.chunk_tokens) for plan in rig.plans]
    assert chunks == [[4096], [4096], [1808], []]
    assert [len(plan.join) for plan in rig.plans] == [1, 0, 0, 0]
    assert rig.tokens(1) == answer(prompt, 2)


def test_five_requests_share_three_lanes() -> None:
    """The seeds' example: 3, 7, 4, 5, 2 output tokens on 3 lanes."""
    rig = Rig(max_num_seqs=3, num_blocks=64, ledger=False)
    counts = [3, 7, 4, 5, 2]
    for number, count in enumerate(counts, 1):
        rig.submit(f"s{number}", [number], count)
    assert not rig.plans, "nothing runs without blocks"
    rig.grant(list(range(1, 20)))
    assert rig.drain() == 8
    assert [len(plan.join) for plan in rig.plans] == [3, 0, 0, 1, 1, 0, 0, 0]
    for number, count in enumerate(counts, 1):
        assert rig.tokens(number) == answer([number], count)
        assert [end.reason for end in rig.ends(number)] == [FinishReason.LENGTH]


def test_a_lane_is_reused_in_the_plan_that_empties_it() -> None:
    rig = Rig(max_num_seqs=1)
    rig.submit("s1", [1], 1)
    rig.submit("s2", [2], 1)
    assert len(rig.plans) == 2
    first, second = rig.plans
    assert [join.lane for join in first.join] == [0]
    assert lanes_of(second.leave) == [0] and [join.lane for join in second.join] == [0]
    rig.drain()
    assert rig.tokens(1) == answer([1], 1) and rig.tokens(2) == answer([2], 1)


def test_case_04_decodes_come_first_and_prompts_get_the_rest() -> None:
    rig = Rig(budget=8, num_blocks=1000, max_num_seqs=8, max_model_len=400, prefix_caching=False)
    rig.submit("s1", [1], 110)
    rig.step()
    before = len(rig.tokens(1))
    for number in range(2, 102):
        rig.submit(f"s{number}", [number] * 8, 1)
        plan = rig.step()
        assert sum(lanes_of(plan.chunk_tokens)) <= 7
    assert len(rig.tokens(1)) == before + 100
    assert any(sum(lanes_of(plan.chunk_tokens)) == 7 for plan in rig.plans)


def test_a_steady_plan_is_small_whatever_the_batch_size() -> None:
    rig = Rig(max_num_seqs=64, budget=256, block_size=16, num_blocks=512, max_model_len=512)
    for number in range(1, 65):
        rig.submit(f"s{number}", [number], 100)
    for _ in range(5):
        rig.step()
    sizes = [len(codec.encode(rig.step())) for _ in range(10)]
    assert max(sizes) <= 64


def test_block_ids_are_appended_only_where_a_lane_crosses_into_a_block() -> None:
    rig = Rig(block_size=4, max_num_seqs=1)
    rig.submit("s1", [1, 2, 3], 8)
    appended = []
    while rig.queue:
        appended.append(len(lanes_of(rig.step().append_lanes)))
    # Positions 0-2 and 3 lie in the joined block; 4 and 8 begin new ones.
    assert appended == [0, 0, 1, 0, 0, 0, 1, 0]


def test_a_stop_costs_at_most_one_discarded_token() -> None:
    rig = Rig(max_num_seqs=1)
    full = answer([5], 20)
    rig.submit("s1", [5], 20, stop=[full[3]])
    steps = rig.drain()
    stopped_at = full.index(full[3]) + 1
    assert rig.tokens(1) == full[:stopped_at]
    assert [(end.reason, end.num_output_tokens) for end in rig.ends(1)] == [
        (FinishReason.STOP, stopped_at)
    ]
    assert steps <= stopped_at + 1
    assert rig.core.batch.lease.num_held == 0


def test_two_plans_are_in_flight_at_most() -> None:
    rig = Rig()
    rig.submit("s1", [1], 30)
    for _ in range(10):
        assert len(rig.queue) <= 2
        rig.tick(MS)
        assert len(rig.queue) <= 2
        rig.step()
    assert len(rig.queue) == 2


def test_the_next_plan_leaves_one_lead_before_the_predicted_end() -> None:
    rig = Rig()
    rig.submit("s1", [1], 60)
    for _ in range(20):
        rig.now_ns += 20 * MS
        rig.step(elapsed_us=20_000)
    assert len(rig.queue) == 1
    due, lead = rig.core.wake_at_ns, rig.core.batch.pipeline.lead.ns
    assert due is not None
    # The running step began with the last result and takes 20 ms.
    assert abs(due - (rig.now_ns + 20 * MS - lead)) <= MS // 100
    rig.tick(due - rig.now_ns - 1)
    assert len(rig.queue) == 1
    rig.tick(1)
    assert len(rig.queue) == 2


def test_a_newcomer_joins_the_very_next_plan() -> None:
    rig = Rig()
    rig.submit("s1", [1], 30)
    for _ in range(3):
        rig.step()
    planned = len(rig.plans)
    rig.submit("s2", [2], 3)
    rig.step()
    assert [join.lane for join in rig.plans[planned].join] == [1]


def test_freed_blocks_wait_for_every_step_that_names_them() -> None:
    rig = Rig(max_num_seqs=1, block_size=4)
    rig.submit("s1", list(range(8)), 20)
    rig.step()
    assert len(rig.queue) == 2
    held = rig.core.batch.lease.num_held
    released = len(_released(rig))
    rig.abort("s1")
    rig.step()
    assert rig.core.batch.lease.num_held == held
    assert len(_released(rig)) == released
    rig.step()
    assert rig.core.batch.lease.num_held == 0
    assert len(_released(rig)) > released


def _released(rig: Rig) -> list[int]:
    return [block for delta in rig.all(KvDelta) for block in lanes_of(delta.released)]


def test_blocks_are_committed_only_after_the_result_that_filled_them() -> None:
    rig = Rig(max_num_seqs=1, block_size=4)
    rig.submit("s1", list(range(9)), 4)
    assert not [delta for delta in rig.all(KvDelta) if delta.commits]
    rig.step()
    committed = [lanes_of(d.commits.block_ids) for d in rig.all(KvDelta) if d.commits]
    assert committed == [list(unpack(rig.plans[0].join[0].block_ids)[:2])]


def test_a_lane_without_a_block_is_held_and_goes_on_when_the_grant_comes() -> None:
    rig = Rig(max_num_seqs=2, block_size=4, num_blocks=9, ledger=False)
    grants = iter([1, 2, 3, 4])
    rig.grant([next(grants)])
    rig.submit("s1", [1, 2, 3], 9)
    rig.step()
    rig.step()
    asked = rig.last(LeaseRequest)
    while rig.queue:
        rig.step()
    # Position 4 has no slot: everything stands still, nothing was preempted.
    assert len(rig.tokens(1)) == 2
    assert rig.core.beat().engine.num_preemptions == 0  # type: ignore[union-attr]
    assert rig.last(LeaseRequest) == asked
    rig.grant([next(grants)])
    assert rig.queue
    while rig.queue:
        rig.step()
    assert rig.tokens(1) == answer([1, 2, 3], 6)


def test_a_sequence_waits_for_its_lookup_20_ms_at_most() -> None:
    rig = Rig(ledger=False, block_size=4)
    rig.grant([1, 2, 3, 4, 5])
    rig.submit("s1", list(range(9)), 2)
    assert not rig.plans
    assert rig.core.wake_at_ns == LOOKUP_WAIT_NS
    rig.tick(LOOKUP_WAIT_NS - 1)
    assert not rig.plans
    rig.tick(1)
    assert len(rig.plans) == 2
    assert lanes_of(rig.last(KvDelta).abandoned)


def test_a_late_lookup_changes_nothing() -> None:
    rig = Rig(ledger=False, block_size=4)
    rig.grant([1, 2, 3, 4, 5])
    rig.submit("s1", list(range(9)), 2)
    asked = rig.last(LookupRequest)
    rig.tick(LOOKUP_WAIT_NS)
    assert lanes_of(rig.last(KvDelta).abandoned) == [asked.number]
    held = dict(rig.core.batch.lease.holds)
    late = LookupReply(asked.generation, asked.epoch, asked.number, KvStatus.OK, pack([8, 9]))
    rig.handle(late)
    assert dict(rig.core.batch.lease.holds) == held
    rig.drain()
    assert rig.tokens(1) == answer(list(range(9)), 2)


def test_a_step_never_waits_for_a_lookup() -> None:
    rig = Rig(ledger=False, block_size=4)
    rig.grant([1, 2, 3, 4, 5])
    rig.submit("s1", [1, 2], 20)
    rig.submit("s2", list(range(9)), 2)
    planned = len(rig.plans)
    for _ in range(3):
        rig.step()
    assert len(rig.plans) == planned + 3
    assert all(not plan.join for plan in rig.plans[1:])


def test_a_hit_leaves_one_token_to_compute() -> None:
    rig = Rig(block_size=4, max_num_seqs=1)
    prompt = list(range(8))
    rig.submit("s1", prompt, 1)
    rig.drain()
    rig.submit("s2", prompt, 3)
    join = rig.plans[-1].join or rig.plans[-2].join
    assert join[0].num_computed_tokens == 4
    rig.drain()
    assert rig.tokens(2) == answer(prompt, 3)
    (started,) = [s for u in rig.updates for s in u.started if s.tag == 2]
    assert started.num_cached_tokens == 4


def test_case_27_prompt_logprobs_read_no_cache() -> None:
    rig = Rig(block_size=4, max_num_seqs=1)
    rig.submit("s1", list(range(9)), 1)
    rig.drain()
    rig.submit("s2", list(range(9)), 1, sampling=SamplingParams(num_prompt_logprobs=1))
    joins = [join for plan in rig.plans for join in plan.join]
    assert joins[-1].num_computed_tokens == 0


def test_case_59_salts_part_the_cache() -> None:
    rig = Rig(block_size=4, max_num_seqs=1)
    prompt = [*range(40), 77]
    for number, salt in enumerate([b"a", b"b", b"b", b"a"], 1):
        rig.submit(f"s{number}", prompt, 1, salt=salt)
        rig.drain()
    cached = [s.num_cached_tokens for u in rig.updates for s in u.started]
    assert cached == [0, 0, 40, 40]


def test_a_prompt_that_can_never_fit_is_refused_at_once_case_06() -> None:
    rig = Rig(block_size=4, num_blocks=6)
    kv_before = rig.kv.beat()
    reply = rig.submit("s1", list(range(22)), 1)
    assert reply.code is ErrorCode.NEVER_FITS
    assert "5 blocks" in reply.message
    assert rig.kv.beat() == kv_before and not rig.plans
    # 18 tokens are five blocks: all of the pool.
    assert rig.submit("s2", list(range(18)), 1).code is None
    rig.drain()
    assert rig.tokens(2) == answer(list(range(18)), 1)
