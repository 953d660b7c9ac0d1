"""The bus as services see it: publish, subscribe, request, serve; core NATS underneath.

Invariants: a handler is synchronous and is called in the order of arrival per subscription; nothing
is buffered for later while the server is away (a plan that arrives after an outage is worse than
none); every queue is bounded, and what overflows is counted, not hidden.

Shell: owns the connection to nats-server.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

import nats
import nats.errors
import nats.micro
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.micro.request import Request as MicroRequest
from nats.micro.service import EndpointConfig, Service, ServiceConfig

from services.contracts.errors import StreetcarError
from services.contracts.permissions import inbox_prefix
from services.runtime.bus_url import user_of
from services.runtime.log import get_logger

PENDING_MESSAGES: Final = 65_536
PENDING_BYTES: Final = 128 * 1024 * 1024
PING_INTERVAL_S: Final = 2
MAX_PINGS_OUT: Final = 2
RECONNECT_WAIT_S: Final = 0.1
CONNECT_TIMEOUT_S: Final = 5
DRAIN_TIMEOUT_S: Final = 5
CLOSE_TIMEOUT_S: Final = 2.0
SERVICE_VERSION: Final = "1.0.0"
MAX_REASON_CHARS: Final = 300

# RuntimeError: what uvloop says of a connection that has just closed, before nats-py knows it.
_AWAY: Final = (
    nats.errors.OutboundBufferLimitError,
    nats.errors.ConnectionClosedError,
    RuntimeError,
)


class NoResponders(StreetcarError):
    """Nobody listens on the subject: the service is not there."""


class RequestTimeout(StreetcarError):
    """Somebody may listen, but no answer came in time."""


class PayloadTooLarge(StreetcarError):
    """The message is larger than the server takes."""

    def __init__(self, size: int, limit: int) -> None:
        super().__init__(f"a message of {size} bytes is over the bus limit of {limit} bytes")
        self.size = size
        self.limit = limit


@dataclass(frozen=True, slots=True)
class Delivery:
    """One message as it arrived. `headers` is empty where the sender set none."""

    subject: str
    payload: bytes
    reply: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)


Handler = Callable[[Delivery], None]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One subject that a service answers; `queue` empty means that every instance hears all."""

    name: str
    subject: str
    handler: Handler
    queue: str = ""


class Bus(Protocol):
    """What a service may do with the bus."""

    @property
    def max_payload(self) -> int: ...

    @property
    def dropped(self) -> Counter[str]: ...

    def new_inbox(self) -> str: ...

    async def publish(
        self,
        subject: str,
        payload: bytes,
        *,
        reply: str = "",
        headers: dict[str, str] | None = None,
    ) -> bool: ...

    async def subscribe(self, subject: str, handler: Handler, *, queue: str = "") -> None: ...

    async def serve(self, name: str, description: str, endpoints: Sequence[Endpoint]) -> None: ...

    async def leave(self, queue: str) -> None: ...

    async def request(self, subject: str, payload: bytes, *, timeout_s: float) -> bytes: ...

    async def close(self) -> None: ...


