"""Votes of the data-parallel group on prefill steps, as beats bring them.

A step never waits for a vote: one that is missing, or older than three beats, is a no.

Pure.
"""

from __future__ import annotations

from typing import Final

from services.contracts.beats import Beat
from services.contracts.limits import BEAT_PERIOD_MS, SUSPECT_AFTER_BEATS

STALE_NS: Final = SUSPECT_AFTER_BEATS * BEAT_PERIOD_MS * 1_000_000


class Ballots:
    """`group` "" or a size of 1: nobody else votes."""

    def __init__(self, engine: str, group: str, size: int) -> None:
        self._engine = engine
        self._group = group
        self._num_others = size - 1 if group else 0
        self._heard: dict[str, tuple[bool, int]] = {}

    def hear(self, beat: Beat, now_ns: int) -> None:
        load = beat.engine
        if not self._num_others or load is None or load.dp_group != self._group:
            return
        if beat.service_id != self._engine:
            known = beat.service_id in self._heard
            if known or len(self._heard) < self._num_others:
                self._heard[beat.service_id] = (load.wants_prefill, now_ns)

    def votes(self, now_ns: int) -> tuple[bool, ...]:
        """Of the others: as many as there are, heard or not."""
        if not self._num_others:
            return ()
        fresh = [wants and now_ns - at <= STALE_NS for wants, at in self._heard.values()]
        missing = self._num_others - len(fresh)
        return (*fresh, *[False] * missing)
