"""A plain connection to the bus, for commands that only listen.

Shell: the network.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

import nats
import nats.errors
from nats.aio.client import Client

from services.runtime.problem import Problem

CONNECT_TIMEOUT_S: Final = 3.0


@asynccontextmanager
async def connect(url: str) -> AsyncIterator[Client]:
    """A connection that is closed at the end. Raises Problem if no server answers."""

    async def ignore(_error: Exception) -> None:
        """The failure is told once, below; nats-py would print a traceback for each try."""

    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            client = await nats.connect(url, allow_reconnect=False, error_cb=ignore)
    except (TimeoutError, OSError, nats.errors.Error) as error:
        cause = f"{url}: {str(error) or 'no answer'}"
        raise Problem("E202", "Bus cannot be reached", cause=cause) from error
    try:
        yield client
    finally:
        await client.close()
