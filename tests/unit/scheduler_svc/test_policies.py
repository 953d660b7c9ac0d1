"""Policies: small functions over plain numbers, and what holds whichever is chosen."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from scheduler_svc.policies import CHOICES, Policies
from scheduler_svc.policies.batching import STATIC_PATIENCE_NS, Door, group_due_ns, may_join
from scheduler_svc.policies.fit import never_fits, watermark_blocks
from scheduler_svc.policies.margin import MIN_LEARNED, WINDOW, OutputLengths
from scheduler_svc.policies.queueing import (
    MAX_PASSES,
    MAX_TENANTS,
    TokenCounters,
    may_pass,
    next_in_line,
)
from scheduler_svc.policies.step_kind import (
    CONTINUE,
    DECODE,
    MAX_PREFILL_RUN,
    MIXED,
    PREFILL,
    Ballot,
    Kind,
    choose_kind,
    wants_prefill,
)
from scheduler_svc.policies.token_budget import FIRST_CHUNK, adaptive_budget, default_budget
from scheduler_svc.policies.victim import choose_victim
from scheduler_svc.step_time import StepTimeModel
from services.contracts.kv import LookupRequest
from services.contracts.vectors import Int32Array
from tests.unit.scheduler_svc.rig import Rig, answer, lanes_of
from tests.unit.scheduler_svc.sequences import sequence

MS = 1_000_000

EACH = [
    Policies(),
    Policies(step_kind="separate"),
    Policies(step_kind="separate", prefill_attempt_interval=3, prefill_any_attempt_interval=7),
    Policies(queue="fit"),
    Policies(queue="fair"),
    Policies(margin="watermark"),
    Policies(itl_target_ms=5.0),
]
GROUPS = [Policies(batching="static"), Policies(batching="dynamic")]


def _name(policies: Policies) -> str:
    plain = Policies()
    names = Policies.__dataclass_fields__
    changed = [n for n in names if getattr(policies, n) != getattr(plain, n)]
    return " ".join(f"{n}={getattr(policies, n)}" for n in changed) or "default"


# ---- what holds whichever is chosen


@pytest.mark.parametrize("policies", [*EACH, *GROUPS], ids=_name)
def test_the_answer_does_not_depend_on_the_policy(policies: Policies) -> None:
    rig = Rig(max_num_seqs=2, budget=8, num_blocks=20, policies=policies)
    prompts = [[n] * (5 * n) for n in range(1, 7)]
    for n, prompt in enumerate(prompts, 1):
        rig.submit(f"s{n}", prompt, 6)
    for _ in range(400):
        if rig.queue:
            rig.step()
        elif rig.core.wake_at_ns is not None:
            rig.tick(max(0, rig.core.wake_at_ns - rig.now_ns))
        else:
            break
    assert [rig.tokens(n) for n in range(1, 7)] == [answer(prompt, 6) for prompt in prompts]
    assert rig.core.batch.lease.num_held == 0


@pytest.mark.parametrize("policies", EACH, ids=_name)
def test_case_04_the_gap_of_a_decode_is_bounded(policies: Policies) -> None:
    rig = Rig(
        budget=8, num_blocks=1000, max_num_seqs=8, max_model_len=400, prefix_caching=False,
        policies=policies,
    )  # fmt: skip
    rig.submit("s1", [1], 390)
    rig.step()
    gap = longest = 0
    known = len(rig.tokens(1))
    for n in range(2, 102):
        rig.submit(f"s{n}", [n] * 8, 1)
        rig.step()
        gap = 0 if len(rig.tokens(1)) > known else gap + 1
        known = len(rig.tokens(1))
        longest = max(longest, gap)
    assert longest <= 16


@pytest.mark.parametrize("policies", EACH, ids=_name)
def test_the_same_inputs_give_the_same_plans(policies: Policies) -> None:
    def plans() -> list[str]:
        rig = Rig(max_num_seqs=3, budget=8, num_blocks=20, policies=policies)
        for n in range(1, 6):
            rig.submit(f"s{n}", [n] * (3 * n), 5, salt=bytes([n % 2]))
        rig.drain()
        return [str(plan) for plan in rig.plans]

    assert plans() == plans()


def test_counters_of_tenants_are_bounded() -> None:
    """Whatever the queue's policy is, every end is counted."""
    counters = TokenCounters()
    for tenant in range(MAX_TENANTS + 50):
        counters.add(str(tenant).encode(), 1)
    assert len(counters.served) == MAX_TENANTS


