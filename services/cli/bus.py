"""A plain connection to the bus, for commands that only listen or ask.

Invariant: what the bus refuses to this user is told as such, not as silence.

Shell: the network.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

import nats.errors
from nats.aio.client import Client

from services.contracts.permissions import inbox_prefix
from services.runtime.bus import disconnect
from services.runtime.bus_url import user_of, without_password
from services.runtime.problem import Problem

CONNECT_TIMEOUT_S: Final = 3.0
_REFUSED: Final = "permissions violation"


@asynccontextmanager
async def connect(url: str) -> AsyncIterator[Client]:
    """A connection that is closed at the end.

    Raises Problem if no server answers, or if it has refused a subject to this user meanwhile.
    """
    refused: list[str] = []

    async def on_error(error: Exception) -> None:
        """Connection failures are told once, below; nats-py would print a traceback for each."""
        if _REFUSED in str(error).lower():
            refused.append(str(error))

    client = Client()
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            await client.connect(
                servers=url.split(","),
                allow_reconnect=False,
                error_cb=on_error,
                inbox_prefix=inbox_prefix(user_of(url)),
            )
    except (TimeoutError, OSError, nats.errors.Error) as error:
        await disconnect(client)
        cause = f"{without_password(url)}: {str(error) or 'no answer'}"
        raise Problem("E202", "Bus cannot be reached", cause=cause) from error
    try:
        yield client
    except Problem as problem:
        raise (_refusal(url, refused) if refused else problem) from problem
    finally:
        await disconnect(client)
    if refused:
        raise _refusal(url, refused)


def _refusal(url: str, refused: list[str]) -> Problem:
    return Problem(
        "E205",
        "Bus refuses this to its user",
        cause=f"{without_password(url)}, user {user_of(url) or 'without a name'}: {refused[0]}",
        fix="--nats nats://observer:PASSWORD@HOST:PORT; `up` writes it to RUN_DIR/bus/observer.url",
    )
