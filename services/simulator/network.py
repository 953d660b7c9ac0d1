"""The bus of the simulation: carries the real bytes, in virtual time, in an order that the seed
decides.

Core NATS, no more: in order from one sender to one receiver, no order across senders, nothing
durable. Options make it lose or repeat messages.

Pure: randomness and time come from the caller.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

MIN_DELAY_NS: Final = 20_000

Action = Callable[[], None]


@dataclass(slots=True)
class Clock:
    """Events by time, then by order of scheduling: the same seed gives the same history."""

    now_ns: int = 0
    _queue: list[tuple[int, int, Action]] = field(default_factory=list)
    _serial: int = 0

    def at(self, time_ns: int, action: Action) -> None:
        self._serial += 1
        heapq.heappush(self._queue, (max(time_ns, self.now_ns), self._serial, action))

    def step(self) -> bool:
        """Run the next event -> False where there is none."""
        if not self._queue:
            return False
        self.now_ns, _, action = heapq.heappop(self._queue)
        action()
        return True


@dataclass(frozen=True, slots=True)
class NetworkOptions:
    """Probabilities per message, and the mean of an exponential delay."""

    mean_delay_ns: int
    drop: float = 0.0
    duplicate: float = 0.0


class Network:
    """`droppable` kinds are those whose loss the protocol repairs by itself."""

    def __init__(self, clock: Clock, rng: random.Random, options: NetworkOptions) -> None:
        self._clock = clock
        self._rng = rng
        self._options = options
        self._last: dict[tuple[str, str], int] = {}
        self.counts: Counter[str] = Counter()

    def heal(self) -> None:
        """From now on nothing is lost or repeated."""
        self._options = NetworkOptions(self._options.mean_delay_ns)

    def send(
        self,
        sender: str,
        receiver: str,
        kind: str,
        payload: bytes,
        deliver: Callable[[bytes], None],
    ) -> None:
        self.counts[kind] += 1
        if self._rng.random() < self._options.drop:
            self.counts[f"dropped {kind}"] += 1
            return
        copies = 2 if self._rng.random() < self._options.duplicate else 1
        for _ in range(copies):
            delay = MIN_DELAY_NS + int(self._rng.expovariate(1.0 / self._options.mean_delay_ns))
            # In order per sender and receiver, whatever the delays.
            link = (sender, receiver)
            arrival = max(self._clock.now_ns + delay, self._last.get(link, 0) + 1)
            self._last[link] = arrival
            self._clock.at(arrival, lambda: deliver(payload))
