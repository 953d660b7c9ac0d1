"""The engines that an admission knows of, from their beats.

Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from services.contracts.beats import Beat, EngineLoad
from services.contracts.limits import (
    BEAT_PERIOD_MS,
    ENGINE_ABSENCE_SECONDS,
    ENGINE_LOST_SECONDS,
    MAX_NAMES,
    SUSPECT_AFTER_BEATS,
)
from services.contracts.streams import StreamReceiver

SUSPECT_AFTER_NS: Final = SUSPECT_AFTER_BEATS * BEAT_PERIOD_MS * 1_000_000
ABSENCE_NS: Final = ENGINE_ABSENCE_SECONDS * 1_000_000_000
LOST_NS: Final = ENGINE_LOST_SECONDS * 1_000_000_000


@dataclass(slots=True)
class Engine:
    """`updates`: its numbered stream to this admission, which begins anew with every epoch.

    epoch: (generation, epoch), of which the pair only grows: after a restart of worker and
    scheduler together, epochs count from 1 again, in a higher generation.
    max_model_len: the last that it told, 0 before its first worker; it may be without one now.
    last_ready_ns: when it could serve, or else when it was first heard.
    has_gap: updates were lost, and what is open there is not submitted again yet.
    """

    engine_id: str
    epoch: tuple[int, int] = (0, 0)
    load: EngineLoad | None = None
    last_beat_ns: int = 0
    last_ready_ns: int | None = None
    max_model_len: int = 0
    has_gap: bool = False
    repair_at_ns: int = 0
    updates: StreamReceiver = field(default_factory=StreamReceiver)

    def is_ready(self, now_ns: int) -> bool:
        alive = now_ns - self.last_beat_ns <= SUSPECT_AFTER_NS
        return self.load is not None and self.load.ready and alive


class EngineDirectory:
    def __init__(self) -> None:
        self.engines: dict[str, Engine] = {}

    def get(self, engine_id: str) -> Engine:
        """The engine's record, made where there is none and there is room."""
        engine = self.engines.get(engine_id)
        if engine is None:
            if len(self.engines) >= MAX_NAMES:
                stalest = min(self.engines.values(), key=lambda known: known.last_beat_ns)
                del self.engines[stalest.engine_id]
            engine = self.engines[engine_id] = Engine(engine_id)
        return engine

    def on_beat(self, beat: Beat, now_ns: int) -> Engine:
        engine = self.get(beat.service_id)
        engine.last_beat_ns = now_ns
        if engine.last_ready_ns is None or (beat.engine is not None and beat.engine.ready):
            engine.last_ready_ns = now_ns
        engine.load = beat.engine
        if beat.engine is not None and beat.engine.max_model_len:
            engine.max_model_len = beat.engine.max_model_len
        return engine

    def is_ready(self, engine_id: str, now_ns: int) -> bool:
        engine = self.engines.get(engine_id)
        return engine is not None and engine.is_ready(now_ns)

    def lost(self, now_ns: int) -> set[str]:
        """Engines that have not been able to serve for so long that nothing waits for them."""
        return {
            engine.engine_id
            for engine in self.engines.values()
            if engine.last_ready_ns is not None and now_ns - engine.last_ready_ns > LOST_NS
        }

    def absolve(self, now_ns: int) -> None:
        """It was we who heard nothing: no engine is lost for that."""
        for engine in self.engines.values():
            engine.last_ready_ns = now_ns

    def expect(self, model: str, now_ns: int) -> Engine | None:
        """The engine that `choose` names, or may name soon: one that was heard lately."""
        lately = [
            engine
            for engine in self.engines.values()
            if engine.load is not None
            and engine.load.model == model
            and now_ns - engine.last_beat_ns <= ABSENCE_NS
        ]
        latest = max(lately, key=lambda engine: engine.last_beat_ns, default=None)
        return self.choose(model, now_ns) or latest

    def choose(self, model: str, now_ns: int) -> Engine | None:
        """The least loaded ready engine of `model`; None where there is none."""
        ready = [
            engine
            for engine in self.engines.values()
            if engine.is_ready(now_ns) and engine.load is not None and engine.load.model == model
        ]
        return min(ready, key=_load, default=None)


def _load(engine: Engine) -> tuple[int, str]:
    load = engine.load
    assert load is not None
    return (load.num_running + load.num_waiting, engine.engine_id)
