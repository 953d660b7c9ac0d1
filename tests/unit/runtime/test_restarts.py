"""When a dead service is started again, and when that is given up."""

from __future__ import annotations

import itertools

from services.runtime.restarts import (
    MAX_DEATHS,
    MAX_DELAY_S,
    MAX_FAILED_STARTS,
    WINDOW_S,
    RestartPolicy,
)


def test_failed_starts_wait_twice_as_long_each_then_give_up() -> None:
    policy = RestartPolicy()
    delays = [policy.on_death(float(i), was_ready=False) for i in range(MAX_FAILED_STARTS)]
    waits = [delay for delay in delays if delay is not None]
    assert delays[-1] is None
    assert len(waits) == MAX_FAILED_STARTS - 1
    assert all(later == 2 * earlier for earlier, later in itertools.pairwise(waits))
    assert max(waits) <= MAX_DELAY_S


def test_being_ready_forgets_failed_starts() -> None:
    policy = RestartPolicy()
    for i in range(10 * MAX_FAILED_STARTS):
        policy.on_ready()
        assert policy.on_death(i * WINDOW_S, was_ready=True) is not None


def test_too_many_deaths_in_the_window_give_up() -> None:
    policy = RestartPolicy()
    delays = [policy.on_death(i * 0.1, was_ready=True) for i in range(MAX_DEATHS)]
    assert None not in delays[:-1]
    assert delays[-1] is None
