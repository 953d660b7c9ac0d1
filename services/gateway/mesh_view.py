"""What the gateway knows of the mesh, from beats alone: models, loads, and whether it can serve.

Invariants: a service that has not been heard for FORGET_AFTER_MS does not exist here; the number of
services kept is bounded.

Pure: the time is given.
"""

from __future__ import annotations

from typing import Final, TypeVar

from services.contracts.beats import AdmissionLoad, Beat, EngineLoad, ServiceKind
from services.contracts.limits import BEAT_PERIOD_MS, MAX_NAMES

T = TypeVar("T")

FORGET_AFTER_MS: Final = 8 * BEAT_PERIOD_MS
"""Later than the mesh's own suspicion: a late beat must not turn a working service into a 503."""


class MeshView:
    """Beats in, answers out."""

    def __init__(self) -> None:
        self._engines: dict[str, tuple[int, EngineLoad]] = {}
        self._admissions: dict[str, tuple[int, AdmissionLoad]] = {}

    def hear(self, beat: Beat, now_ns: int) -> None:
        if beat.kind is ServiceKind.SCHEDULER and beat.engine is not None:
            _keep(self._engines, beat.service_id, beat.engine, now_ns)
        elif beat.kind is ServiceKind.ADMISSION and beat.admission is not None:
            _keep(self._admissions, beat.service_id, beat.admission, now_ns)

    def engines(self, now_ns: int) -> dict[str, EngineLoad]:
        """Loads by scheduler id."""
        return _fresh(self._engines, now_ns)

    def models(self, now_ns: int) -> dict[str, int]:
        """Names of the models that are served, and their context in tokens (0: not known yet)."""
        models = {
            name: 0 for load in _fresh(self._admissions, now_ns).values() for name in load.models
        }
        models |= {load.model: load.max_model_len for load in self.engines(now_ns).values()}
        return dict(sorted(models.items()))

    def missing(self, now_ns: int) -> list[str]:
        """What is not there yet for a request to be served; empty means ready."""
        missing = []
        if not any(load.models for load in _fresh(self._admissions, now_ns).values()):
            missing.append("route: no admission serves a model")
        engines = self.engines(now_ns).values()
        if not any(load.ready for load in engines):
            missing.append("worker: no engine is attached to a worker")
        if not any(load.num_blocks_total > 0 for load in engines):
            missing.append("blocks: no engine has KV blocks")
        return missing


def _keep(table: dict[str, tuple[int, T]], name: str, load: T, now_ns: int) -> None:
    if name not in table and len(table) >= MAX_NAMES:
        del table[min(table, key=lambda known: table[known][0])]
    table[name] = (now_ns, load)


def _fresh(table: dict[str, tuple[int, T]], now_ns: int) -> dict[str, T]:
    oldest_ns = now_ns - FORGET_AFTER_MS * 1_000_000
    return {name: load for name, (heard_ns, load) in table.items() if heard_ns > oldest_ns}