class NatsBus:
    """A Bus over one nats-py connection.

    on_change: called with True after each (re)connection and with False when the server is lost.
    """

    def __init__(self, name: str, on_change: Callable[[bool], None] | None = None) -> None:
        self._name = name
        self._client = Client()
        self._services: list[Service] = []
        self._on_change = on_change
        self._log = get_logger("bus")
        self.dropped: Counter[str] = Counter()

    async def connect(self, url: str) -> None:
        """Raises nats.errors.Error or OSError where no server answers at `url` in time."""
        await self._client.connect(
            servers=url.split(","),
            name=self._name,
            inbox_prefix=inbox_prefix(user_of(url)),
            pending_size=0,
            ping_interval=PING_INTERVAL_S,
            max_outstanding_pings=MAX_PINGS_OUT,
            reconnect_time_wait=RECONNECT_WAIT_S,  # type: ignore[arg-type]
            max_reconnect_attempts=-1,
            connect_timeout=CONNECT_TIMEOUT_S,
            drain_timeout=DRAIN_TIMEOUT_S,
            allow_reconnect=True,
            error_cb=self._on_error,
            disconnected_cb=self._on_disconnected,
            reconnected_cb=self._on_reconnected,
        )

    @property
    def max_payload(self) -> int:
        return int(self._client.max_payload)

    @property
    def client(self) -> Client:
        return self._client

    def new_inbox(self) -> str:
        """A subject that only this connection listens on, as do subjects below it."""
        return str(self._client.new_inbox())

    async def publish(
        self,
        subject: str,
        payload: bytes,
        *,
        reply: str = "",
        headers: dict[str, str] | None = None,
    ) -> bool:
        """True where the message was handed to the connection; False where it is away and the
        message is dropped.
        """
        if len(payload) > self.max_payload:
            raise PayloadTooLarge(len(payload), self.max_payload)
        try:
            await self._client.publish(subject, payload, reply=reply, headers=headers)
        except _AWAY:
            self.dropped["publish_disconnected"] += 1
            return False
        return True

    async def subscribe(self, subject: str, handler: Handler, *, queue: str = "") -> None:
        async def deliver(message: Msg) -> None:
            handler(_delivery(message))

        await self._client.subscribe(
            subject,
            queue=queue,
            cb=deliver,
            pending_msgs_limit=PENDING_MESSAGES,
            pending_bytes_limit=PENDING_BYTES,
        )

    async def serve(self, name: str, description: str, endpoints: Sequence[Endpoint]) -> None:
        """Answer `endpoints`, and `$SRV.PING`, `INFO` and `STATS` for them (ADR-32)."""
        service = await nats.micro.add_service(
            self._client,
            ServiceConfig(
                name=name,
                version=SERVICE_VERSION,
                description=description,
                metadata={"instance": self._name},
            ),
        )
        for endpoint in endpoints:
            await service.add_endpoint(
                EndpointConfig(
                    name=endpoint.name,
                    subject=endpoint.subject,
                    handler=_micro_handler(endpoint.handler),
                    queue_group=endpoint.queue or self._name,
                )
            )
        self._services.append(service)

    async def leave(self, queue: str) -> None:
        """Take no more of what is shared out in `queue`; what has been delivered is handled before
        this returns.
        """
        # Endpoints of a service hold their subscriptions as closely as the client does.
        members = [s for s in self._client._subs.values() if s.queue == queue]
        await asyncio.gather(*(_quietly(member.drain()) for member in members))  # type: ignore[no-untyped-call]

    async def request(self, subject: str, payload: bytes, *, timeout_s: float) -> bytes:
        """Raises NoResponders at once where nobody listens, RequestTimeout after `timeout_s`."""
        if len(payload) > self.max_payload:
            raise PayloadTooLarge(len(payload), self.max_payload)
        try:
            answer = await self._client.request(subject, payload, timeout=timeout_s)
        except nats.errors.NoRespondersError:
            raise NoResponders(f"nobody answers on {subject}") from None
        except (TimeoutError, nats.errors.TimeoutError):
            raise RequestTimeout(f"no answer on {subject} within {timeout_s:g} s") from None
        except _AWAY:
            self.dropped["request_disconnected"] += 1
            raise RequestTimeout(f"the bus is away; {subject} was not asked") from None
        return bytes(answer.data)

    async def flush(self) -> None:
        """Wait until the server has seen everything sent so far; for the end of a start, never in
        the step loop.
        """
        await self._client.flush(timeout=CONNECT_TIMEOUT_S)

    async def close(self) -> None:
        """Stop answering, let queued handlers run, send what is pending, disconnect."""
        for service in self._services:
            await _quietly(service.stop())
        if self._client.is_connected:
            await _quietly(self._client.drain())
        await disconnect(self._client)

    async def _on_error(self, error: Exception) -> None:
        kind = type(error).__name__
        self.dropped[kind] += 1
        if isinstance(error, nats.errors.SlowConsumerError):
            self._log.error("slow_consumer", subject=error.subject)
        elif not isinstance(error, ConnectionError):
            # nats-py has no class of its own for what the server refuses.
            self._log.warning("bus_error", kind=kind, reason=str(error)[:MAX_REASON_CHARS])

    async def _on_disconnected(self) -> None:
        if self._on_change is not None and not self._client.is_closed:
            self._on_change(False)

    async def _on_reconnected(self) -> None:
        if self._on_change is not None:
            self._on_change(True)


def _delivery(message: Msg) -> Delivery:
    return Delivery(message.subject, message.data, message.reply, message.headers or {})


def _micro_handler(handler: Handler) -> Callable[[MicroRequest], Awaitable[None]]:
    async def handle(request: MicroRequest) -> None:
        handler(_delivery(request._msg))

    return handle


async def disconnect(client: Client) -> None:
    """Close, whatever the server says. nats-py waits without a bound for what is still to be sent,
    and a server that is stopped takes nothing.
    """
    try:
        async with asyncio.timeout(CLOSE_TIMEOUT_S):
            await client.close()
    except (TimeoutError, nats.errors.Error, OSError, RuntimeError):
        return


async def _quietly(ending: Awaitable[object]) -> None:
    """Closing goes on whatever one part of it says."""
    try:
        await ending
    except (nats.errors.Error, OSError, RuntimeError):
        return
