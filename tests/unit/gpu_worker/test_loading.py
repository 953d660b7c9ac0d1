"""The worker's executor is made in a thread that leaves nothing behind."""

from __future__ import annotations

import asyncio
import threading

import pytest

from gpu_worker import service
from services.runtime.settings import Settings


def test_the_thread_that_loads_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[threading.Thread] = []

    def build(settings: Settings, generation: int) -> str:
        threads.append(threading.current_thread())
        return f"executor {generation}"

    monkeypatch.setattr(service, "build_executor", build)
    made: object = asyncio.run(service.load(Settings(), 7))
    assert made == "executor 7"
    threads[0].join(20)
    assert not threads[0].is_alive()
    assert threads[0] is not threading.main_thread()
