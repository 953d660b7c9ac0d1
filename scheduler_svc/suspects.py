"""Who may have killed the worker: deaths by sequence, trials alone, and the end of a poison.

    computed in company ─ 2 deaths ─▶ runs alone ─ 3rd death ─▶ fails as `poisoned`
            ▲                            │ computed past where it died
            └──────── exonerated ◀───────┘ (after its second trial it stays alone)

Invariants: a death counts only where the worker came back as another generation and had not said
that it leaves; a sequence that is not exonerated is never computed together with another; one that
only ever died in company is never failed, because its third death would be one alone.

A poison dies where it is: deaths at positions that have nothing in common are not of one cause, and
the count begins again. What kills only in company is never found guilty: those that were there are
tried twice and then run alone to their end, so that worker deaths stay bounded. A scheduler that
starts anew knows no deaths, and a poison gets its three again.

Pure.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from .sequence import Sequence, SequenceStatus

DEATHS_TO_ISOLATE: Final = 2
DEATHS_TO_FAIL: Final = 3
MAX_TRIALS: Final = 2
# Deaths alone, each at another place: whatever it is, it must end.
TRIALS_TO_FAIL: Final = 5

POISONED: Final = "the worker died again and again while it computed this request"


class InFlight(NamedTuple):
    """`seq` was being computed from token `first` on, up to and without `last`."""

    seq: Sequence
    first: int
    last: int


class Suspects:
    """Sequences with a death; true while one of them must run alone."""

    def __init__(self) -> None:
        self._watched: dict[int, Sequence] = {}
        self._alone: dict[int, Sequence] = {}
        self._lost_generation = 0
        self._in_flight: list[InFlight] = []
        self._turn = 0

    def __bool__(self) -> bool:
        return bool(self._alone)

    # ---- deaths

    def worker_lost(self, generation: int, in_flight: list[InFlight]) -> None:
        """The worker of `generation` does not answer any more, or another has its place."""
        self._lost_generation, self._in_flight = generation, in_flight

    def attached(self, generation: int) -> list[Sequence]:
        """A worker has been found: if it is another one, the lost one died -> who is poisoned."""
        in_flight, self._in_flight = self._in_flight, []
        if generation == self._lost_generation:
            # It lives: only the bus between was gone.
            return []
        poisoned: list[Sequence] = []
        for named in in_flight:
            seq = named.seq
            if seq.status is SequenceStatus.FINISHED:
                continue
            self._watched[seq.uid] = seq
            _count_death(named)
            if seq.num_deaths >= DEATHS_TO_FAIL or seq.num_trials >= TRIALS_TO_FAIL:
                poisoned.append(seq)
            elif seq.num_deaths >= DEATHS_TO_ISOLATE and not seq.runs_alone:
                seq.runs_alone = True
                seq.num_trials += 1
                self._alone[seq.uid] = seq
        return poisoned

    def passed(self, seq: Sequence, num_computed_tokens: int) -> None:
        """Results say that so many tokens of `seq` are computed: past its deaths it is innocent."""
        if num_computed_tokens < seq.died_before:
            return
        seq.num_deaths = 0
        del self._watched[seq.uid]
        if seq.runs_alone and seq.num_trials < MAX_TRIALS:
            seq.runs_alone = False
            del self._alone[seq.uid]

    def forget(self, seq: Sequence) -> None:
        """It has ended."""
        self._watched.pop(seq.uid, None)
        self._alone.pop(seq.uid, None)

    @property
    def watched(self) -> list[Sequence]:
        """Those with a death that they have not got past."""
        return list(self._watched.values())

    # ---- turns

    @property
    def alone(self) -> list[Sequence]:
        """Those that run alone, the one whose turn it is first, then by arrival, round and
        round.
        """
        order = sorted(self._alone.values(), key=lambda seq: seq.uid)
        later = [seq for seq in order if seq.uid >= self._turn]
        return later + order[: len(order) - len(later)]

    def had_step(self, seq: Sequence) -> None:
        """A trial goes on until it is over; those that stay alone change with every step."""
        self._turn = seq.uid + (seq.num_trials >= MAX_TRIALS)


def _count_death(named: InFlight) -> None:
    """One more at the place of those before, or the first at another.

    tokens 98-99 in flight, then 0-99 (computed again): two deaths at 98-99; then 0-63: one, there.
    """
    seq = named.seq
    first, last = max(named.first, seq.died_from), min(named.last, seq.died_before)
    if seq.num_deaths and first < last:
        seq.num_deaths += 1
    else:
        first, last = named.first, named.last
        seq.num_deaths = 1
        seq.num_trials += seq.runs_alone
    seq.died_from, seq.died_before = first, last
