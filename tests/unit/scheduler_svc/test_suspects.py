"""Worker deaths: who is tried alone, who is exonerated, who is failed; all others go on."""

from __future__ import annotations

from scheduler_svc.events import WorkerSilent
from scheduler_svc.suspects import MAX_TRIALS, TRIALS_TO_FAIL, InFlight, Suspects
from services.contracts.beats import Beat, ServiceKind, WorkerLoad
from services.contracts.errors import ErrorCode
from services.contracts.step import StepPlan
from tests.unit.scheduler_svc.rig import MS, Rig, answer, lanes_of
from tests.unit.scheduler_svc.sequences import sequence


def _beat(rig: Rig, generation: int, *, leaving: bool = False) -> Beat:
    kind, load = ServiceKind.GPU_WORKER, WorkerLoad("shadow", 0, 64)
    return Beat(kind, "worker-0", generation, rig.epoch, worker=load, leaving=leaving)


def _die(rig: Rig) -> None:
    """Another worker answers."""
    rig.generation += 1
    rig.new_worker()
    rig.handle(_beat(rig, rig.generation))
    rig.tick()
    rig.attached()


def _computed(plan: StepPlan, rig: Rig) -> set[int]:
    """Tags of those that `plan` computes, by the scheduler's own lanes."""
    step = next(s for s in rig.core.batch.pipeline.steps if s.step_id == plan.step_id)
    lanes = rig.core.batch.lanes
    found = [step.departed.get(lane) or lanes.occupant(lane) for lane in step.lanes.tolist()]
    return {seq.tag for seq in found}


def _company(rig: Rig) -> list[set[int]]:
    """Run to the end -> who was computed together, step by step."""
    seen = []
    while rig.queue:
        assert len(rig.queue) == 1 or not rig.core.experience.suspects
        seen.append(_computed(rig.queue[0], rig))
        rig.step()
    return seen


def test_after_two_deaths_each_runs_alone_until_it_is_past_them() -> None:
    rig = Rig(prefix_caching=False)
    for tag in (1, 2, 3):
        rig.submit(f"s{tag}", [tag] * 5, 12)
    rig.step()
    rig.step()
    _die(rig)
    assert _computed(rig.queue[0], rig) == {1, 2, 3}, "one death proves nothing"
    _die(rig)
    rig.submit("s4", [4] * 5, 12)
    company = _company(rig)
    assert company[:3] == [{1}, {4}, {1}], "the others go on meanwhile, a step each"
    begun = [next(at for at, who in enumerate(company) if tag in who) for tag in (1, 2, 3)]
    assert begun == sorted(begun), "one after the other"
    assert [company[at] for at in begun] == [{1}, {2}, {3}]
    assert {1, 2, 3, 4} in company, "exonerated, and together again"
    for tag in (1, 2, 3, 4):
        assert rig.tokens(tag) == answer([tag] * 5, 12)


def test_the_third_death_ends_the_poison_alone() -> None:
    """Sequence 2 kills the worker whenever it is computed."""
    rig = Rig()
    for tag in (1, 2, 3):
        rig.submit(f"s{tag}", [tag] * 5, 12)
    deaths = 0
    while rig.queue:
        if 2 in _computed(rig.queue[0], rig):
            deaths += 1
            _die(rig)
        else:
            rig.step()
    assert deaths == 3
    (end,) = rig.ends(2)
    assert (end.code, end.num_output_tokens) == (ErrorCode.POISONED, 0)
    assert rig.tokens(1) == answer([1] * 5, 12)
    assert rig.tokens(3) == answer([3] * 5, 12)


def test_a_pair_that_kills_whenever_it_is_together() -> None:
    rig = Rig()
    for tag in (1, 2, 3):
        rig.submit(f"s{tag}", [tag] * 5, 40)
    deaths = 0
    while rig.queue:
        if _computed(rig.queue[0], rig) >= {1, 2}:
            deaths += 1
            _die(rig)
        else:
            rig.step()
    assert deaths == 2 * MAX_TRIALS
    for tag in (1, 2, 3):
        assert rig.tokens(tag) == answer([tag] * 5, 40)


def test_deaths_survive_a_preemption() -> None:
    rig = Rig()
    rig.submit("s1", [1] * 5, 12)
    rig.step()
    _die(rig)
    seq = rig.core.roster.find("s1")
    assert seq is not None and seq.num_deaths == 1
    while rig.queue:
        rig.run(rig.queue.popleft())
    rig.core.batch.preempt(seq)
    for result in rig.results[-2:]:
        rig.handle(result)
    assert seq.num_preemptions == 1
    rig.drain()
    assert rig.tokens(1) == answer([1] * 5, 12)


