"""The HTTP server of the gateway, and how it leaves.

Invariants: a gateway that is replaced accepts nothing new and serves what it has to its end, for
`drain_s` at most; what is open then ends with an error that says so; who is told to stop for good
waits END_S for it.

    leave (SIGTERM) ─▶ draining ─▶ all answered, or drain_s have passed ─▶ gone
    end (SIGINT) ─▶ ending ─▶ all answered, or END_S have passed ─▶ gone

Shell: sockets, the clock.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from typing import Final

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.flow_control import CLOSE_HEADER

from services.contracts.errors import ErrorCode
from services.gateway.connection import HttpConnection
from services.gateway.refusals import Refusal
from services.gateway.serving import Gateway
from services.runtime.listener import BACKLOG

KEEP_ALIVE_S: Final = 75
"""Longer than usual clients keep idle connections, so that they close first."""

END_S: Final = 3.0
LAST_WORDS_S: Final = 1.0
"""Together below what a supervisor waits for a service that it stops for good."""
_POLL_S: Final = 0.05


class Server(uvicorn.Server):
    """uvicorn's, with an end of ours. listening: set once it accepts."""

    def __init__(self, app: ASGIApp, gateway: Gateway, drain_s: float) -> None:
        super().__init__(_config(app))
        self.listening = asyncio.Event()
        self._gateway = gateway
        self._drain_s = drain_s
        self._ended = asyncio.Event()

    def leave(self) -> None:
        """Another one takes what is new; this one serves what it has."""
        self._gateway.draining = True
        self.should_exit = True

    def end(self) -> None:
        """Nobody takes what is new."""
        self._gateway.draining = self._gateway.ending = True
        self.should_exit = True
        self._ended.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """They are caught elsewhere, so that a stop exits with 0."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop accepting, wait for what is open, and cut the rest."""
        for server in self.servers:
            server.close()
        for listener in sockets or ():
            listener.close()
        # For requests that were on their way.
        headers = self.server_state.default_headers
        self.server_state.default_headers = [*headers, CLOSE_HEADER]
        for connection in self._connections():
            connection.drain()
        closed = asyncio.create_task(self._until_closed())
        ended = asyncio.create_task(self._ended.wait())
        try:
            await asyncio.wait(
                {closed, ended}, timeout=self._drain_s, return_when=asyncio.FIRST_COMPLETED
            )
            if self._ended.is_set():
                await asyncio.wait({closed}, timeout=END_S)
            if not closed.done():
                self._gateway.open_work.end(self._cut())
                await asyncio.wait({closed}, timeout=LAST_WORDS_S)
        finally:
            closed.cancel()
            ended.cancel()
        for connection in self._connections():
            connection.abort()

    def _cut(self) -> Refusal:
        limit_s = END_S if self._ended.is_set() else self._drain_s
        message = f"the gateway is stopping, and this request was open for {limit_s:g} s after that"
        return Refusal(503, ErrorCode.DRAINING.value, message)

    def _connections(self) -> list[HttpConnection]:
        return [c for c in self.server_state.connections if isinstance(c, HttpConnection)]

    async def _until_closed(self) -> None:
        """uvicorn keeps both sets, and says nothing of their changes."""
        while True:
            if not self.server_state.connections and not self.server_state.tasks:
                return
            await asyncio.sleep(_POLL_S)


def _config(app: ASGIApp) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=HttpConnection,
        log_config=None,
        log_level="warning",
        access_log=False,
        lifespan="off",
        ws="none",
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        backlog=BACKLOG,
    )
