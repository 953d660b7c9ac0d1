"""Runs of programs in virtual time: their clocks, their sleep, their end."""

from __future__ import annotations

import random

import pytest

from services.simulator.network import Clock
from services.simulator.process import Process, Skew


def process(clock: Clock, skew: Skew | None = None) -> Process:
    return Process(clock, random.Random(1), "worker-1", "worker", skew or Skew())


@pytest.mark.parametrize("skew", [Skew(), Skew(5, 20_000), Skew(10**15, -20_000), Skew(3, 1)])
def test_a_timer_is_never_early_on_its_own_clock_and_late_by_nothing(skew: Skew) -> None:
    for local_ns in range(skew.offset_ns, skew.offset_ns + 2000, 7):
        time_ns = skew.true(local_ns)
        assert skew.local(time_ns) >= local_ns > skew.local(time_ns - 1)


def test_a_stopped_process_does_everything_at_once_when_it_wakes() -> None:
    clock, done = Clock(), []
    sleeper = process(clock)
    sleeper.pause()
    sleeper.after(5, lambda: done.append("timer"))
    sleeper.run(lambda: done.append("message"))
    clock.after(10, lambda: done.append("woken"))
    clock.after(10, sleeper.wake)
    while clock.step():
        pass
    assert done[0] == "woken" and sorted(done[1:]) == ["message", "timer"]


def test_the_dead_do_nothing() -> None:
    clock, done = Clock(), []
    victim = process(clock)
    victim.every(5, lambda: done.append(clock.now_ns))
    clock.at(11, victim.die)
    while clock.step():
        pass
    victim.wake()
    victim.run(lambda: done.append(-1))
    assert done == [0, 5, 10]
