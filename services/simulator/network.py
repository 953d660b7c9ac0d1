"""The bus of the simulation: carries the real bytes, in virtual time, in an order that the seed
decides.

Core NATS, no more: subjects, queue groups, replies, nothing durable. Messages of one sender to one
receiver keep their order within a channel (a subscription), and change places across channels. A
nemesis may lose, repeat, delay and hold them, and cut any directed pair of hosts.

Pure: randomness and time come from the caller.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, Protocol

from .phases import Phase

MIN_DELAY_NS: Final = 20_000
# A client that sends its request again says so in it.
NEVER_REPEATED: Final = frozenset({"generate"})

Action = Callable[[], None]
Bytes = Callable[[bytes], None]


@dataclass(slots=True)
class Clock:
    """Events by time, then by order of scheduling: the same seed gives the same history."""

    now_ns: int = 0
    num_events: int = 0
    _queue: list[tuple[int, int, Action]] = field(default_factory=list)
    _serial: int = 0

    def at(self, time_ns: int, action: Action) -> None:
        self._serial += 1
        heapq.heappush(self._queue, (max(time_ns, self.now_ns), self._serial, action))

    def after(self, delay_ns: int, action: Action) -> None:
        self.at(self.now_ns + delay_ns, action)

    def step(self) -> bool:
        """Run the next event -> False where there is none."""
        if not self._queue:
            return False
        self.now_ns, _, action = heapq.heappop(self._queue)
        self.num_events += 1
        action()
        return True


class Host(Protocol):
    """What a message is addressed to: one run of a program on a host. `name` is the run's own."""

    host: str
    name: str
    alive: bool

    def run(self, action: Action, *, timer: bool = False) -> None:
        """Do `action` now, when it wakes, or never. timer: it is the host's own, not a message."""


@dataclass(frozen=True, slots=True)
class Parcel:
    """One message on its way. channel: what keeps its order; phases: what it shows to happen."""

    sender: Host
    receiver: Host
    kind: str
    payload: bytes
    subject: str = ""
    channel: str = ""
    phases: tuple[Phase, ...] = ()


class Cut(StrEnum):
    """What a cut link does with a message: lose it, or hold it until the link is restored."""

    LOSE = "lose"
    HOLD = "hold"


@dataclass(slots=True)
class Weather:
    """drop, duplicate: probabilities per message of `kinds` (empty: of all). lag_ns: added to every
    delay from or to a host.
    """

    mean_delay_ns: int
    drop: float = 0.0
    duplicate: float = 0.0
    kinds: tuple[str, ...] = ()
    lag_ns: dict[str, int] = field(default_factory=dict)


class Network:
    """watch: called with each parcel that is about to leave; what it returns True for is lost.

    counts: messages by kind; faults: what really happened to them; lost_at, repeated_at: by the
    host that they were for; repeated_by: by the host that they came from, and kind.
    """

    def __init__(self, clock: Clock, rng: random.Random, weather: Weather) -> None:
        self.clock = clock
        self.weather = weather
        self.cuts: dict[tuple[str, str], Cut] = {}
        self.counts: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self.lost_at: Counter[str] = Counter()
        self.repeated_at: Counter[str] = Counter()
        self.repeated_by: Counter[tuple[str, str]] = Counter()
        self.watch: Callable[[Parcel], bool] = lambda parcel: False
        self._rng = rng
        self._last: dict[tuple[str, str, str], int] = {}
        self._held: list[tuple[Parcel, Bytes]] = []
        self._era = 0

    def wipe(self) -> None:
        """The server dies: what is on its way is lost."""
        self._era += 1
        self._held.clear()

    def calm(self) -> None:
        """From now on nothing is lost, repeated, late or held."""
        self.weather = Weather(self.weather.mean_delay_ns)
        self.restore(list(self.cuts))

    def cut(self, links: list[tuple[str, str]], how: Cut) -> None:
        for link in links:
            self.cuts[link] = how

    def restore(self, links: list[tuple[str, str]]) -> None:
        """These directed pairs carry again, beginning with what was held on them."""
        for link in links:
            self.cuts.pop(link, None)
        held, self._held = self._held, []
        for parcel, deliver in held:
            if (parcel.sender.host, parcel.receiver.host) in self.cuts:
                self._held.append((parcel, deliver))
            else:
                self._carry(parcel, deliver)

    def send(self, parcel: Parcel, deliver: Bytes) -> None:
        self.counts[parcel.kind] += 1
        lost = self.watch(parcel)
        # The watcher may have killed the sender before the message left it.
        if lost or not parcel.sender.alive:
            self._lose(parcel, "struck")
            return
        cut = self.cuts.get((parcel.sender.host, parcel.receiver.host))
        if cut is Cut.HOLD:
            self.faults[f"held {parcel.kind}"] += 1
            self._held.append((parcel, deliver))
        elif cut is Cut.LOSE:
            self._lose(parcel, "cut off")
        elif self._strikes(self.weather.drop, parcel.kind):
            self._lose(parcel, "dropped")
        else:
            self._carry(parcel, deliver)
            if parcel.kind not in NEVER_REPEATED and self._strikes(
                self.weather.duplicate, parcel.kind
            ):
                self.faults[f"repeated {parcel.kind}"] += 1
                self.repeated_at[parcel.receiver.host] += 1
                self.repeated_by[parcel.sender.host, parcel.kind] += 1
                self._carry(parcel, deliver)

    def _strikes(self, probability: float, kind: str) -> bool:
        kinds = self.weather.kinds
        # An answer is of the kind of its question.
        if not probability or (kinds and kind.split()[0] not in kinds):
            return False
        return self._rng.random() < probability

    def _lose(self, parcel: Parcel, how: str) -> None:
        self.faults[f"{how} {parcel.kind}"] += 1
        self.lost_at[parcel.receiver.host] += 1

    def _carry(self, parcel: Parcel, deliver: Bytes) -> None:
        delay = MIN_DELAY_NS + int(self._rng.expovariate(1.0 / self.weather.mean_delay_ns))
        sender, receiver = parcel.sender, parcel.receiver
        lag = self.weather.lag_ns
        if lag:
            late = lag.get(sender.host, 0) + lag.get(receiver.host, 0)
            self.faults["lagged"] += bool(late)
            delay += late
        # In order per sender, receiver and channel, whatever the delays.
        link = (sender.name, receiver.name, parcel.channel or parcel.kind)
        arrival = max(self.clock.now_ns + delay, self._last.get(link, 0) + 1)
        self._last[link] = arrival
        era = self._era

        def arrive() -> None:
            if era != self._era:
                self._lose(parcel, "wiped")
            elif receiver.alive:
                receiver.run(lambda: deliver(parcel.payload))
            else:
                self._lose(parcel, "addressed to the dead")

        self.clock.at(arrival, arrive)
