"""Ends work for a client that is gone, and all work when the gateway waits no longer.

Invariant: when the connection closes, or the gateway's patience is over, the work is cancelled at
once, whatever it waits for: a place in a queue, the first token, or a full send buffer.

Shell: watches the connection.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

from services.gateway.refusals import Refusal

T = TypeVar("T")


class ClientGone(Exception):
    """The client closed its connection; there is nobody to answer."""


class OpenWork:
    """What is being done for clients. refusal: what they are told where all of it was ended."""

    def __init__(self) -> None:
        self.refusal: Refusal | None = None
        self._tasks: set[asyncio.Future[Any]] = set()

    def add(self, task: asyncio.Future[Any]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        if self.refusal is not None:
            task.cancel()

    def end(self, refusal: Refusal) -> None:
        """Cancel everything, and whatever begins after this."""
        self.refusal = refusal
        for task in tuple(self._tasks):
            task.cancel()


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T], open_work: OpenWork) -> T:
    """The result of `work`. Raises ClientGone, or the Refusal of `open_work`, once the work has
    been cancelled and has ended.

    The request's body must have been read to its end before.
    """
    task = asyncio.ensure_future(work)
    open_work.add(task)
    watcher = asyncio.ensure_future(_gone(receive))
    watcher.add_done_callback(lambda _watcher: task.cancel())
    try:
        return await task
    except asyncio.CancelledError:
        if watcher.done() and not watcher.cancelled():
            raise ClientGone from None
        if open_work.refusal is not None:
            raise open_work.refusal from None
        raise
    finally:
        watcher.cancel()


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
