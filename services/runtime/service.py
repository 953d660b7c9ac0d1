"""What the main function of every service does: connect, beat, run its actor, stop when asked.

Invariants: a service that cannot reach the bus keeps trying and says so; a broken invariant ends
the process with status 1 and its reason in the log; SIGTERM stops it in order.

Shell: signals, processes, the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import secrets
import signal
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final, TypeVar

import msgspec
import nats.errors

from services.contracts import codec
from services.contracts.beats import Beat
from services.contracts.ids import MAX_ID_LENGTH
from services.contracts.limits import BEAT_PERIOD_MS
from services.contracts.subjects import Subjects
from services.runtime import failpoints
from services.runtime.bus import Bus, NatsBus
from services.runtime.bus_url import without_password
from services.runtime.log import configure_logging, get_logger, report_fatal
from services.runtime.loop import run_loop
from services.runtime.problem import Problem
from services.runtime.settings import Settings, for_service

DEFAULT_NATS_URL: Final = "nats://127.0.0.1:4222"
CONNECT_RETRY_S: Final = 0.2
LEAVE_TIMEOUT_S: Final = 3.0
"""What a service takes at most to end what it has begun; below what a supervisor waits for it."""
COLLECT_AFTER: Final = 50_000
RUN_CHARS: Final = 9
"""Of an id, that tell one run of a service from another."""

T = TypeVar("T")


class Stopping(asyncio.Event):
    """Set by SIGTERM (this process ends, the mesh stays) and by SIGINT (`for_good`: all ends)."""

    for_good = False

    def set_for_good(self) -> None:
        self.for_good = True
        self.set()


Main = Callable[[Settings, Stopping], Coroutine[Any, Any, None]]


def run_service(name: str, main: Main) -> int:
    """Run `main(settings, stopping)` to its end -> exit status."""
    try:
        settings = for_service()
    except Problem as problem:
        report_fatal(problem.code, problem.cause, problem.fix)
        return 1
    configure_logging(name, settings.log_level)
    log = get_logger(name)
    _calm_collector()
    try:
        failpoints.enable(settings)
        run_loop(_until_signal(main, settings))
    except Stopped:
        return 0
    except Problem as problem:
        report_fatal(problem.code, problem.cause, problem.fix)
        return 1
    except (
        Exception
    ) as error:  # the last stop of every error: log it, and let the supervisor decide
        log.exception("service_failed", reason=f"{type(error).__name__}: {error}")
        return 1
    return 0


class Stopped(Exception):
    """The service was told to stop before it had begun to serve."""


async def unless_stopped(stopping: asyncio.Event, work: Awaitable[T]) -> T:
    """`work`'s result; raises Stopped as soon as `stopping` is set."""
    task = asyncio.ensure_future(work)
    stopped = asyncio.ensure_future(stopping.wait())
    try:
        await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Stopped
        return task.result()
    finally:
        task.cancel()
        stopped.cancel()


async def connect(settings: Settings, name: str, stopping: asyncio.Event) -> NatsBus:
    """A connected bus; waits for the server as long as it takes. Raises Stopped."""
    return await unless_stopped(stopping, _connect(settings, name))


async def _connect(settings: Settings, name: str) -> NatsBus:
    url = settings.nats_url or DEFAULT_NATS_URL
    log = get_logger("bus")
    said = False
    while True:
        bus = NatsBus(name, on_change=lambda up: log.warning("bus_back" if up else "bus_lost"))
        try:
            await bus.connect(url)
            return bus
        except (nats.errors.Error, OSError) as error:
            if not said:
                log.warning("bus_unreachable", url=without_password(url), reason=str(error))
                said = True
            await bus.close()
            await asyncio.sleep(CONNECT_RETRY_S)


def run_id(service_id: str) -> str:
    """An id that only this run has: a service that is started again is another one."""
    return f"{service_id[: MAX_ID_LENGTH - RUN_CHARS]}-{secrets.token_hex(4)}"


def subjects(settings: Settings) -> Subjects:
    return Subjects(settings.subject_prefix)


async def beat_forever(bus: Bus, subject: str, beat: Callable[[], Beat]) -> None:
    """Publish `beat()` now and every BEAT_PERIOD_MS."""
    while True:
        await bus.publish(subject, codec.encode(beat()))
        await asyncio.sleep(BEAT_PERIOD_MS / 1000)


async def say_leaving(bus: Bus, subject: str, beat: Beat) -> None:
    """The last beat: whoever hears it waits for a successor instead of suspecting a death."""
    await bus.publish(subject, codec.encode(msgspec.structs.replace(beat, leaving=True)))


async def run_until_left(
    stopping: asyncio.Event, leave: Callable[[], Awaitable[None]], *tasks: Awaitable[object]
) -> None:
    """As `run_together`; once `stopping` is set, `leave` ends in order what `tasks` have begun, in
    LEAVE_TIMEOUT_S at most.
    """

    async def left() -> None:
        await stopping.wait()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LEAVE_TIMEOUT_S):
                await leave()

    await run_together(asyncio.Event(), left(), *tasks)


async def run_together(stopping: asyncio.Event, *tasks: Awaitable[object]) -> None:
    """Until `stopping` is set, or one of `tasks` ends or raises, which it does for all."""
    running = [asyncio.ensure_future(task) for task in (*tasks, stopping.wait())]
    try:
        done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


def _calm_collector() -> None:
    """What was imported stays for ever: keep the collector from walking it during a step."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(COLLECT_AFTER, 20, 50)


async def _until_signal(main: Main, settings: Settings) -> None:
    stopping = Stopping()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stopping.set)
    loop.add_signal_handler(signal.SIGINT, stopping.set_for_good)
    await main(settings, stopping)
