"""Sequences come and go: refusals, repeats, ends, aborts in every state, deadlines, preemption."""

from __future__ import annotations

from typing import Any

import pytest

import kv_store.ledger
import scheduler_svc.roster
from scheduler_svc.events import DrainAsked, Reply
from services.contracts.errors import ErrorCode
from services.contracts.kv import KvDelta, KvStatus, LeaseReply, LeaseRequest, LookupRequest
from services.contracts.limits import FINISHED_LOG_SECONDS
from services.contracts.public import FinishReason
from services.contracts.sequences import AbortReply
from services.contracts.step import Attach, StepEvent
from services.contracts.vectors import pack
from tests.unit.containers import container_sizes
from tests.unit.scheduler_svc.rig import MS, VOCAB_SIZE, Rig, answer, lanes_of

SECOND = 1000 * MS


# ---- refusals


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "code"),
    [
        ([], 5, ErrorCode.INVALID_REQUEST),
        ([1] * 200, 57, ErrorCode.CONTEXT_LENGTH_EXCEEDED),
        ([1] * 21, 1, None),
        ([1] * 21, 2, ErrorCode.NEVER_FITS),
        ([1] * 20, 1, None),
    ],
)
def test_what_cannot_run_is_refused_at_once(
    prompt: list[int], max_tokens: int, code: ErrorCode | None
) -> None:
    # 21 tokens need slots: the last one sampled needs none.
    rig = Rig(block_size=3, num_blocks=8, max_model_len=256)
    assert rig.submit("s1", prompt, max_tokens).code is code


def test_the_context_limit_is_exact_and_says_both_numbers() -> None:
    rig = Rig(max_model_len=16)
    assert rig.submit("s1", [1] * 10, 6).code is None
    reply = rig.submit("s2", [1] * 10, 7)
    assert reply.code is ErrorCode.CONTEXT_LENGTH_EXCEEDED
    assert "17" in reply.message and "16" in reply.message


def test_a_full_queue_refuses() -> None:
    rig = Rig(max_num_seqs=1, max_waiting=2)
    codes = [rig.submit(f"s{n}", [n], 50).code for n in range(1, 6)]
    assert codes == [None, None, None, ErrorCode.QUEUE_FULL, ErrorCode.QUEUE_FULL]


def test_without_a_worker_there_is_no_work() -> None:
    rig = Rig(attach=False)
    assert rig.submit("s1", [1], 5).code is ErrorCode.NO_WORKER


def test_a_draining_engine_takes_what_is_in_flight_and_plans_nothing_more() -> None:
    rig = Rig(block_size=2)
    rig.submit("s1", [1], 9)
    rig.step()
    rig.step()
    in_flight = len(rig.queue)
    rig.handle(DrainAsked())
    assert rig.submit("s2", [1], 5).code is ErrorCode.DRAINING
    assert rig.submit("s1", [1], 9).code is None
    assert not rig.core.is_drained
    assert not rig.core.beat().engine.ready
    assert rig.drain() == in_flight
    assert rig.core.is_drained
    assert rig.tokens(1) == answer([1], 9)[: 2 + in_flight]
    committed = [len(lanes_of(d.commits.block_ids)) for d in rig.all(KvDelta) if d.commits]
    assert sum(committed) == (2 + in_flight) // 2, "every full block is the successor's"
    assert rig.tick(10**9) == []


# ---- repeats


def test_a_repeated_submission_starts_nothing_new() -> None:
    rig = Rig()
    rig.submit("s1", [1], 5)
    rig.submit("s1", [1], 5)
    rig.drain()
    assert sum(len(plan.join) for plan in rig.plans) == 1
    assert rig.tokens(1) == answer([1], 5)