def test_progress_exonerates() -> None:
    """A worker that dies often is nobody's fault who gets past it each time."""
    rig = Rig()
    rig.submit("s1", [1] * 5, 30)
    for _ in range(6):
        for _ in range(4):
            rig.step()
        _die(rig)
    rig.drain()
    assert rig.tokens(1) == answer([1] * 5, 30)


def test_a_worker_that_leaves_is_no_death() -> None:
    rig = Rig()
    rig.submit("s1", [1] * 5, 12)
    for _ in range(4):
        rig.step()
        rig.handle(_beat(rig, rig.generation, leaving=True))
        assert not rig.core.beat().engine.ready  # type: ignore[union-attr]
        _die(rig)
    seq = rig.core.roster.find("s1")
    assert seq is not None and seq.num_deaths == 0
    rig.drain()
    assert rig.tokens(1) == answer([1] * 5, 12)


def test_a_bus_that_was_gone_is_no_death() -> None:
    """The same generation answers again: the worker lives."""
    rig = Rig()
    rig.submit("s1", [1] * 5, 12)
    for _ in range(4):
        rig.handle(WorkerSilent(gone=True))
        rig.queue.clear()
        rig.tick()
        rig.attached()
    rig.drain()
    assert rig.tokens(1) == answer([1] * 5, 12)


def test_an_idle_engine_without_its_worker_is_not_ready() -> None:
    rig = Rig()
    rig.handle(_beat(rig, rig.generation))
    assert rig.core.beat().engine.ready  # type: ignore[union-attr]
    rig.now_ns += 800 * MS
    rig.handle(Beat(ServiceKind.KV_STORE, "kv-0"))
    assert not rig.core.beat().engine.ready  # type: ignore[union-attr]
    rig.handle(_beat(rig, rig.generation))
    assert rig.core.beat().engine.ready  # type: ignore[union-attr]


def test_an_attach_is_asked_again_of_the_next_worker() -> None:
    """The worker that was asked has died with the question."""
    rig = Rig(attach=False)
    rig.tick()
    asked = len(rig.effects)
    rig.handle(_beat(rig, 7))
    rig.tick()
    assert len(rig.effects) == asked + 1
    rig.handle(_beat(rig, 7))
    assert not rig.tick(), "it is asked once"


def test_a_held_lane_is_named_once() -> None:
    rig = Rig(num_blocks=24)
    for tag in (1, 2):
        rig.submit(f"s{tag}", [tag] * 9, 20)
    rig.step()
    _die(rig)
    _die(rig)
    while rig.queue:
        hold = lanes_of(rig.queue[0].hold)
        assert len(hold) == len(set(hold))
        rig.step()
    for tag in (1, 2):
        assert rig.tokens(tag) == answer([tag] * 9, 20)


# ---- the rule alone


def _death(suspects: Suspects, *in_flight: InFlight) -> int:
    """-> how many it ends."""
    suspects.worker_lost(1, list(in_flight))
    return len(suspects.attached(2))


def test_deaths_at_different_places_do_not_add_up() -> None:
    suspects, seq = Suspects(), sequence(1)
    assert not _death(suspects, InFlight(seq, 98, 100))
    assert not _death(suspects, InFlight(seq, 0, 100))
    assert seq.num_deaths == 2 and seq.runs_alone
    assert not _death(suspects, InFlight(seq, 0, 64))
    assert (seq.num_deaths, seq.died_from, seq.died_before) == (1, 0, 64)
    assert seq.runs_alone, "it has not got past them"


def test_deaths_alone_end_it_wherever_they_are() -> None:
    suspects, seq = Suspects(), sequence(1)
    ended = deaths = 0
    while not ended:
        ended = _death(suspects, InFlight(seq, 64 * (deaths % 2), 64 * (deaths % 2) + 64))
        deaths += 1
        seq.runs_alone = True
    assert deaths <= TRIALS_TO_FAIL + 1


def test_after_its_second_trial_it_stays_alone_and_shares_turns() -> None:
    """What kills only in company: nobody is guilty."""
    suspects, pair = Suspects(), [sequence(1), sequence(2)]
    for trial in range(1, MAX_TRIALS + 1):
        for _ in range(2):
            assert not _death(suspects, *(InFlight(seq, 0, 10) for seq in pair))
        assert suspects.alone == pair
        for seq in pair:
            suspects.passed(seq, 10)
        assert bool(suspects) == (trial == MAX_TRIALS)
    suspects.had_step(pair[0])
    assert suspects.alone == [pair[1], pair[0]]
    for seq in pair:
        suspects.forget(seq)
    assert not suspects and not suspects.watched
