"""A step for which the worker has no memory: nothing of it counts, and smaller ones come."""

from __future__ import annotations

import pytest

from scheduler_svc.step_memory import (
    DOES_NOT_FIT,
    GOOD_STEPS,
    MAX_TRIES,
    NO_CEILING,
    SMALL_STEP_TOKENS,
    StepMemory,
    lowered,
)
from services.contracts.errors import ErrorCode
from services.contracts.step import StepPlan, StepResult
from tests.unit.scheduler_svc.rig import Rig, answer
from tests.unit.scheduler_svc.sequences import sequence


class TightRig(Rig):
    """Steps of more than `memory` tokens do not fit; nor does any other of their epoch."""

    memory = NO_CEILING
    num_unfit = 0
    largest = 0
    void_epoch = 0

    def run(self, plan: StepPlan, elapsed_us: int = 1000) -> StepResult:
        step = next(s for s in self.core.batch.pipeline.steps if s.step_id == plan.step_id)
        if step.num_tokens <= self.memory and plan.epoch != self.void_epoch:
            self.largest = max(self.largest, step.num_tokens)
            return super().run(plan, elapsed_us)
        self.num_unfit += 1
        self.void_epoch = plan.epoch
        number = plan.step_id
        return StepResult(plan.generation, plan.epoch, number, number, out_of_memory=True)

    def to_the_end(self, limit: int = 2000) -> None:
        for _ in range(limit):
            if not self.core.link.is_ready:
                self.queue.clear()
                self.tick()
                self.attached()
            if not self.queue:
                return
            self.step()
        raise AssertionError(f"still running after {limit} steps")


@pytest.mark.parametrize(
    ("ceiling", "num_tokens", "left"),
    [(NO_CEILING, 512, 256), (100, 512, 50), (8, 3, 1), (1, 1, 1)],
)
def test_the_ceiling_is_half_of_what_did_not_fit(ceiling: int, num_tokens: int, left: int) -> None:
    assert lowered(ceiling, num_tokens) == left


def test_it_comes_back_by_doubling_after_many_good_steps() -> None:
    memory = StepMemory()
    memory.did_not_fit(64, [sequence(1), sequence(2)])
    for expected in (32, 64, 128):
        assert memory.ceiling == expected
        for _ in range(GOOD_STEPS):
            memory.fitted()
    for _ in range(40 * GOOD_STEPS):
        memory.fitted()
    assert memory.ceiling == NO_CEILING


def test_a_step_that_did_not_fit_begins_the_count_anew() -> None:
    memory = StepMemory()
    memory.did_not_fit(64, [sequence(1), sequence(2)])
    for _ in range(GOOD_STEPS - 1):
        memory.fitted()
    memory.did_not_fit(40, [sequence(1), sequence(2)])
    memory.fitted()
    assert memory.ceiling == 16


def test_only_who_is_alone_in_a_small_step_is_ever_found_too_large() -> None:
    memory, one, other = StepMemory(), sequence(1), sequence(2)
    for _ in range(9):
        assert memory.did_not_fit(2, [one, other]) is None
        assert memory.did_not_fit(SMALL_STEP_TOKENS + 1, [one]) is None
    tries = [memory.did_not_fit(SMALL_STEP_TOKENS, [one]) for _ in range(MAX_TRIES)]
    assert tries == [None] * (MAX_TRIES - 1) + [one]


def test_a_long_prompt_comes_in_smaller_chunks() -> None:
    rig = TightRig(budget=128)
    rig.memory = 40
    rig.submit("s1", list(range(100)), 5)
    rig.to_the_end()
    assert rig.tokens(1) == answer(list(range(100)), 5)
    assert rig.num_unfit == 1 and rig.largest <= 32, "a chunk of 64 did not fit"


def test_fewer_decode_together() -> None:
    rig = TightRig(max_num_seqs=8, budget=64, prefix_caching=False)
    for tag in range(1, 9):
        rig.submit(f"s{tag}", [tag] * 3, 20)
    for _ in range(4):
        rig.step()
    rig.memory = 3
    rig.to_the_end()
    for tag in range(1, 9):
        assert rig.tokens(tag) == answer([tag] * 3, 20), f"{tag}"
    assert rig.num_unfit <= 4


def test_one_that_never_fits_ends_with_cause_and_fix_and_the_others_go_on() -> None:
    """What does not fit is a sequence's own doing: whatever step it is in."""
    rig = TightRig()
    rig.submit("s1", [1] * 5, 12)
    rig.submit("s2", [2] * 5, 12)
    rig.submit("s3", [3] * 5, 12)
    for _ in range(2000):
        if not rig.core.link.is_ready:
            rig.queue.clear()
            rig.tick()
            rig.attached()
        if not rig.queue:
            break
        step = rig.core.batch.pipeline.steps[0]
        rig.memory = 0 if any(seq.tag == 2 for seq in rig.core.batch.named_by(step)) else 64
        rig.step()
    (end,) = rig.ends(2)
    assert (end.code, end.message) == (ErrorCode.OUT_OF_MEMORY, DOES_NOT_FIT)
    assert "shorten it" in DOES_NOT_FIT and "--num-blocks" in DOES_NOT_FIT
    assert rig.tokens(1) == answer([1] * 5, 12) and rig.tokens(3) == answer([3] * 5, 12)
    assert rig.num_unfit <= 8


def test_one_bad_step_fails_nobody() -> None:
    rig = TightRig()
    rig.submit("s1", [1] * 5, 12)
    rig.step()
    rig.memory = 0
    rig.step()
    rig.memory = NO_CEILING
    rig.to_the_end()
    assert rig.tokens(1) == answer([1] * 5, 12) and rig.num_unfit == 1


def test_nothing_of_the_step_is_believed_and_blocks_are_kept_in_order() -> None:
    rig = TightRig()
    rig.submit("s1", [1] * 9, 4)
    rig.memory = 1
    rig.step()
    assert not rig.core.link.is_ready and not rig.tokens(1)
    assert rig.core.totals.num_steps == 0
    (waiting,) = rig.core.waiting
    assert (waiting.num_computed_tokens, waiting.block_ids, waiting.num_in_flight) == (0, [], 0)


def test_one_that_was_aborted_meanwhile_has_ended_already() -> None:
    rig = TightRig()
    rig.submit("s1", [1], 9)
    for _ in range(MAX_TRIES):
        rig.memory = 0
        if rig.core.experience.memory.ceiling == 1:
            rig.abort("s1")
        rig.step()
        rig.queue.clear()
        rig.tick()
        rig.attached()
    assert not list(rig.core.roster.live())


def test_a_submission_of_what_has_all_its_tokens_ends_at_once() -> None:
    """Its admission had the end from a scheduler that another has replaced meanwhile."""
    rig = Rig()
    tokens = answer([1] * 5, 4)
    assert rig.submit("s1", [1] * 5, 4, accepted=tokens).code is None
    assert [str(end.reason) for end in rig.ends(1)] == ["length"]
    assert rig.submit("s2", [1] * 5, 9, accepted=tokens, stop=tokens[-1:]).code is None
    assert [str(end.reason) for end in rig.ends(2)] == ["stop"]
    assert not rig.plans
    refused = rig.submit("s3", [1] * 5, 3, accepted=tokens)
    assert refused.code is ErrorCode.INVALID_REQUEST