def test_a_resubmission_gets_everything_from_its_offset_on() -> None:
    rig = Rig()
    rig.submit("s1", [1], 9)
    for _ in range(4):
        rig.step()
    seen = len(rig.updates)
    full = answer([1], 9)
    rig.submit("s1", [1], 9, accepted=full[:1], tag=7)
    (repair,) = rig.updates[seen:]
    assert lanes_of(repair.tags) == [7] and lanes_of(repair.offsets) == [1]
    assert lanes_of(repair.token_ids) == full[1:4]
    assert [started.tag for started in repair.started] == [7]
    rig.drain()
    assert lanes_of(rig.updates[-1].tags) == [7], "what follows carries the new tag"


def test_a_finished_sequence_is_resent_until_it_is_acknowledged() -> None:
    rig = Rig()
    rig.submit("s1", [1], 3)
    rig.drain()
    planned = len(rig.plans)
    rig.submit("s1", [1], 3)
    assert lanes_of(rig.updates[-1].token_ids) == answer([1], 3)
    assert [end.num_output_tokens for end in rig.updates[-1].finished] == [3]
    rig.abort("s1")
    assert len(rig.plans) == planned
    assert not list(rig.core.roster.logged())
    # Unknown now: it would run anew.
    rig.submit("s1", [1], 3)
    assert len(rig.plans) > planned


def test_the_log_forgets_after_sixty_seconds() -> None:
    rig = Rig()
    rig.submit("s1", [1], 3)
    rig.drain()
    rig.tick(FINISHED_LOG_SECONDS * SECOND)
    assert [seq.seq_id for seq in rig.core.roster.logged()] == ["s1"]
    rig.tick(1)
    rig.tick(FINISHED_LOG_SECONDS * SECOND)
    assert not list(rig.core.roster.logged())


def test_the_log_is_bounded_and_drops_its_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_svc.roster, "FINISHED_LOG_ENTRIES", 3)
    rig = Rig()
    for number in range(1, 6):
        rig.submit(f"s{number}", [number], 1)
        rig.drain()
    assert [seq.seq_id for seq in rig.core.roster.logged()] == ["s3", "s4", "s5"]


def test_the_log_counts_from_the_end_even_where_no_tick_came_between() -> None:
    rig = Rig()
    rig.submit("s1", [1], 40)
    while rig.queue:
        rig.now_ns += 3 * SECOND
        rig.step()
    assert rig.now_ns > FINISHED_LOG_SECONDS * SECOND
    rig.tick(SECOND)
    assert [seq.seq_id for seq in rig.core.roster.logged()] == ["s1"]


def test_accepted_tokens_of_an_unknown_sequence_are_the_start() -> None:
    rig = Rig()
    full = answer([1, 2, 3], 6)
    rig.submit("s1", [1, 2, 3], 6, accepted=full[:4])
    rig.drain()
    (join,) = rig.plans[0].join
    assert lanes_of(join.token_ids) == [1, 2, 3, *full[:4]] and join.num_prompt_tokens == 3
    offsets = [offset for updates in rig.updates for offset in lanes_of(updates.offsets)]
    assert offsets == [4, 5]
    assert [end.num_output_tokens for end in rig.ends(1)] == [6]


# ---- aborts


def _abort_twice(rig: Rig, seq_id: str = "s1") -> None:
    for _ in range(2):
        effects = rig.abort(seq_id)
        replies = [e.message for e in effects if isinstance(e, Reply)]
        assert replies == [AbortReply(rig.core.beat().epoch)]


def _is_empty(rig: Rig) -> bool:
    core = rig.core
    return not (
        any(core.roster.live())
        or any(core.roster.logged())
        or len(core.waiting)
        or core.batch.lanes.num_active
        or core.batch.lease.num_held
        or core.batch.lease.lookups
    )


def test_abort_while_waiting() -> None:
    rig = Rig(max_num_seqs=1)
    rig.submit("s1", [1], 5)
    rig.submit("s2", [2], 5)
    _abort_twice(rig, "s2")
    rig.drain()
    rig.abort("s1")
    assert _is_empty(rig) and rig.tokens(2) == []


