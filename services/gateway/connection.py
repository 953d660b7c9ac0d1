"""One HTTP connection: how long a head, and in how many pieces a body, may be; and its last answer.

Invariants: whatever is wrong with a request, its client reads a JSON error before the connection
ends; nobody keeps a connection without a whole request for longer than HEAD_TIMEOUT_S, nor makes
the parser work for longer than its bytes are worth; a client's end is noticed whatever it sent
before.

Shell: a connection.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any, Final

import h11
import uvicorn
from uvicorn.protocols.http.flow_control import CLOSE_HEADER
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle
from uvicorn.server import ServerState

from services.contracts.errors import ErrorCode
from services.gateway.refusals import JSON, Refusal

MAX_HEADERS: Final = 128
MAX_HEAD_BYTES: Final = 32 * 1024
"""Request target and headers."""

HEAD_TIMEOUT_S: Final = 10.0
"""For a head to arrive in: from the connection's begin, or from its first byte on a used one."""

IDLE_GRACE_S: Final = 1.0
"""For a request that is on its way while the gateway begins to leave."""

LINGER_S: Final = 2.0
"""For a client that still sends to read why it is refused; a reset would take that from it."""

MAX_CHUNKS: Final = 4096
CHUNK_BYTES: Final = 256
"""A body may have MAX_CHUNKS chunks, and one more for every CHUNK_BYTES of it. A chunk costs the
parser at least 6 µs, whatever is in it: at the bound 26 ms of processor time for 4,096 of one byte,
0.24 s for 8 MiB (2 cores of a shared AMD EPYC, Zen 4).
"""

HEAD_TOO_LARGE: Final = 431
REQUEST_TIMEOUT: Final = 408


class Parser(h11.Connection):
    """h11's parser of a server, with a bound on the number of chunks."""

    def __init__(self) -> None:
        super().__init__(h11.SERVER, MAX_HEAD_BYTES)
        self._num_chunks = 0
        self._num_bytes = 0

    def next_event(self) -> Any:
        """As h11's. Raises RemoteProtocolError also for a body in too many chunks."""
        event = super().next_event()
        if isinstance(event, h11.Data):
            self._num_bytes += len(event.data)
            self._num_chunks += event.chunk_end
            if self._num_chunks > MAX_CHUNKS + self._num_bytes // CHUNK_BYTES:
                raise h11.RemoteProtocolError("the body comes in too many small chunks")
        elif isinstance(event, h11.Request):
            self._num_chunks = self._num_bytes = 0
        return event


class HttpConnection(H11Protocol):
    """uvicorn's protocol over h11, with time limits and answers of ours."""

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.conn = Parser()
        self._head_timer: asyncio.TimerHandle | None = None
        self._refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch_head()

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        super().data_received(data)
        if self._refused:
            return
        self._watch_head()
        early = self.flow.read_paused and self.conn.their_state is h11.DONE
        if early and self._num_waiting <= MAX_HEAD_BYTES:
            # The next request may wait here; but of whom nothing is read, no end is seen.
            self.flow.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget_head()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Called while the parser's exception is being handled."""
        error = sys.exception()
        assert isinstance(error, h11.RemoteProtocolError)
        if error.error_status_hint == HEAD_TOO_LARGE:
            self._refuse(head_too_large())
        else:
            self._refuse(Refusal(400, ErrorCode.INVALID_REQUEST.value, f"no valid HTTP: {error}"))

    def drain(self) -> None:
        """No request after the one that is being answered, or is on its way."""
        if not self._answers:
            self.loop.call_later(IDLE_GRACE_S, self._end_idle)
            return
        self.cycle.keep_alive = False
        if not self.cycle.response_started:
            self.cycle.default_headers = [*self.cycle.default_headers, CLOSE_HEADER]

    def abort(self) -> None:
        """Cut it, whatever is being said."""
        self.transport.abort()

    @property
    def _answers(self) -> bool:
        """Whether a request has come whose answer has not ended."""
        cycle: RequestResponseCycle | None = self.cycle
        return cycle is not None and not cycle.response_complete

    @property
    def _num_waiting(self) -> int:
        """Bytes that are here and belong to no request yet."""
        return len(self.conn.trailing_data[0])

    def _end_idle(self) -> None:
        if not (self._answers or self._num_waiting or self.transport.is_closing()):
            self.transport.close()

    def _watch_head(self) -> None:
        """The time for a head runs while nothing is being answered, also where the rest of a body
        still comes; it is not given anew for every byte.
        """
        if self._answers:
            self._forget_head()
        elif self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._head_is_late)

    def _forget_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        if self._num_waiting:
            message = f"the head of the request has not arrived within {HEAD_TIMEOUT_S:g} s"
            self._refuse(Refusal(REQUEST_TIMEOUT, "request_timeout", message))
        else:
            self.transport.close()

    def _refuse(self, refusal: Refusal) -> None:
        """The last answer of this connection; where one has begun, that one ends here."""
        self._refused = True
        self._forget_head()
        if self.cycle is not None:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state not in {h11.IDLE, h11.SEND_RESPONSE}:
            self.transport.close()
            return
        body = refusal.event()
        headers = [("content-type", JSON), ("content-length", str(len(body)))]
        response = h11.Response(
            status_code=refusal.status, headers=[*headers, ("connection", "close")]
        )
        for event in (response, h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.write_eof()
        self.flow.resume_reading()
        self.loop.call_later(LINGER_S, self.transport.abort)


def head_too_large() -> Refusal:
    message = f"a request may have {MAX_HEADERS} headers and {MAX_HEAD_BYTES} bytes of them"
    return Refusal(HEAD_TOO_LARGE, "headers_too_large", message)
