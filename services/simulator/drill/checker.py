"""What a drill must show: every stream whole, every fault real, every block accounted for.

Invariants: a stream is judged by the tokens that a run without faults gives; a request that was
refused before it had an answer is no loss, one that got no word at all is; a stream that a dead
gateway cut is none, since its client asks again and that answer is judged.

Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from services.simulator.drill.schedule import Fault, Kind

OWN_ENDS: Final = frozenset({"deadline_exceeded"})
"""Codes of failures that the request itself asked for."""

REFUSALS: Final = frozenset({"no_worker", "queue_full", "draining", "no_server", "unreachable"})
"""Codes that say no before there was an answer; the client may ask again."""

NOTICE_S: Final = 0.3
"""A silence that begins so soon after a fault may be due to it: what was under way still came."""

_WINDOW: Final = 8


class Wrong(StrEnum):
    LOST = "lost"
    DUPLICATED = "duplicated"
    REORDERED = "reordered"
    OTHER = "other"


@dataclass(slots=True)
class Stream:
    """One request as its client saw it. Times are monotonic seconds, 0.0 where not yet.

    silences: (begin, end) of every wait for tokens that was longer than SILENCE_S. code: how it
    failed; wrong: what is wrong with its tokens; complete: it has every token it asked for.
    """

    number: int
    via: str
    asked_s: float
    deadline: bool = False
    last_s: float = 0.0
    ended_s: float = 0.0
    num_tokens: int = 0
    silences: list[tuple[float, float]] = field(default_factory=list)
    code: str = ""
    cancelled: bool = False
    complete: bool = False
    cut: bool = False
    wrong: Wrong | None = None

    @property
    def refused(self) -> bool:
        """It was told no before it had anything."""
        return self.code in REFUSALS and not self.num_tokens

    def heard(self, now_s: float, num_tokens: int) -> None:
        """Tokens have come."""
        since = self.last_s or self.asked_s
        if now_s - since > SILENCE_S:
            self.silences.append((since, now_s))
        self.last_s = now_s
        self.num_tokens += num_tokens


SILENCE_S: Final = 0.1


@dataclass(slots=True)
class Outcome:
    """What became of one fault. noticed_s, ready_s: seconds from it until the supervisor knew, and
    until the service said that it was ready again; None where neither was due.
    """

    fault: Fault
    mesh: int
    began_s: float
    verified: bool
    evidence: str
    noticed_s: float | None = None
    ready_s: float | None = None
    silence_s: float = 0.0
    silent_via: str = ""

    @property
    def is_crash(self) -> bool:
        """It died at once; who is told to end takes its time, and who hangs does not die."""
        return self.fault.kind in {Kind.KILL, Kind.FAILPOINT}


@dataclass(frozen=True, slots=True)
class Books:
    """The ledger's pool when nothing is open any more. held, spare: as the scheduler says."""

    total: int
    free: int
    leased: int
    cached: int
    held: int
    spare: int
    fault: str = ""

    @property
    def leaked(self) -> int:
        """Blocks that nobody can account for; at least one where the ledger finds a fault."""
        missing = abs(self.total - self.free - self.leased - self.cached)
        return max(
            missing + self.held + abs(self.leased - self.held - self.spare), bool(self.fault)
        )


@dataclass(slots=True)
class Verdict:
    """What the drill found. failed: by code, those that asked for it included."""

    accepted: int = 0
    finished: int = 0
    cancelled: int = 0
    cut: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)
    lost: int = 0
    duplicated: int = 0
    reordered: int = 0
    wrong: int = 0
    faults: int = 0
    faults_verified: int = 0
    kills_verified: int = 0
    blocks_leaked: int = 0
    worst_recovery_s: float = 0.0
    worst_ready_s: float = 0.0
    crash_noticed_s: float = 0.0
    hang_noticed_s: float = 0.0
    unexpected_deaths: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        bad = self.lost + self.duplicated + self.reordered + self.wrong + self.blocks_leaked
        happened = self.faults and self.finished and self.faults == self.faults_verified
        return bool(happened) and not (bad or self.unexpected_deaths)