def test_pins_stay_while_a_group_waits_to_be_full() -> None:
    """Found by the simulator (seed 142): what waited was unpinned and looked up again, in turns, at
    the speed of the ledger.
    """
    rig = Rig(num_blocks=64, policies=Policies(batching="static"))
    prompt = list(range(1, 30))
    rig.submit("s1", prompt, 1)
    rig.tick(STATIC_PATIENCE_NS)
    rig.drain()
    before = len(rig.all(LookupRequest))
    for n in (2, 3):
        rig.submit(f"s{n}", [*prompt, n], 1)
    for _ in range(20):
        rig.tick()
    assert not rig.queue and len(rig.all(LookupRequest)) == before + 2


def test_every_choice_is_named() -> None:
    assert set(CHOICES) == {"batching", "step_kind", "queue", "margin"}
    assert all(getattr(Policies(), axis) in names for axis, names in CHOICES.items())


# ---- who fits


@pytest.mark.parametrize(
    ("num_usable", "num_running", "blocks"),
    [(100, 0, 0), (100, 1, 1), (100, 7, 4), (1000, 1, 10), (1001, 1, 11), (3, 1, 1)],
)
def test_the_watermark(num_usable: int, num_running: int, blocks: int) -> None:
    assert watermark_blocks(num_usable, num_running, 0.01) == blocks


def test_the_last_token_needs_no_slot() -> None:
    assert not never_fits(21, 4, 5) and never_fits(22, 4, 5)


def _ints(*values: int) -> Int32Array:
    return np.array(values, dtype=np.int32)


@pytest.mark.parametrize(
    ("tokens", "outputs", "peak"),
    [
        ((10,), (0,), 60),
        ((10, 10), (0, 0), 120),
        ((10, 50), (0, 40), 80),
        ((10, 59), (0, 49), 71),
        ((2, 20, 40), (0, 18, 38), 98),
    ],
)
def test_the_peak_where_all_outputs_are_alike(
    tokens: tuple[int, ...], outputs: tuple[int, ...], peak: int
) -> None:
    """All end after 50: what they hold just before one of them leaves."""
    lengths = OutputLengths()
    for _ in range(MIN_LEARNED):
        lengths.observe(50)
    room = _ints(*[100] * len(tokens))
    assert lengths.peak_tokens(_ints(*tokens), _ints(*outputs), room) == peak


def test_the_peak_of_outputs_that_differ_is_rarely_exceeded_and_not_far_off() -> None:
    rng = np.random.default_rng(0)
    drawn = np.maximum(1, rng.lognormal(5.4, 0.95, WINDOW + 40)).astype(np.int32)
    lengths = OutputLengths()
    for length in drawn[:WINDOW].tolist():
        lengths.observe(length)
    prompts, zeros = _ints(*[150] * 40), _ints(*[0] * 40)
    expected = lengths.peak_tokens(prompts, zeros, _ints(*[2000] * 40))
    peaks = []
    for _ in range(100):
        ends = rng.choice(drawn, 40)
        peaks.append(max(int(((150 + t) * (ends >= t)).sum()) for t in range(0, 2000, 10)))
    assert np.mean(np.array(peaks) > expected) < 0.1
    assert expected < 1.3 * np.mean(peaks)


def test_the_margin_learns_only_from_enough_outputs() -> None:
    outputs = OutputLengths()
    for _ in range(MIN_LEARNED - 1):
        outputs.observe(50)
    assert outputs.expected_more(_ints(0, 10), _ints(100, 100)).tolist() == [0, 0]
    outputs.observe(50)
    assert outputs.expected_more(_ints(0, 10, 49), _ints(100, 5, 100)).tolist() == [50, 5, 1]


def test_past_the_longest_half_of_what_is_allowed_is_expected() -> None:
    outputs = OutputLengths()
    for _ in range(MIN_LEARNED):
        outputs.observe(10)
    assert outputs.expected_more(_ints(10, 30), _ints(7, 100)).tolist() == [4, 50]