def test_abort_while_its_lookup_is_open() -> None:
    rig = Rig(ledger=False)
    asked = rig.last(LeaseRequest)
    rig.handle(LeaseReply(asked.generation, asked.epoch, asked.number, KvStatus.OK, pack([1]), 9))
    rig.submit("s1", list(range(9)), 5)
    assert rig.all(LookupRequest)
    _abort_twice(rig)
    assert _is_empty(rig)


def test_abort_while_running() -> None:
    rig = Rig()
    rig.submit("s1", [1], 50)
    rig.step()
    _abort_twice(rig)
    rig.drain()
    assert _is_empty(rig)


def test_abort_while_its_last_token_is_in_flight() -> None:
    rig = Rig()
    rig.submit("s1", [1], 2)
    assert len(rig.queue) == 2
    _abort_twice(rig)
    rig.drain()
    assert _is_empty(rig) and rig.tokens(1) == []


def test_abort_while_preempted_and_in_flight() -> None:
    rig = _three_on_six_blocks()
    while not _preempted(rig):
        rig.step()
    _abort_twice(rig, _preempted(rig)[0])
    rig.drain()
    rig.abort("s1", "s2", "s3")
    assert _is_empty(rig)


def test_abort_after_the_end() -> None:
    rig = Rig()
    rig.submit("s1", [1], 2)
    rig.drain()
    _abort_twice(rig)
    assert _is_empty(rig)


def test_abort_of_nobody() -> None:
    rig = Rig()
    _abort_twice(rig, "stranger")
    assert _is_empty(rig)


def test_an_aborted_sequence_ends_once_in_its_updates() -> None:
    rig = Rig()
    rig.submit("s1", [1], 50)
    rig.step()
    _abort_twice(rig)
    rig.drain()
    assert [end.reason for end in rig.ends(1)] == [FinishReason.ABORT]
    assert rig.tokens(1) == answer([1], len(rig.tokens(1)))


# ---- deadlines


def test_a_deadline_ends_a_sequence_wherever_it_is() -> None:
    rig = Rig(max_num_seqs=1)
    rig.submit("s1", [1], 50, deadline_ms=30)
    rig.submit("s2", [2], 50, deadline_ms=10)
    assert rig.core.wake_at_ns is not None and rig.core.wake_at_ns <= 10 * MS
    rig.tick(10 * MS)
    assert [(e.reason, e.code) for e in rig.ends(2)] == [
        (FinishReason.ERROR, ErrorCode.DEADLINE_EXCEEDED)
    ]
    assert not rig.ends(1)
    rig.tick(20 * MS)
    assert [end.code for end in rig.ends(1)] == [ErrorCode.DEADLINE_EXCEEDED]
    rig.drain()
    assert rig.core.batch.lease.num_held == 0


def test_a_deadline_after_the_end_does_nothing() -> None:
    rig = Rig()
    rig.submit("s1", [1], 3, deadline_ms=10)
    rig.drain()
    rig.tick(10 * MS)
    assert [end.reason for end in rig.ends(1)] == [FinishReason.LENGTH]


# ---- preemption


def _three_on_six_blocks(**more: Any) -> Rig:
    """Case 5: 6 blocks of 4, three prompts of 7 tokens, 8 tokens each."""
    rig = Rig(block_size=4, num_blocks=7, max_num_seqs=3, **more)
    for number in (1, 2, 3):
        rig.submit(f"s{number}", [number] * 7, 8)
    return rig


def _preempted(rig: Rig) -> list[str]:
    return [seq.seq_id for seq in rig.core.roster.live() if seq.status == "preempted"]


def test_case_05_all_finish_with_the_tokens_of_a_run_alone() -> None:
    rig = _three_on_six_blocks()
    rig.drain()
    for number in (1, 2, 3):
        assert rig.tokens(number) == answer([number] * 7, 8)
        assert [end.num_output_tokens for end in rig.ends(number)] == [8]
    rig.abort("s1", "s2", "s3")
    assert _is_empty(rig)


