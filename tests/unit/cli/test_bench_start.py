"""What a start is cut into; the start itself needs a model and is a measurement."""

from __future__ import annotations

import os

import pytest

from services.cli.bench_start import PHASES, _age_s, _memory_of, _phases

MARKS = {
    "nats is starting": 0.0,
    "nats is ready": 0.1,
    "worker is starting": 0.2,
    "worker starting": 1.0,
    "worker preparing native kernels": 3.0,
    "worker reading the weights": 3.1,
    "worker warming up": 3.5,
    "worker is ready": 3.7,
}


def test_phases_follow_each_other_and_miss_nothing() -> None:
    phases = _phases(MARKS, 4.0)
    assert phases == {
        "bus": 0.1,
        "interpreter_and_imports": 0.8,
        "torch": 2.0,
        "native_code": 0.1,
        "weights": 0.4,
        "warm_up": 0.2,
        "until_served": 0.3,
    }
    assert set(PHASES.values()) < set(phases)


def test_a_stub_worker_says_less() -> None:
    marks = {name: at for name, at in MARKS.items() if not name.startswith("worker ")} | {
        "worker is starting": 0.2,
        "worker starting": 1.0,
        "worker is ready": 1.1,
    }
    phases = _phases(marks, 1.5)
    assert phases["torch"] == phases["weights"] == 0.0
    assert phases["warm_up"] == pytest.approx(0.1)
    assert sum(phases.values()) - phases["bus"] == pytest.approx(1.3)


def test_memory_and_age_of_a_process() -> None:
    memory = _memory_of(os.getpid())
    assert 0 < memory["steady_mb"] <= memory["peak_mb"]
    assert _memory_of(2**30) == {}
    assert 0 < _age_s() < 3600
