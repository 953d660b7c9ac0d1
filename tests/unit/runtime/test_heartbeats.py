"""Who is taken for hung: the silent, after a while, unless the listener was deaf."""

from __future__ import annotations

from services.runtime.heartbeats import SILENT_S, Heartbeats


def test_the_silent_one_is_named_once() -> None:
    beats = Heartbeats()
    for name in ("worker", "scheduler"):
        beats.expect(name)
        beats.heard(name, 0.0)
    beats.heard("scheduler", 3.0)
    assert beats.silent(SILENT_S) == {}
    assert beats.silent(4.5) == {"worker": 4.5}
    assert beats.silent(4.6) == {}
    assert beats.silent(7.5) == {"scheduler": 4.5}


def test_one_that_is_not_ready_or_has_ended_is_not_expected() -> None:
    beats = Heartbeats()
    beats.heard("worker", 0.0)
    beats.expect("gateway")
    beats.heard("gateway", 0.0)
    beats.forget("gateway")
    beats.expect("scheduler")
    assert beats.silent(100.0) == {}


def test_after_the_listeners_own_trouble_all_are_forgiven() -> None:
    beats = Heartbeats()
    beats.expect("worker")
    beats.heard("worker", 0.0)
    beats.forgive(10.0)
    assert beats.silent(13.0) == {}
    assert beats.silent(14.5) == {"worker": 4.5}
