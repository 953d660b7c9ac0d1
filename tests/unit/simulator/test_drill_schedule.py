"""Schedules of the fault drill: the same for a seed, spread evenly, and as text."""

from __future__ import annotations

from collections import Counter

import pytest

from services.runtime.failpoints import PLACES, Action, parse
from services.runtime.problem import Problem
from services.simulator.drill import schedule
from services.simulator.drill.schedule import PROVOKED_BY, RAISED_AT, SERVICES, Fault, Kind

SEEDS = range(20)


def test_a_seed_is_a_schedule() -> None:
    assert schedule.draw(7, 50) == schedule.draw(7, 50)
    assert schedule.draw(7, 50) != schedule.draw(8, 50)


@pytest.mark.parametrize("seed", SEEDS)
def test_kills_reach_every_service_and_every_place(seed: int) -> None:
    kills = [fault for fault in schedule.draw(seed, 210) if fault.is_kill]
    assert Counter(kill.service for kill in kills) == dict.fromkeys(SERVICES, 30)
    for service in SERVICES:
        phases = Counter(kill.place for kill in kills if kill.service == service)
        assert max(phases.values()) - min(phases.values()) <= 1
    assert {kill.place for kill in kills} == {"", *PLACES}


@pytest.mark.parametrize("seed", SEEDS)
def test_between_two_kills_of_a_service_come_others(seed: int) -> None:
    services = [fault.service for fault in schedule.draw(seed, 100) if fault.is_kill]
    assert all(len(set(services[at : at + 4])) == 4 for at in range(len(services) - 3))


def test_every_fault_can_be_armed() -> None:
    faults = [fault for seed in SEEDS for fault in schedule.draw(seed, 210)]
    for fault in faults:
        assert fault.service in SERVICES
        if fault.kind is Kind.FAILPOINT:
            [point] = parse(fault.spec)
            assert point.name.split(".")[0] == fault.service.split("-")[0]
    kinds = {(fault.kind, fault.action) for fault in faults}
    assert kinds == {(kind, "") for kind in Kind if kind is not Kind.FAILPOINT} | {
        (Kind.FAILPOINT, action) for action in Action
    }


def test_the_named_places_exist() -> None:
    assert set(PROVOKED_BY) | set(RAISED_AT.values()) | schedule.PER_STEP <= set(PLACES)


def test_the_short_drill_hits_each_service() -> None:
    for seed in SEEDS:
        faults = schedule.quick(seed)
        assert {fault.service for fault in faults if fault.is_kill} == set(SERVICES)
        assert len(faults) <= 10


def test_text_and_back() -> None:
    faults = schedule.draw(3, 40)
    assert schedule.parse(schedule.dump(faults)) == faults


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '[{"service":"worker"}]',
        '[{"service":"toaster","kind":"kill"}]',
        '[{"service":"worker","kind":"kill","colour":1}]',
        '[{"service":"worker","kind":"failpoint","place":"worker.after_lunch","action":"kill"}]',
    ],
)
def test_a_schedule_that_means_nothing_is_refused(text: str) -> None:
    with pytest.raises(Problem) as caught:
        schedule.parse(text)
    assert caught.value.code == "E106"


def test_labels() -> None:
    assert Fault("worker", Kind.KILL).label == "kill"
    fault = Fault("worker", Kind.FAILPOINT, "worker.before_forward", Action.STALL, 3, 0.5)
    assert (fault.label, fault.spec) == (
        "stall worker.before_forward",
        "worker.before_forward:stall=0.5@3",
    )
