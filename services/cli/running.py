"""Runs a cluster in the foreground until it is told to stop.

Invariants: the first SIGINT or SIGTERM stops in order, the second kills; a failure of the cluster
comes back as the Problem that it is, after everything was stopped.

Shell: signals.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from services.cli.output import ProgressLine
from services.models import catalog
from services.runtime.cluster import Cluster
from services.runtime.settings import Settings

T = TypeVar("T")


def prepare(settings: Settings) -> Settings:
    """Settings with the served name filled in, after the model was found, or pulled if known.

    Raises Problem if there is no such model; a stub worker needs none.
    """
    if settings.worker == "model":
        for entry in catalog.known():
            if entry.name == settings.model and not catalog.is_pulled(entry, settings.cache_path):
                catalog.pull(entry.name, ProgressLine("model").update, settings.cache_path)
        catalog.path(settings.model, settings.cache_path)
    if settings.served_name:
        return settings
    return settings.replace("the model's name", served_name=catalog.served_name(settings.model))


@asynccontextmanager
async def stop_signals(on_second: Callable[[], None]) -> AsyncIterator[asyncio.Event]:
    """An event set by the first SIGINT or SIGTERM; later ones call `on_second`."""
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()

    def on_signal() -> None:
        if stopping.is_set():
            on_second()
            return
        if sys.stderr.isatty():
            sys.stderr.write("\nstopping; Ctrl-C again to kill\n")
        stopping.set()

    numbers = (signal.SIGINT, signal.SIGTERM)
    for number in numbers:
        loop.add_signal_handler(number, on_signal)
    try:
        yield stopping
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


@asynccontextmanager
async def restart_signals() -> AsyncIterator[asyncio.Event]:
    """An event that each SIGUSR2 sets."""
    loop = asyncio.get_running_loop()
    asked = asyncio.Event()
    loop.add_signal_handler(signal.SIGUSR2, asked.set)
    try:
        yield asked
    finally:
        loop.remove_signal_handler(signal.SIGUSR2)


async def run_cluster(cluster: Cluster, work: Callable[[Cluster], Awaitable[T]]) -> T | None:
    """Start the cluster, do `work` on it, stop it: the result, or None if a signal came first.

    Raises Problem if the cluster does not start or fails meanwhile, after everything was stopped.
    """
    async with stop_signals(cluster.kill) as stopping:
        stopped = asyncio.ensure_future(stopping.wait())
        tasks: list[asyncio.Future[Any]] = [stopped]
        try:
            started = asyncio.ensure_future(cluster.start())
            tasks.append(started)
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if not started.done():
                return None
            started.result()
            failed = asyncio.ensure_future(cluster.wait())
            done = asyncio.ensure_future(work(cluster))
            tasks = [stopped, failed, done]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if done.done():
                return done.result()
            if failed.done():
                raise failed.result()
            return None
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            await cluster.stop()
