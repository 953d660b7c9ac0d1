"""`python -m services.gateway`: the HTTP edge as a process.

Shell: settings, signals, sockets.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import uvicorn
import uvloop
from starlette.types import ASGIApp

from services.client import DEFAULT_URL, Client, StreetcarClientError
from services.contracts.beats import Beat, ServiceKind
from services.contracts.codec import Decoder, encode
from services.contracts.errors import WireError
from services.contracts.limits import BEAT_PERIOD_MS
from services.contracts.permissions import inbox_prefix
from services.contracts.subjects import Subjects
from services.gateway.api_keys import ApiKeys
from services.gateway.app import build_app
from services.gateway.guard import MAX_HEAD_BYTES, Guard
from services.gateway.mesh_view import MeshView
from services.gateway.serving import Gateway
from services.runtime import failpoints
from services.runtime.bus import Delivery, Handler, NatsBus
from services.runtime.bus_url import is_loopback, user_of
from services.runtime.log import configure_logging, get_logger, report_fatal, report_ready
from services.runtime.problem import Problem
from services.runtime.settings import Settings, for_service
from services.runtime.telemetry.sharing import telemetry

DRAIN_TIMEOUT_S: Final = 4
"""Below the time that a supervisor gives before it kills."""

KEEP_ALIVE_S: Final = 75
"""Longer than usual clients keep idle connections, so that they close first."""

FIRST_FRAME_TIMEOUT_S: Final = 120.0
NEXT_FRAME_TIMEOUT_S: Final = 300.0
BACKLOG: Final = 2048
SEND_BUFFER_BYTES: Final = 512 * 1024


class _Server(uvicorn.Server):
    """Reports readiness once it listens; leaves the signals to us, so that a stop exits with 0."""

    def __init__(self, config: uvicorn.Config, gateway: Gateway, url: str) -> None:
        super().__init__(config)
        self._gateway = gateway
        self._url = url

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        report_ready(http_url=self._url)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def stop(self) -> None:
        """Finish what has begun; a second call gives that up."""
        self.force_exit = self.should_exit
        self.should_exit = True
        self._gateway.draining = True


async def run(settings: Settings, keys: ApiKeys | None) -> int:
    """Serve until a signal; the exit status. Without `keys` everybody is served."""
    if keys is None and not is_loopback(settings.http_host):
        get_logger("gateway").warning("open_to_others", host=settings.http_host)
    try:
        listener = _listen(settings.http_host, settings.http_port)
    except OSError as error:
        address = f"{settings.http_host}:{settings.http_port}"
        taken = error.errno == errno.EADDRINUSE
        fix = "--http-port 0 picks a free one" if taken else "--http-host 127.0.0.1"
        report_fatal("E410", f"cannot listen on {address}: {error.strerror or error}", fix)
        return 1
    nats_url = settings.nats_url or DEFAULT_URL
    client = Client(
        nats_url,
        prefix=settings.subject_prefix,
        inbox_prefix=inbox_prefix(user_of(nats_url)),
        first_frame_timeout_s=FIRST_FRAME_TIMEOUT_S,
        next_frame_timeout_s=NEXT_FRAME_TIMEOUT_S,
    )
    try:
        async with client:
            await _serve(settings.replace("default", nats_url=nats_url), client, listener, keys)
    except StreetcarClientError as error:
        get_logger("gateway").error("no_bus", reason=error.message)
        return 1
    return 0


async def _serve(
    settings: Settings, client: Client, listener: socket.socket, keys: ApiKeys | None
) -> None:
    subjects = Subjects(settings.subject_prefix)
    view = MeshView()
    bus = NatsBus(settings.gateway_id)
    await bus.connect(settings.nats_url)
    hear = _beat_handler(view)
    for kind in (ServiceKind.SCHEDULER, ServiceKind.ADMISSION):
        await bus.subscribe(subjects.any_beat(kind.value), hear)
    await bus.serve("streetcar-gateway", "Streetcar: the OpenAI-compatible HTTP edge", [])
    traces = telemetry(settings, ServiceKind.GATEWAY, settings.gateway_id)
    await traces.join(bus, subjects)
    gateway = Gateway(client, view, body_limit=client.max_payload, recorder=traces.recorder)
    host, port = listener.getsockname()[:2]
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    app = Guard(build_app(gateway), keys, local=is_loopback(settings.http_host))
    server = _Server(_config(app), gateway, url)
    loop = asyncio.get_running_loop()
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signal_number, server.stop)
    beating = asyncio.create_task(_beat(bus, subjects, settings.gateway_id))
    sharing = asyncio.create_task(traces.share_forever())
    try:
        await server.serve(sockets=[listener])
    finally:
        beating.cancel()
        sharing.cancel()
        await traces.close()
        await bus.close()


def _config(app: ASGIApp) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http="h11",
        h11_max_incomplete_event_size=MAX_HEAD_BYTES,
        log_config=None,
        log_level="warning",
        access_log=False,
        lifespan="off",
        ws="none",
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=DRAIN_TIMEOUT_S,
        backlog=BACKLOG,
    )


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # Connections inherit it: what a reader that does not read can pile up in the system.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    listener.bind((host, port))
    return listener


def _beat_handler(view: MeshView) -> Handler:
    decoder = Decoder(Beat)
    log = get_logger("gateway")

    def hear(delivery: Delivery) -> None:
        try:
            view.hear(decoder.decode(delivery.payload), time.monotonic_ns())
        except WireError as error:
            log.warning("bad_beat", subject=delivery.subject, reason=str(error))

    return hear


async def _beat(bus: NatsBus, subjects: Subjects, gateway_id: str) -> None:
    kind = ServiceKind.GATEWAY
    payload = encode(Beat(kind, gateway_id))
    while True:
        await bus.publish(subjects.beat(kind.value, gateway_id), payload)
        await asyncio.sleep(BEAT_PERIOD_MS / 1000)


def main() -> int:
    try:
        settings = for_service()
        failpoints.enable(settings)
        path = settings.api_key_file
        keys = ApiKeys(Path(path).expanduser()) if path else None
    except Problem as problem:
        report_fatal(problem.code, problem.cause, problem.fix)
        return 1
    configure_logging("gateway", settings.log_level)
    return uvloop.run(run(settings, keys))


if __name__ == "__main__":
    sys.exit(main())
