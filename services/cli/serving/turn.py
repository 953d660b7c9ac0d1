"""One turn of a load on one server: closed (so many users) or open (so many arrivals a second).

Shell: tasks and time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .figures import Answer
from .target import Target, complete
from .workload import Job, arrivals

if TYPE_CHECKING:
    from aiohttp import ClientSession

WARM_UP = Job("warm up", 8)
Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Load:
    """`users`: that many requests at any time, each followed by the next; else `rate`: arrivals a
    second, whatever becomes of those before.
    """

    users: int = 0
    rate: float = 0.0

    def __str__(self) -> str:
        return f"{self.users} users" if self.users else f"{self.rate:g} requests/s"


async def run_turn(
    session: ClientSession,
    target: Target,
    load: Load,
    todo: Sequence[Job],
    seed: int,
    progress: Progress,
) -> tuple[list[Answer], float]:
    """-> answers, and the seconds from the first request to the last answer. One request before
    them, not counted, wakes the server up.
    """
    await complete(session, target, WARM_UP)
    answers: list[Answer] = []

    async def one(job: Job) -> None:
        answers.append(await complete(session, target, job))
        progress(len(answers))

    started = time.monotonic()
    if load.users:
        left = iter(todo)

        async def user() -> None:
            for job in left:
                await one(job)

        await asyncio.gather(*(user() for _ in range(load.users)))
    else:
        await asyncio.gather(
            *(
                _later(started + at, one, job)
                for at, job in zip(arrivals(len(todo), load.rate, seed), todo, strict=True)
            )
        )
    return answers, time.monotonic() - started


async def _later(at: float, work: Callable[[Job], Awaitable[None]], job: Job) -> None:
    await asyncio.sleep(max(0.0, at - time.monotonic()))
    await work(job)
