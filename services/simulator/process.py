"""One run of a program: it has a clock of its own, and may be stopped, woken and killed.

Invariants: a stopped process does nothing, and everything that came meanwhile when it wakes; a dead
one never does anything again; nobody reads the clock of the simulation but through a process.

Shell of the simulation; no clock, no socket.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from .network import Action, Clock

PPM: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class Skew:
    """A clock that started at another time and runs faster or slower by `ppm` millionths."""

    offset_ns: int = 0
    ppm: int = 0

    def local(self, time_ns: int) -> int:
        return self.offset_ns + time_ns + time_ns * self.ppm // PPM

    def true(self, local_ns: int) -> int:
        """The earliest true time at which this clock shows `local_ns` or more."""
        time_ns = (local_ns - self.offset_ns) * PPM // (PPM + self.ppm) - 1
        while self.local(time_ns) < local_ns:
            time_ns += 1
        return time_ns


class Process:
    """name: of this run alone; host: where it runs, which is what links and clocks belong to."""

    def __init__(self, clock: Clock, rng: random.Random, name: str, host: str, skew: Skew) -> None:
        self.clock = clock
        self.rng = rng
        self.name = name
        self.host = host
        self.skew = skew
        self.alive = True
        self.paused = False
        self._messages: list[Action] = []
        self._timers: list[Action] = []

    @property
    def now_ns(self) -> int:
        return self.skew.local(self.clock.now_ns)

    def run(self, action: Action, *, timer: bool = False) -> None:
        """Do `action` now, when the process wakes, or never. timer: not a message, but its own."""
        if not self.alive:
            return
        if self.paused:
            (self._timers if timer else self._messages).append(action)
        else:
            action()

    def after(self, delay_ns: int, action: Action) -> None:
        """On this process's own clock."""
        due_ns = self.skew.true(self.now_ns + delay_ns)
        self.clock.at(due_ns, lambda: self.run(action, timer=True))

    def every(self, period_ns: int, action: Callable[[], None]) -> None:
        """Now, and again and again."""

        def again() -> None:
            action()
            self.after(period_ns, again)

        again()

    def pause(self) -> None:
        self.paused = True

    def wake(self) -> None:
        """Everything at once; what was due before what has come, or the other way round."""
        if not self.alive or not self.paused:
            return
        self.paused = False
        messages, self._messages = self._messages, []
        timers, self._timers = self._timers, []
        first, second = (timers, messages) if self.rng.random() < 0.5 else (messages, timers)
        for action in [*first, *second]:
            self.run(action)

    def die(self) -> None:
        self.alive = False
        self._messages.clear()
        self._timers.clear()
