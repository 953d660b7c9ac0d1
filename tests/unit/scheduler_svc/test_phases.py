"""The phases of a traced sequence fill its time, whatever happens to it."""

from __future__ import annotations

import itertools

import pytest

from scheduler_svc.lease import LOOKUP_WAIT_NS
from scheduler_svc.policies import Policies
from services.contracts.beats import Beat, ServiceKind
from services.contracts.kv import KvStatus, LookupReply, LookupRequest
from services.contracts.spans import TimedSpan
from services.contracts.trace_context import TraceContext
from services.contracts.vectors import pack
from tests.unit.scheduler_svc.rig import MS, Rig

PLACE = TraceContext("ab" * 16, "cd" * 8, sampled=True)
PHASES = {"queue", "prefill", "decode", "preempted", "recover"}


def traced(rig: Rig, seq_id: str, prompt: list[int], max_tokens: int) -> int:
    """Submit -> when."""
    reply = rig.submit(seq_id, prompt, max_tokens, traceparent=PLACE.traceparent)
    assert reply.code is None
    return rig.now_ns


def phases(rig: Rig, seq_id: str) -> list[TimedSpan]:
    return [s for s in rig.all(TimedSpan) if s.request_id == seq_id and s.name in PHASES]


def parts(rig: Rig, seq_id: str) -> list[TimedSpan]:
    return [s for s in rig.all(TimedSpan) if s.request_id == seq_id and s.name not in PHASES]


def steps(rig: Rig, limit: int = 500) -> None:
    """One step a millisecond until nothing is planned."""
    for _ in range(limit):
        if not rig.queue:
            return
        rig.now_ns += MS
        rig.step()
    raise AssertionError("it does not end")


def check_partition(rig: Rig, seq_id: str, begun_ns: int) -> None:
    """No gap, no overlap, from the submission to the end; every part within its phase's id."""
    found = phases(rig, seq_id)
    assert found[0].start_ns == begun_ns
    for before, after in itertools.pairwise(found):
        assert before.end_ns == after.start_ns
    assert sum(s.end_ns - s.start_ns for s in found) == found[-1].end_ns - begun_ns
    ids = {s.span_id for s in found}
    every = found + parts(rig, seq_id)
    assert len({s.span_id for s in every}) == len(every)
    assert all(s.parent_id == PLACE.span_id for s in found)
    assert all(s.parent_id in ids for s in parts(rig, seq_id))
    assert {s.place for s in every} == {PLACE}


def test_a_chunked_prompt() -> None:
    rig = Rig(budget=8)
    begun = traced(rig, "s1", list(range(20)), 4)
    steps(rig)
    assert [s.name for s in phases(rig, "s1")] == ["queue", "prefill", "decode"]
    chunks = [s.attributes["num_tokens"] for s in parts(rig, "s1") if s.name == "prefill chunk"]
    assert chunks == [8, 8, 4]
    (first,) = [s for s in parts(rig, "s1") if s.name == "first token"]
    decode = phases(rig, "s1")[-1]
    assert first.end_ns == decode.start_ns
    assert decode.attributes["num_output_tokens"] == 4
    assert decode.attributes["finish_reason"] == "length"
    check_partition(rig, "s1", begun)


@pytest.mark.parametrize("max_tokens", [1, 2, 5])
def test_a_last_chunk_that_leaves_one_token_is_no_decode_yet(max_tokens: int) -> None:
    """That token is computed as a decode is: with it the prompt ends."""
    rig = Rig(budget=8)
    begun = traced(rig, "s1", list(range(9)), max_tokens)
    steps(rig)
    chunks = [s.attributes["num_tokens"] for s in parts(rig, "s1") if s.name == "prefill chunk"]
    assert chunks == [8, 1]
    (first,) = [s for s in parts(rig, "s1") if s.name == "first token"]
    found = phases(rig, "s1")
    assert [s.name for s in found] == ["queue", "prefill", "decode"]
    assert first.end_ns == found[1].end_ns
    check_partition(rig, "s1", begun)


def test_who_waits_for_a_lane_is_in_the_queue() -> None:
    rig = Rig(max_num_seqs=1)
    traced(rig, "s1", [1, 2], 6)
    begun = traced(rig, "s2", [3, 4], 2)
    steps(rig)
    queue = phases(rig, "s2")[0]
    assert queue.name == "queue" and queue.end_ns - queue.start_ns >= 5 * MS
    check_partition(rig, "s2", begun)


def test_preempted_and_back() -> None:
    """Case 5: six blocks of four tokens for three prompts of seven with eight to come."""
    rig = Rig(num_blocks=7, block_size=4, prefix_caching=False)
    begun = {f"s{n}": traced(rig, f"s{n}", [n] * 7, 8) for n in (1, 2, 3)}
    for _ in range(200):
        if len([s for s in rig.all(TimedSpan) if "finish_reason" in s.attributes]) == 3:
            break
        rig.now_ns += MS
        if rig.queue:
            rig.step()
        else:
            rig.tick()
    names = {seq_id: [s.name for s in phases(rig, seq_id)] for seq_id in begun}
    assert any("preempted" in found for found in names.values()), names
    for seq_id, at_ns in begun.items():
        found = names[seq_id]
        for index, name in enumerate(found):
            if name == "preempted":
                assert found[index + 1] == "prefill", "it comes back by computing what it lost"
        check_partition(rig, seq_id, at_ns)


