"""Which faults a drill injects, where and in which order: drawn from a seed, or read from a file.

Invariants: the same seed gives the same schedule; kills are spread evenly over the services, and
those of one service over its phases; between two of one service come some of others, so that no
sequence is in flight at three worker deaths.

Pure: a seed is an argument.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum
from typing import Final

import msgspec

from services.runtime.failpoints import PLACES, Action
from services.runtime.problem import Problem

SERVICES: Final = ("worker", "scheduler", "kv_store", "admission", "admission-1", "gateway", "nats")
KILLS_PER_OTHER: Final = 4
MAX_FAULTS: Final = 10_000
MAX_GAP_S: Final = 0.6
MAX_STALL_S: Final = 1.5
TOGETHER: Final = 0.12
"""Share of the faults that come while the mesh still recovers from the one before."""

PER_STEP: Final = frozenset(
    {
        *("scheduler.before_plan", "scheduler.after_plan", "scheduler.after_result"),
        *("scheduler.before_updates", "scheduler.before_delta", "admission.after_flush"),
        *("worker.before_forward", "worker.after_forward", "worker.after_result"),
        "worker.no_memory",
        "kv_store.before_delta",
    }
)
"""Places that are passed once per step: their passing is drawn from a wider range."""

RAISED_AT: Final = {
    "worker": "worker.before_forward",
    "scheduler": "scheduler.before_delta",
    "kv_store": "kv_store.before_grant",
    "admission": "admission.after_flush",
}
"""Where an error that nobody handles ends the service, as a broken invariant would."""

PROVOKED_BY: Final = {"worker.after_attach": "scheduler"}
"""Places that are passed only after the death of another service."""


class Kind(StrEnum):
    """KILL, TERMINATE: SIGKILL, SIGTERM from outside. PAUSE: SIGSTOP, then SIGCONT. HANG: SIGSTOP
    until the supervisor ends the process. FAILPOINT: an action at a place in the service's code.
    """

    KILL = "kill"
    TERMINATE = "terminate"
    PAUSE = "pause"
    HANG = "hang"
    FAILPOINT = "failpoint"


class Fault(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One fault. service: its name in the cluster. place, action, count: of a failpoint. seconds:
    of a pause or stall. gap_s: after the recovery from the fault before, or, where `together`,
    after that fault itself.
    """

    service: str
    kind: Kind
    place: str = ""
    action: str = ""
    count: int = 1
    seconds: float = 0.0
    gap_s: float = 0.2
    together: bool = False

    @property
    def is_kill(self) -> bool:
        return self.kind is Kind.KILL or self.action == Action.KILL

    @property
    def label(self) -> str:
        """`kill`, `pause`, or an action with its place."""
        return f"{self.action} {self.place}" if self.kind is Kind.FAILPOINT else self.kind.value

    @property
    def spec(self) -> str:
        """What arms the failpoint."""
        seconds = f"={self.seconds}" if self.seconds else ""
        return f"{self.place}:{self.action}{seconds}@{self.count}"


def draw(seed: int, num_kills: int, services: Sequence[str] = SERVICES) -> list[Fault]:
    """`num_kills` kills, and one other fault for every KILLS_PER_OTHER of them."""
    rng = random.Random(seed)
    kills = {service: _endless(rng, _kills_of(service)) for service in services}
    others = _endless(rng, [fault for service in services for fault in _others_of(service)])
    faults: list[Fault] = []
    for number, service in enumerate(_rounds(rng, services)):
        if number == num_kills:
            break
        faults.append(_timed(rng, next(kills[service])))
        if number % KILLS_PER_OTHER == KILLS_PER_OTHER - 1:
            faults.append(_timed(rng, next(others)))
    return faults


def quick(seed: int, services: Sequence[str] = SERVICES) -> list[Fault]:
    """One kill of each service, a pause and a lost message; at places drawn from the seed."""
    rng = random.Random(seed)
    faults = [_timed(rng, rng.choice(_kills_of(service))) for service in services]
    rng.shuffle(faults)
    faults.append(Fault("scheduler", Kind.FAILPOINT, "scheduler.before_updates", Action.DROP))
    faults.append(Fault("worker", Kind.PAUSE, seconds=0.5))
    return [msgspec.structs.replace(fault, together=False) for fault in faults]


def dump(faults: Iterable[Fault]) -> str:
    return msgspec.json.encode(list(faults)).decode()


def parse(text: str) -> list[Fault]:
    """What `dump` wrote, perhaps edited. Raises Problem."""
    try:
        faults = msgspec.json.decode(text, type=list[Fault])
    except msgspec.DecodeError as error:
        raise _refusal(str(error)) from None
    if not 0 < len(faults) <= MAX_FAULTS:
        raise _refusal(f"{len(faults)} faults; 1 to {MAX_FAULTS} are possible")
    for fault in faults:
        if fault.service not in SERVICES:
            raise _refusal(f"no service {fault.service!r}; there are {', '.join(SERVICES)}")
        if fault.kind is Kind.FAILPOINT and fault.place not in PLACES:
            raise _refusal(f"no place {fault.place!r}")
    return faults


def _refusal(cause: str) -> Problem:
    return Problem("E106", "Schedule refused", cause=cause, fix="`streetcar chaos schedule`")


def _places_of(service: str) -> list[str]:
    owner = service.split("-")[0]
    return [place for place in PLACES if place.split(".")[0] == owner]


def _kills_of(service: str) -> list[Fault]:
    inside = [Fault(service, Kind.FAILPOINT, place, Action.KILL) for place in _places_of(service)]
    return [Fault(service, Kind.KILL), *inside]


def _others_of(service: str) -> list[Fault]:
    owner, places = service.split("-")[0], _places_of(service)
    drops = [p for p in places if PLACES[p].loses and p not in PROVOKED_BY]
    faults = [Fault(service, Kind.FAILPOINT, place, Action.DROP) for place in drops]
    if place := RAISED_AT.get(owner):
        faults.append(Fault(service, Kind.FAILPOINT, place, Action.STALL))
        faults.append(Fault(service, Kind.FAILPOINT, place, Action.RAISE))
    if service != "nats":
        faults.append(Fault(service, Kind.TERMINATE))
    return [*faults, Fault(service, Kind.PAUSE), Fault(service, Kind.HANG)]


def _timed(rng: random.Random, fault: Fault) -> Fault:
    """`fault` with its passing, its length and its time."""
    passings = 40 if fault.place in PER_STEP else 1 if fault.place in PROVOKED_BY else 3
    lasts = fault.kind is Kind.PAUSE or fault.action == Action.STALL
    return msgspec.structs.replace(
        fault,
        count=rng.randint(1, passings),
        seconds=round(rng.uniform(0.3, MAX_STALL_S), 2) if lasts else 0.0,
        gap_s=round(rng.uniform(0.05, MAX_GAP_S), 2),
        together=rng.random() < TOGETHER,
    )


def _endless(rng: random.Random, items: Sequence[Fault]) -> Iterator[Fault]:
    """All items in a random order, then all of them in another one, and so on."""
    while True:
        yield from rng.sample(items, len(items))


def _rounds(rng: random.Random, services: Sequence[str]) -> Iterator[str]:
    """Every service once per round, with others between its turns where there are enough."""
    apart = (len(services) - 1) // 2
    last: list[str] = []
    while True:
        order = rng.sample(services, len(services))
        if set(order[:apart]).isdisjoint(last):
            yield from order
            last = order[len(order) - apart :]
