from __future__ import annotations

from services.contracts.beats import AdmissionLoad, Beat, ServiceKind
from services.contracts.limits import MAX_NAMES
from services.gateway.mesh_view import FORGET_AFTER_MS, MeshView
from tests.unit.fake_admission import engine_load

MS = 1_000_000
ADMISSION = Beat(ServiceKind.ADMISSION, "a", admission=AdmissionLoad(["m", "b"], 0))


def scheduler(name: str = "s", **load: object) -> Beat:
    return Beat(ServiceKind.SCHEDULER, name, engine=engine_load(model="m", **load))


def test_models_are_those_of_fresh_beats() -> None:
    view = MeshView()
    assert view.models(0) == {}
    view.hear(ADMISSION, 0)
    assert view.models(0) == {"b": 0, "m": 0}
    view.hear(scheduler(), 500 * MS)
    assert view.models(FORGET_AFTER_MS * MS - 1) == {"b": 0, "m": 512}
    assert view.models(FORGET_AFTER_MS * MS) == {"m": 512}
    assert view.models((FORGET_AFTER_MS + 500) * MS) == {}


def test_ready_means_routes_a_worker_and_blocks() -> None:
    view = MeshView()

    def missing() -> list[str]:
        return [text.partition(":")[0] for text in view.missing(0)]

    assert missing() == ["route", "worker", "blocks"]
    view.hear(scheduler(ready=False, num_blocks_total=0), 0)
    assert missing() == ["route", "worker", "blocks"]
    view.hear(ADMISSION, 0)
    assert missing() == ["worker", "blocks"]
    view.hear(scheduler(num_blocks_total=0), 0)
    assert missing() == ["blocks"]
    view.hear(scheduler(), 0)
    assert missing() == []


def test_the_number_of_services_is_bounded() -> None:
    view = MeshView()
    for index in range(MAX_NAMES + 10):
        view.hear(scheduler(f"s{index}"), index)
    engines = view.engines(MAX_NAMES + 10)
    assert len(engines) == MAX_NAMES
    assert "s0" not in engines
    assert f"s{MAX_NAMES + 9}" in engines
