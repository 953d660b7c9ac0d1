"""Which admission has which sequence, and what becomes of those whose admission is gone.

    heard ─▶ (3 beats missed, or its last beat said so) absent ─▶ its sequences are offered to the
    others until one takes them; after FINISHED_LOG_SECONDS it is forgotten, and they with it

Invariants: a sequence is taken over only from an absent admission; nobody is absent because this
scheduler was cut off itself.

Pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from services.contracts.beats import Beat, ServiceKind
from services.contracts.limits import (
    BEAT_PERIOD_MS,
    FINISHED_LOG_SECONDS,
    MAX_LANES,
    MAX_NAMES,
    SUSPECT_AFTER_BEATS,
)
from services.contracts.sequences import AdoptSequences, SubmitSequence
from services.contracts.vectors import pack

from .sequence import Sequence
from .times import NEVER_NS

BEAT_NS: Final = BEAT_PERIOD_MS * 1_000_000
SUSPECT_NS: Final = SUSPECT_AFTER_BEATS * BEAT_NS
FORGET_NS: Final = FINISHED_LOG_SECONDS * 1_000_000_000
# Beats of all services together come many times in a period: two of silence are the bus's.
CUT_OFF_NS: Final = 2 * BEAT_NS
# What a sequence adds to an offer beside its vectors.
OFFER_OVERHEAD_BYTES: Final = 512


@dataclass(slots=True)
class _Admission:
    heard_ns: int
    leaving: bool = False


class Owners:
    """Liveness of admissions, from their beats and submissions.

    Until the first beat of any admission nobody is absent: one that drives the scheduler without a
    bus sends none.
    """

    def __init__(self) -> None:
        self._admissions: dict[str, _Admission] = {}
        self._beats_heard = False
        self._last_beat_ns = 0

    def hear(self, beat: Beat, now_ns: int) -> None:
        """A beat of any service."""
        if now_ns - self._last_beat_ns > CUT_OFF_NS:
            for known in self._admissions.values():
                known.heard_ns = now_ns
        self._last_beat_ns = now_ns
        if beat.kind is ServiceKind.ADMISSION:
            self._beats_heard = True
            self.touch(beat.service_id, now_ns)
            # Ids are new with every run: one that has left does not come back.
            self._admissions[beat.service_id].leaving |= beat.leaving

    def touch(self, admission_id: str, now_ns: int) -> None:
        """It has just said something."""
        known = self._admissions.get(admission_id)
        if known is not None:
            known.heard_ns = now_ns
            return
        if len(self._admissions) >= MAX_NAMES:
            silent = min(self._admissions, key=lambda name: self._admissions[name].heard_ns)
            del self._admissions[silent]
        self._admissions[admission_id] = _Admission(now_ns)

    def is_absent(self, admission_id: str, now_ns: int) -> bool:
        known = self._admissions.get(admission_id)
        if not self._beats_heard:
            return False
        return known is None or known.leaving or now_ns - known.heard_ns > SUSPECT_NS

    def absent(self, now_ns: int) -> set[str]:
        return {name for name in self._admissions if self.is_absent(name, now_ns)}

    def forget_silent(self, now_ns: int) -> list[str]:
        """Admissions that have been absent for so long that nobody will take their sequences."""
        gone = [
            name
            for name, known in self._admissions.items()
            if self._beats_heard and now_ns - known.heard_ns > FORGET_NS
        ]
        for name in gone:
            del self._admissions[name]
        return gone


def next_part(orphans: Iterable[Sequence], after_uid: int, max_bytes: int) -> list[Sequence]:
    """The orphans for one offer: those after `after_uid` first, then from the beginning again.

    At least one where there is any; each offer goes on where the last one ended, so that one that
    nobody can take stops no other.
    """
    ordered = sorted(orphans, key=lambda seq: (seq.uid <= after_uid, seq.uid))
    part: list[Sequence] = []
    num_bytes = 0
    for seq in ordered[:MAX_LANES]:
        num_bytes += OFFER_OVERHEAD_BYTES + 4 * seq.num_prompt_tokens + len(seq.envelope)
        if part and num_bytes > max_bytes:
            break
        part.append(seq)
    return part


def offer(engine: str, part: Iterable[Sequence], now_ns: int) -> AdoptSequences:
    return AdoptSequences(engine, [_as_submitted(seq, now_ns) for seq in part])


def _as_submitted(seq: Sequence, now_ns: int) -> SubmitSequence:
    left_ms = 0
    if seq.deadline_ns < NEVER_NS:
        left_ms = max(1, (seq.deadline_ns - now_ns) // 1_000_000)
    return SubmitSequence(
        seq_id=seq.seq_id,
        admission_id=seq.admission_id,
        tag=seq.tag,
        prompt=pack(seq.token_ids[: seq.num_prompt_tokens]),
        max_tokens=seq.max_total_tokens - seq.num_prompt_tokens,
        sampling=seq.sampling,
        stop_token_ids=pack(seq.stop_token_ids),
        salt=seq.salt,
        priority=seq.priority,
        deadline_ms=left_ms,
        envelope=seq.envelope,
        traceparent=seq.traceparent,
    )
