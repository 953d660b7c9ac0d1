"""What an admission knows of engines."""

from __future__ import annotations

from services.admission.engines import SUSPECT_AFTER_NS, EngineDirectory
from services.contracts.beats import Beat, ServiceKind
from services.contracts.limits import MAX_NAMES
from tests.unit.admission.streams import engine_load


def _beat(engine: str, *, model: str = "m", ready: bool = True, busy: int = 0) -> Beat:
    load = engine_load(model, ready=ready, num_running=busy)
    return Beat(ServiceKind.SCHEDULER, engine, engine=load)


def test_only_ready_engines_of_the_model_are_chosen() -> None:
    directory = EngineDirectory()
    assert directory.choose("m", 0) is None
    directory.on_beat(_beat("other", model="x"), 0)
    directory.on_beat(_beat("cold", ready=False), 0)
    assert directory.choose("m", 0) is None
    directory.on_beat(_beat("warm", busy=5), 0)
    chosen = directory.choose("m", 0)
    assert chosen is not None and chosen.engine_id == "warm"


def test_three_missed_beats_are_suspect() -> None:
    directory = EngineDirectory()
    directory.on_beat(_beat("e"), 0)
    assert directory.choose("m", SUSPECT_AFTER_NS) is not None
    assert directory.choose("m", SUSPECT_AFTER_NS + 1) is None
    directory.on_beat(_beat("e"), SUSPECT_AFTER_NS + 1)
    assert directory.choose("m", SUSPECT_AFTER_NS + 1) is not None


def test_equal_loads_are_told_apart_by_name_so_that_the_choice_is_stable() -> None:
    directory = EngineDirectory()
    for name in ("b", "a", "c"):
        directory.on_beat(_beat(name), 0)
    chosen = directory.choose("m", 0)
    assert chosen is not None and chosen.engine_id == "a"


def test_the_directory_is_bounded() -> None:
    directory = EngineDirectory()
    for number in range(MAX_NAMES + 10):
        directory.on_beat(_beat(f"e{number}"), number)
    assert len(directory.engines) == MAX_NAMES
    assert "e0" not in directory.engines and f"e{MAX_NAMES + 9}" in directory.engines