def test_old_outputs_are_forgotten() -> None:
    outputs = OutputLengths()
    for _ in range(WINDOW):
        outputs.observe(1000)
    for _ in range(WINDOW):
        outputs.observe(4)
    assert outputs.expected_more(_ints(0), _ints(5000)).tolist() == [4]


# ---- the rules of the DeepInfer engine, to the number


@pytest.mark.parametrize(
    ("max_model_len", "max_num_seqs", "num_speculative_tokens", "tokens"),
    [(8192, 256, 0, 8192), (2048, 256, 0, 4096), (2048, 4096, 1, 8192)],
)
def test_the_default_budget(
    max_model_len: int, max_num_seqs: int, num_speculative_tokens: int, tokens: int
) -> None:
    assert default_budget(max_model_len, max_num_seqs, num_speculative_tokens) == tokens


def test_separate_steps_by_their_default_intervals_and_watermark() -> None:
    policies = Policies(step_kind="separate")
    assert policies.prefill_attempt_interval == 70
    assert policies.prefill_any_attempt_interval == 100
    assert wants_prefill(policies, True, 0.90) and not wants_prefill(policies, True, 0.91)
    assert not wants_prefill(policies, False, 0.0)


# ---- who is next


def test_the_victim_is_the_newest_of_the_lowest_priority() -> None:
    old, new, urgent = sequence(1), sequence(2), sequence(3, priority=-1)
    assert choose_victim([old, new, urgent]) is new
    assert choose_victim([sequence(1, priority=4), new]).uid == 1


def test_fair_queues_put_the_least_served_tenant_first_within_a_priority() -> None:
    seqs = [sequence(1), sequence(2), sequence(3), sequence(4, priority=-1)]
    for seq, salt in zip(seqs, (b"a", b"a", b"b", b"a"), strict=True):
        seq.salt = salt
    order = next_in_line("fair", seqs, {b"a": 100, b"b": 5})
    assert [seq.uid for seq in order] == [4, 3, 1, 2]
    assert next_in_line("first-come", seqs, {b"a": 100}) == seqs


def test_only_by_fit_may_others_pass_and_not_for_ever() -> None:
    seq = sequence(1)
    assert may_pass("fit", seq) and not may_pass("first-come", seq) and not may_pass("fair", seq)
    seq.num_passed = MAX_PASSES
    assert not may_pass("fit", seq)


def test_a_newcomer_begins_level_with_the_least_served_that_is_here() -> None:
    counters = TokenCounters()
    counters.arrive(b"a", [])
    counters.add(b"a", 500)
    counters.arrive(b"b", [b"a"])
    counters.add(b"b", 300)
    assert counters.served == {b"a": 500, b"b": 800}
    counters.arrive(b"c", [b"b"])
    assert counters.served[b"c"] == 800
    counters.arrive(b"a", [b"b", b"c"])
    assert counters.served[b"a"] == 800


def test_the_counters_are_bounded() -> None:
    counters = TokenCounters()
    for number in range(MAX_TENANTS + 50):
        counters.arrive(str(number).encode(), [])
        counters.add(str(number).encode(), number)
    assert len(counters.served) <= MAX_TENANTS + 1


def test_absence_earns_no_head_start() -> None:
    rig = Rig(max_num_seqs=1, prefix_caching=False, policies=Policies(queue="fair"))
    number = 1
    rig.submit("s1", [1], 2, salt=b"a")
    rig.drain()
    for number in range(2, 30):
        rig.submit(f"s{number}", [number] * 9, 2, salt=b"b")
        rig.drain()
    # Both are here now, with a long queue each: they take turns.
    rig.submit("s99", [99], 30, salt=b"b")
    for number in range(100, 112):
        rig.submit(f"s{number}", [number] * 9, 2, salt=b"ab"[number % 2 : number % 2 + 1])
    first = len([join for plan in rig.plans for join in plan.join])
    rig.drain()
    joins = [join for plan in rig.plans for join in plan.join][first:]
    tenants = [lanes_of(join.token_ids)[0] % 2 for join in joins]
    assert len(tenants) == 12 and 2 <= sum(tenants[:6]) <= 4


# ---- groups


