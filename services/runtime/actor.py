"""The loop of every service: events in, one at a time, through a pure core, effects out.

Invariants: the core is touched by this loop alone; the inbox is bounded (what overflows is counted
and dropped, as the bus would drop it, and repaired by the numbered streams); a core that finds its
state broken stops the process.

Shell: clock and event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable
from typing import Final, Generic, Protocol, TypeVar

from services.contracts.errors import WireError

MAX_INBOX: Final = 65_536
MAX_BATCH: Final = 256

Event = TypeVar("Event", contravariant=True)
Effect = TypeVar("Effect", covariant=True)
E = TypeVar("E")
F = TypeVar("F")


class Core(Protocol[Event, Effect]):
    """A state machine without I/O. `wake_at_ns`: when it wants `tick`, on the clock of `now_ns`, or
    None.
    """

    def handle(self, event: Event, now_ns: int) -> Iterable[Effect]: ...

    def tick(self, now_ns: int) -> Iterable[Effect]: ...

    @property
    def wake_at_ns(self) -> int | None: ...


class Actor(Generic[E, F]):
    """Runs one core. `perform` does an effect; it may await the bus, never another event.

    after_turn: called after each batch with the number of events still queued, for services that
    answer many events at once; it may touch the core, since no event is being handled.
    """

    def __init__(
        self,
        core: Core[E, F],
        perform: Callable[[F], Awaitable[None]],
        after_turn: Callable[[int], Awaitable[None]] | None = None,
    ) -> None:
        self._core = core
        self._perform = perform
        self._after_turn = after_turn
        self._inbox: deque[E] = deque()
        self._arrived = asyncio.Event()
        self._stopping = False
        self._finished = asyncio.Event()
        self.dropped: Counter[str] = Counter()

    def post(self, event: E) -> None:
        """Queue `event`; safe from the loop's own thread only."""
        if len(self._inbox) >= MAX_INBOX:
            self.dropped["inbox_full"] += 1
            return
        self._inbox.append(event)
        self._arrived.set()

    def wake(self) -> None:
        """Take a turn although nothing has arrived."""
        self._arrived.set()

    async def finish(self) -> None:
        """Handle what is queued, and then nothing more."""
        self._stopping = True
        self._arrived.set()
        await self._finished.wait()

    async def run(self) -> None:
        """Whatever the core raises ends the loop: a broken invariant is not survived. After
        `finish` it idles, so that its end is never taken for a failure.
        """
        while not self._stopping or self._inbox:
            await self._wait()
            await self._turn()
        self._finished.set()
        await asyncio.Event().wait()

    async def _wait(self) -> None:
        if self._inbox:
            # Let the bus read its socket between batches, or a flood would starve the ping.
            await asyncio.sleep(0)
            return
        self._arrived.clear()
        wake_at_ns = self._core.wake_at_ns
        if wake_at_ns is None:
            await self._arrived.wait()
            return
        # Event loops count in milliseconds: rounding down would spin through the last one.
        delay_s = -((time.monotonic_ns() - wake_at_ns) // 1_000_000) / 1000
        if delay_s <= 0:
            await asyncio.sleep(0)
            return
        timer = asyncio.get_running_loop().call_later(delay_s, self._arrived.set)
        await self._arrived.wait()
        timer.cancel()

    async def _turn(self) -> None:
        for _ in range(min(len(self._inbox), MAX_BATCH)):
            try:
                effects = self._core.handle(self._inbox.popleft(), time.monotonic_ns())
            except WireError:
                # A well-formed message with a column that is not: cores look before they change.
                self.dropped["wire"] += 1
                continue
            for effect in effects:
                await self._perform(effect)
        wake_at_ns = self._core.wake_at_ns
        now_ns = time.monotonic_ns()
        if wake_at_ns is not None and wake_at_ns <= now_ns:
            for effect in self._core.tick(now_ns):
                await self._perform(effect)
        if self._after_turn is not None:
            await self._after_turn(len(self._inbox))