def test_a_new_worker_is_a_recovery() -> None:
    rig = Rig(budget=8)
    begun = traced(rig, "s1", list(range(20)), 6)
    for _ in range(4):
        rig.now_ns += MS
        rig.step()
    rig.generation += 1
    rig.now_ns += 30 * MS
    rig.handle(Beat(ServiceKind.GPU_WORKER, "worker-0", generation=rig.generation))
    rig.new_worker()
    rig.now_ns += 5 * MS
    rig.tick()
    rig.attached()
    steps(rig)
    found = phases(rig, "s1")
    assert [s.name for s in found] == ["queue", "prefill", "decode", "recover", "prefill", "decode"]
    recover = found[3]
    assert recover.end_ns - recover.start_ns == 5 * MS
    assert found[2].attributes["generation"] == 1 and recover.attributes["generation"] == 2
    assert [s.name for s in parts(rig, "s1")].count("first token") == 1, "it had one before"
    check_partition(rig, "s1", begun)


@pytest.mark.parametrize("steps_before", [0, 1, 4])
def test_an_abort_closes_the_phase(steps_before: int) -> None:
    rig = Rig(budget=8)
    begun = traced(rig, "s1", list(range(20)), 50)
    for _ in range(steps_before):
        rig.now_ns += MS
        rig.step()
    rig.now_ns += MS
    rig.abort("s1")
    assert phases(rig, "s1")[-1].attributes["finish_reason"] == "abort"
    check_partition(rig, "s1", begun)


@pytest.mark.parametrize("traceparent", ["", TraceContext("ab" * 16, "cd" * 8, False).traceparent])
def test_what_is_not_sampled_leaves_nothing(traceparent: str) -> None:
    rig = Rig()
    rig.submit("s1", [1, 2, 3], 4, traceparent=traceparent)
    steps(rig)
    assert not rig.all(TimedSpan)
    assert not any(join.traceparent for plan in rig.plans for join in plan.join)


def test_the_worker_hears_of_sampled_sequences_alone() -> None:
    rig = Rig()
    traced(rig, "s1", [1, 2, 3], 4)
    assert [join.traceparent for plan in rig.plans for join in plan.join] == [PLACE.traceparent]


def waiting_for_lookup() -> tuple[Rig, int]:
    """A ledger that answers when the test says -> the rig, and when its sequence was submitted."""
    rig = Rig(ledger=False)
    rig.grant([1, 2, 3, 4, 5, 6, 7, 8])
    return rig, traced(rig, "s1", list(range(20)), 4)


def test_a_lookup_is_a_part_of_the_wait() -> None:
    rig, begun = waiting_for_lookup()
    rig.now_ns += 3 * MS
    asked = rig.last(LookupRequest)
    hits = pack([9, 10])
    rig.handle(LookupReply(asked.generation, asked.epoch, asked.number, KvStatus.OK, hits))
    steps(rig)
    (lookup,) = [s for s in parts(rig, "s1") if s.name == "kv lookup"]
    assert (lookup.start_ns, lookup.end_ns) == (begun, begun + 3 * MS)
    assert lookup.attributes == {"num_hit_tokens": 8, "given_up": 0}
    assert lookup.parent_id == phases(rig, "s1")[0].span_id
    check_partition(rig, "s1", begun)


@pytest.mark.parametrize("how", ["silence", "abort", "another worker"])
def test_a_lookup_that_is_given_up_says_so(how: str) -> None:
    rig, begun = waiting_for_lookup()
    rig.now_ns += 5 * MS
    if how == "abort":
        rig.abort("s1")
    elif how == "silence":
        rig.tick(LOOKUP_WAIT_NS)
    else:
        rig.handle(Beat(ServiceKind.GPU_WORKER, "worker-0", generation=rig.generation + 1))
    (lookup,) = [s for s in parts(rig, "s1") if s.name == "kv lookup"]
    assert lookup.attributes == {"num_hit_tokens": 0, "given_up": 1}
    assert (lookup.start_ns, lookup.end_ns) == (begun, rig.now_ns)


def holds(rig: Rig, seq_id: str) -> list[tuple[int, int]]:
    return [(s.start_ns, s.end_ns) for s in parts(rig, seq_id) if s.name == "hold"]


def test_who_lacks_a_block_is_on_hold_until_the_lease_has_it() -> None:
    rig = Rig(max_num_seqs=2, num_blocks=9, ledger=False)
    rig.grant([1])
    begun = traced(rig, "s1", [1, 2, 3], 5)
    steps(rig)
    assert len(rig.tokens(1)) == 2 and not holds(rig, "s1"), "it is still on hold"
    rig.now_ns += 7 * MS
    rig.grant([2])
    granted_ns = rig.now_ns
    steps(rig)
    ((since_ns, until_ns),) = holds(rig, "s1")
    assert until_ns == granted_ns and until_ns - since_ns >= 7 * MS
    check_partition(rig, "s1", begun)


def test_who_must_wait_for_its_turn_is_on_hold() -> None:
    """Two prompts in chunks of four, apart from the decode steps of the one that is through."""
    rig = Rig(budget=4, policies=Policies(step_kind="separate"), prefix_caching=False)
    begun = {f"s{n}": traced(rig, f"s{n}", [n] * 14, 6) for n in (1, 2)}
    steps(rig)
    assert holds(rig, "s2"), "the first prompt takes the whole budget"
    for seq_id, at_ns in begun.items():
        check_partition(rig, seq_id, at_ns)


def test_an_abort_ends_a_hold() -> None:
    rig = Rig(max_num_seqs=2, num_blocks=9, ledger=False)
    rig.grant([1])
    begun = traced(rig, "s1", [1, 2, 3], 5)
    steps(rig)
    rig.now_ns += MS
    rig.abort("s1")
    assert [until_ns for _, until_ns in holds(rig, "s1")] == [rig.now_ns]
    check_partition(rig, "s1", begun)