def judge(
    streams: Sequence[Stream],
    outcomes: Sequence[Outcome],
    books: Iterable[Books],
    unexpected_deaths: Iterable[str] = (),
) -> Verdict:
    """The verdict on one drill; sets `silence_s` of the outcomes, and `code` of streams that were
    cut while no gateway was hit.
    """
    verdict = Verdict(unexpected_deaths=list(unexpected_deaths))
    hits = [outcome.began_s for outcome in outcomes if outcome.fault.service == "gateway"]
    for stream in streams:
        if stream.cut and not any(stream.asked_s <= hit <= stream.ended_s for hit in hits):
            stream.cut, stream.code = False, "cut without a reason"
        _judge_stream(verdict, stream)
    for outcome in outcomes:
        outcome.silence_s, outcome.silent_via = _silence(outcome.began_s, streams)
        _judge_fault(verdict, outcome)
    verdict.blocks_leaked = sum(book.leaked for book in books)
    return verdict


def compare(expected: Sequence[int], got: Sequence[int]) -> Wrong | None:
    """What is wrong with `got`, which should begin `expected`; None where nothing is."""
    if list(got) == list(expected[: len(got)]):
        return None
    pairs = enumerate(zip(expected, got, strict=False))
    at = next((i for i, (wanted, given) in pairs if wanted != given), len(expected))
    window = list(got[at : at + _WINDOW])
    places = [
        start
        for start in range(len(expected))
        if list(expected[start : start + len(window)]) == window
    ]
    if any(start < at for start in places):
        return Wrong.DUPLICATED
    if places:
        return Wrong.LOST
    return Wrong.REORDERED if sorted(expected) == sorted(got) else Wrong.OTHER


def _judge_stream(verdict: Verdict, stream: Stream) -> None:
    if stream.refused:
        verdict.refused[stream.code] += 1
        return
    verdict.accepted += 1
    match stream.wrong:
        case Wrong.LOST:
            verdict.lost += 1
        case Wrong.DUPLICATED:
            verdict.duplicated += 1
        case Wrong.REORDERED:
            verdict.reordered += 1
        case Wrong.OTHER:
            verdict.wrong += 1
        case None:
            _judge_end(verdict, stream)


def _judge_end(verdict: Verdict, stream: Stream) -> None:
    if stream.complete:
        verdict.finished += 1
    elif stream.cancelled:
        verdict.cancelled += 1
    elif stream.cut:
        verdict.cut += 1
    else:
        verdict.failed[stream.code or "no end"] += 1
        if not (stream.deadline and stream.code in OWN_ENDS):
            verdict.lost += 1


def _judge_fault(verdict: Verdict, outcome: Outcome) -> None:
    verdict.faults += 1
    verdict.faults_verified += outcome.verified
    verdict.kills_verified += outcome.verified and outcome.fault.is_kill
    verdict.worst_recovery_s = max(verdict.worst_recovery_s, outcome.silence_s)
    verdict.worst_ready_s = max(verdict.worst_ready_s, outcome.ready_s or 0.0)
    if outcome.noticed_s is not None:
        if outcome.fault.kind in {Kind.PAUSE, Kind.HANG}:
            verdict.hang_noticed_s = max(verdict.hang_noticed_s, outcome.noticed_s)
        elif outcome.is_crash:
            verdict.crash_noticed_s = max(verdict.crash_noticed_s, outcome.noticed_s)


def _silence(began_s: float, streams: Iterable[Stream]) -> tuple[float, str]:
    """The longest that any stream waited, from the fault to its next token, and over which edge."""
    return max(
        (
            (end - began_s, stream.via)
            for stream in streams
            for begin, end in stream.silences
            if begin < began_s + NOTICE_S and end > began_s
        ),
        default=(0.0, ""),
    )
