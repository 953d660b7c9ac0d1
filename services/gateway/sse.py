"""Server-sent events, as the OpenAI interface streams its chunks.

Invariants: an event is sent as soon as it is there and is never joined with another; the generator
of events is closed when the client goes away, takes nothing for too long, or the stream ends; a
stream that the gateway itself cuts ends with an event that says so.

Shell: writes to the connection.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Final

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from services.gateway.disconnect import ClientGone, OpenWork, unless_gone
from services.gateway.refusals import Refusal

SLOW_READER_S: Final = 10.0
"""For one event, with all buffers full: as long as the bus itself waits for a slow receiver."""

LAST_WORDS_S: Final = 1.0
"""For the end of a stream that is cut: the process is about to go."""

DONE: Final = b"data: [DONE]\n\n"


def event(data: bytes) -> bytes:
    """`data`, one line of JSON, as an event."""
    return b"data: " + data + b"\n\n"


class EventStream(Response):
    """Sends `first` and then what `events` yields, all framed by `event`.

    on_slow: called where the client's connection takes nothing any more.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        first: bytes,
        events: AsyncGenerator[bytes, None],
        on_slow: Callable[[], None],
        open_work: OpenWork,
    ) -> None:
        # Proxies may not keep events to send them together later.
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._first = first
        self._events = events
        self._on_slow = on_slow
        self._open_work = open_work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with aclosing(self._events):
                start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
                await send(start)
                try:
                    await unless_gone(receive, self._send(send), self._open_work)
                except TimeoutError:
                    self._on_slow()
        except Refusal as refusal:
            with contextlib.suppress(OSError):
                await _send_bodies(send, event(refusal.event()), DONE, b"")
        except (ClientGone, OSError):
            # Nobody reads any more; closing the events cancels the generations.
            return

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.body", "body": self._first, "more_body": True})
        async for data in self._events:
            async with asyncio.timeout(SLOW_READER_S):
                await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _send_bodies(send: Send, *parts: bytes) -> None:
    """All of `parts`, the last one as the end. Raises TimeoutError where nobody takes them."""
    for number, part in enumerate(parts, start=1):
        async with asyncio.timeout(LAST_WORDS_S):
            more = number < len(parts)
            await send({"type": "http.response.body", "body": part, "more_body": more})
