"""`python -m services.gateway`: the HTTP edge as a process.

Shell: settings, signals, sockets.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import sys
from pathlib import Path
from typing import Final

import uvloop

from services.gateway.api_keys import ApiKeys
from services.gateway.app import build_app
from services.gateway.guard import Guard
from services.gateway.mesh_link import MeshLink
from services.gateway.server import Server
from services.runtime import failpoints
from services.runtime.bus_url import is_loopback
from services.runtime.listener import listen, url_of
from services.runtime.log import (
    configure_logging,
    get_logger,
    report_fatal,
    report_leaving,
    report_ready,
)
from services.runtime.problem import Problem
from services.runtime.service import run_together
from services.runtime.settings import Settings, for_service

JOIN_TIMEOUT_S: Final = 2.0
"""Who can be served in a moment is better off in the queue; after that, he is told why not."""


async def run(settings: Settings, keys: ApiKeys | None, listener: socket.socket) -> None:
    """Serve until a signal. Without `keys` everybody is served."""
    if keys is None and not is_loopback(settings.http_host):
        get_logger("gateway").warning("open_to_others", host=settings.http_host)
    link = MeshLink(settings)
    app = Guard(build_app(link.gateway), keys, local=is_loopback(settings.http_host))
    server = Server(app, link.gateway, settings.http_drain_s)
    _catch_signals(server)
    url = url_of(listener)

    async def serve() -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(JOIN_TIMEOUT_S):
                await link.joined.wait()
        reporting = asyncio.create_task(report())
        try:
            await server.serve(sockets=[listener])
        finally:
            reporting.cancel()

    async def report() -> None:
        await server.listening.wait()
        await link.joined.wait()
        report_ready(http_url=url)

    try:
        await run_together(asyncio.Event(), serve(), link.run())
    finally:
        # It goes already: told once more, it must not end with a traceback instead.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})


def _catch_signals(server: Server) -> None:
    """SIGTERM: another one takes over. SIGINT: nobody does."""

    def leave() -> None:
        report_leaving()
        server.leave()

    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, leave)
    loop.add_signal_handler(signal.SIGINT, server.end)


def main() -> int:
    try:
        settings = for_service()
        failpoints.enable(settings)
        path = settings.api_key_file
        keys = ApiKeys(Path(path).expanduser()) if path else None
        if settings.http_fd < 0:
            listener = listen(settings.http_host, settings.http_port)
        else:
            listener = socket.socket(fileno=settings.http_fd)
        configure_logging("gateway", settings.log_level)
        uvloop.run(run(settings, keys, listener))
    except Problem as problem:
        report_fatal(problem.code, problem.cause, problem.fix)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
