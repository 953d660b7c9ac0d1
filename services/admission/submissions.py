"""What is on its way to schedulers: submissions without an answer, and aborts to be sent.

Invariant: a sequence that a submission brings to life after its request has ended is aborted once
the submission was answered, and not before: the abort might overtake it.

Pure.
"""

from __future__ import annotations

from collections.abc import Iterator

from services.contracts.limits import MAX_LANES
from services.contracts.sequences import AbortSequences


class Submissions:
    """By seq_id, the engines that were asked, in order; an answer is to the oldest."""

    def __init__(self, admission_id: str) -> None:
        self._admission_id = admission_id
        self._in_air: dict[str, list[str]] = {}
        self._aborts: dict[str, list[str]] = {}

    def sent(self, seq_id: str, engine_id: str) -> None:
        self._in_air.setdefault(seq_id, []).append(engine_id)

    def answered(self, seq_id: str, *, wanted: bool) -> None:
        """One was answered, or will not be. wanted: its request is still open."""
        engines = self._in_air.get(seq_id)
        if engines is None:
            return
        engine_id = engines.pop(0)
        if not engines:
            del self._in_air[seq_id]
            if not wanted:
                self.abort(seq_id, engine_id)

    def lost(self, seq_id: str) -> None:
        """None will be answered any more."""
        self._in_air.pop(seq_id, None)

    def is_in_air(self, seq_id: str) -> bool:
        return seq_id in self._in_air

    def abort(self, seq_id: str, engine_id: str) -> None:
        """Also the acknowledgement of an end; not while a submission is on its way."""
        if engine_id and seq_id not in self._in_air:
            self._aborts.setdefault(engine_id, []).append(seq_id)

    @property
    def has_aborts(self) -> bool:
        return bool(self._aborts)

    def take_aborts(self) -> Iterator[tuple[str, AbortSequences]]:
        """(engine, message), batched."""
        aborts, self._aborts = self._aborts, {}
        for engine_id, seq_ids in aborts.items():
            for start in range(0, len(seq_ids), MAX_LANES):
                part = seq_ids[start : start + MAX_LANES]
                yield engine_id, AbortSequences(admission_id=self._admission_id, seq_ids=part)