@pytest.mark.parametrize(
    ("batching", "door", "joins"),
    [
        ("continuous", Door(3, 8, 1, 0), 5),
        ("static", Door(1, 8, 20, 0), 0),
        ("static", Door(0, 8, 7, 0), 0),
        ("static", Door(0, 8, 8, 0), 8),
        ("static", Door(0, 8, 1, STATIC_PATIENCE_NS), 8),
        ("dynamic", Door(0, 8, 1, 49 * MS), 0),
        ("dynamic", Door(0, 8, 1, 50 * MS), 8),
        ("dynamic", Door(1, 8, 20, 50 * MS), 0),
    ],
)
def test_doors(batching: str, door: Door, joins: int) -> None:
    assert may_join(Policies(batching=batching), door) == joins  # type: ignore[arg-type]


def test_a_group_is_no_larger_than_asked() -> None:
    policies = Policies(batching="static", batch_size=4)
    assert may_join(policies, Door(0, 8, 4, 0)) == 4
    assert may_join(Policies(batching="static", batch_size=99), Door(0, 8, 8, 0)) == 8


def test_when_a_group_is_due() -> None:
    assert group_due_ns(Policies(), 5) is None
    assert group_due_ns(Policies(batching="static"), 5) == 5 + STATIC_PATIENCE_NS
    assert group_due_ns(Policies(batching="dynamic"), 5) == 5 + 50 * MS


# ---- kinds of steps

SEPARATE = Policies(step_kind="separate")


def _ballot(**more: Any) -> Ballot:
    """Decodes run, prompts wait and have a lane, nobody else votes."""
    fields: dict[str, Any] = {
        "has_decodes": True,
        "has_begun": False,
        "has_waiting": True,
        "num_decode_steps": 1,
        "num_prefill_steps": 0,
        "wants": True,
        "votes": (),
    }
    return Ballot(**{**fields, **more})


@pytest.mark.parametrize(
    ("steps", "wants", "votes", "kind"),
    [
        (0, True, (), DECODE),
        (69, True, (), DECODE),
        (70, True, (), PREFILL),
        (70, False, (), DECODE),
        (70, True, (True, True), PREFILL),
        (70, True, (True, False), DECODE),
        (99, True, (True, True), DECODE),
        (100, True, (False, False), PREFILL),
        (100, False, (False, True), PREFILL),
        (100, False, (False, False), DECODE),
        (140, True, (True,), PREFILL),
    ],
)
def test_attempts_by_all_and_by_any(
    steps: int, wants: bool, votes: tuple[bool, ...], kind: Kind
) -> None:
    ballot = _ballot(num_decode_steps=steps, wants=wants, votes=votes)
    assert choose_kind(SEPARATE, ballot) == kind
    assert choose_kind(Policies(), ballot) == MIXED


@pytest.mark.parametrize(
    ("ballot", "kind"),
    [
        (_ballot(has_decodes=False), PREFILL),
        (_ballot(has_decodes=False, has_begun=True, num_prefill_steps=99), PREFILL),
        (_ballot(has_waiting=False, num_decode_steps=70), DECODE),
        (_ballot(has_begun=True, num_prefill_steps=MAX_PREFILL_RUN - 1), CONTINUE),
        (_ballot(has_begun=True, num_prefill_steps=MAX_PREFILL_RUN), DECODE),
    ],
)
def test_what_has_begun_goes_on_in_bounded_runs(ballot: Ballot, kind: Kind) -> None:
    assert choose_kind(SEPARATE, ballot) == kind


# ---- the adaptive budget


def _times() -> StepTimeModel:
    """1 ms and 0.1 ms a token."""
    model = StepTimeModel()
    for tokens in [1, 16, 64, 256, 512] * 60:
        model.observe(tokens, 0, MS + tokens * MS // 10)
    return model


def test_the_budget_is_what_the_target_allows() -> None:
    assert adaptive_budget(11.0, 2048, 4, 0, _times()) == pytest.approx(100, abs=3)
    assert adaptive_budget(1000.0, 300, 4, 0, _times()) == 300


def test_decodes_always_run_and_a_prompt_always_moves() -> None:
    assert adaptive_budget(0.001, 2048, 40, 0, _times()) == 41


def test_what_was_never_seen_is_approached_in_bounded_leaps() -> None:
    assert adaptive_budget(1e6, 10**6, 4, 0, _times()) == 1024
    assert adaptive_budget(1e6, 10**6, 4, 0, StepTimeModel()) == FIRST_CHUNK + 4
