"""What the supervisor says of its services, kept with the time at which it said so.

Shell: the clock.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from services.runtime.supervisor import EventKind, SupervisorEvent


@dataclass(frozen=True, slots=True)
class Seen:
    at_s: float
    event: SupervisorEvent


class Watch:
    """An observer of a cluster. deaths: all `died` events of the mesh."""

    def __init__(self) -> None:
        self.seen: list[Seen] = []
        self._changed = asyncio.Event()

    def __call__(self, event: SupervisorEvent) -> None:
        if event.kind != "progress":
            self.seen.append(Seen(time.monotonic(), event))
            self._changed.set()

    @property
    def deaths(self) -> list[Seen]:
        return [seen for seen in self.seen if seen.event.kind == "died"]

    async def until(
        self, service: str, kind: EventKind, after_s: float, timeout_s: float
    ) -> Seen | None:
        """The first such event since `after_s`; None where none comes in time."""

        def wanted(seen: Seen) -> bool:
            event = seen.event
            return seen.at_s >= after_s and (event.service, event.kind) == (service, kind)

        return await self._first(wanted, timeout_s)

    async def _first(self, wanted: Callable[[Seen], bool], timeout_s: float) -> Seen | None:
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    found = next((seen for seen in self.seen if wanted(seen)), None)
                    if found is not None:
                        return found
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            return None