def test_case_05_the_victim_is_the_newest_and_nobody_is_counted_twice() -> None:
    rig = _three_on_six_blocks()
    victims: list[str] = []
    while rig.queue:
        rig.step()
        victims += [v for v in _preempted(rig) if v not in victims]
        event = rig.last(StepEvent)
        assert event.num_seqs <= 3
    assert "s1" not in victims


def test_case_03_the_more_urgent_one_takes_the_block() -> None:
    """Pool 3 blocks of 4; A (9) and B (0) hold one full block each and both need another."""
    rig = Rig(block_size=4, num_blocks=4, max_num_seqs=2, prefix_caching=False)
    rig.submit("a1", [1, 2], 9, priority=9)
    rig.submit("b2", [3, 4], 9, priority=0)
    preempted: set[str] = set()
    while rig.queue:
        plan = rig.queue[0]
        scheduled = set(lanes_of(plan.chunk_lanes)) & set(lanes_of(plan.hold))
        assert not scheduled, "a lane is both scheduled and held"
        rig.step()
        preempted |= {seq.seq_id for seq in rig.core.roster.live() if seq.num_preemptions}
    assert preempted == {"a1"}
    assert rig.tokens(1) == answer([1, 2], 9)
    assert rig.tokens(2) == answer([3, 4], 9)


def test_a_preempted_sequence_comes_back_before_later_ones() -> None:
    rig = _three_on_six_blocks()
    rig.submit("s4", [4] * 7, 8)
    order: list[int] = []
    while rig.queue:
        order += [lanes_of(join.token_ids)[0] for join in rig.queue[0].join]
        rig.step()
    assert order[-1] == 4 or order.index(4) > order.index(3)
    assert rig.core.beat().engine.num_preemptions >= 1  # type: ignore[union-attr]
    for number in (1, 2, 3, 4):
        assert rig.tokens(number) == answer([number] * 7, 8)


def test_priority_orders_the_queue() -> None:
    rig = Rig(max_num_seqs=1)
    rig.submit("s1", [1], 1)
    rig.submit("s2", [2], 1)
    for number, priority in ((3, 5), (4, -5), (5, 0)):
        rig.submit(f"s{number}", [number], 1, priority=priority)
    rig.drain()
    order = [lanes_of(join.token_ids)[0] for plan in rig.plans for join in plan.join]
    assert order == [1, 2, 4, 5, 3]


# ---- case 49: nothing grows


def test_case_49_no_container_grows_with_the_number_of_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Scheduler and ledger at rest, later and later: the same sizes, what is bounded at its cap."""
    monkeypatch.setattr(kv_store.ledger, "MAX_OPEN_REQUESTS", 64)
    rig = Rig(max_num_seqs=4)
    seen = []
    for number in range(1, 651):
        rig.submit(f"s{number}", [number % VOCAB_SIZE, number // 7, 9, 11, 13, 15, 17, 19], 1)
        rig.drain()
        rig.abort(f"s{number}")
        del rig.effects[1:], rig.plans[:], rig.results[:]
        if number in {550, 650}:
            rig.tick(1000 * MS)
            seen.append(container_sizes({"scheduler": rig.core, "ledger": rig.kv}))
    assert len(seen[0]) > 30, "it looks inside"
    assert seen[0] == seen[1]


def test_case_49_containers_are_empty_when_all_is_done() -> None:
    rig = Rig(max_num_seqs=4)
    for number in range(1, 61):
        rig.submit(f"s{number}", [number, 7, 9, 11, 13], 1, deadline_ms=10_000)
        rig.drain()
        rig.abort(f"s{number}")
    assert _is_empty(rig)
    core = rig.core
    assert not core.batch.lease.committed
    assert not rig.all(Attach)[1:]
    assert core.roster.next_deadline_ns > rig.now_ns
