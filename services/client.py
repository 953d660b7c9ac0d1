"""The public client: publish a request on a NATS subject, get a stream of tokens.

Copy this file into a program of your own; it needs `nats-py` and `msgpack`, nothing else.

    async with Client("nats://127.0.0.1:4222") as client:
        async for frame in client.generate("smollm2-135m", prompt="Hi", max_tokens=20):
            show(frame["text"])

A `Client(..., on_span=spans.append)` makes an OpenTelemetry span of every request, the root of its
trace in the mesh or the child of the caller's; it leaves no program by itself.

Invariants: every token of an answer comes once and in order, whatever dies meanwhile (what is
missing is asked for again, what is known is trimmed); a generator that is closed early cancels its
request; nothing is waited for without an end.

    generate ─▶ frames ─▶ the last one
        │ silence of a second, a gap, a new connection ─▶ resume.<request_id>, from what we have
        └ nobody answers that three times ─▶ generate again, as a retry with the same id and seed

Shell: owns one connection to the bus.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import re
import secrets
import time
import uuid
from collections.abc import AsyncGenerator, Callable
from typing import Any, Final, Self

import msgpack
import nats.errors
from nats.aio.client import Client as Connection
from nats.aio.msg import Msg

DEFAULT_URL: Final = "nats://127.0.0.1:4222"
CONNECT_TIMEOUT_S: Final = 5.0
CLOSE_TIMEOUT_S: Final = 2.0
"""What is still to be sent at the end waits so long for a server that takes nothing."""
MAX_QUEUED_FRAMES: Final = 4096
"""Of one request; a reader that is further behind is too slow for its stream."""

ASK_AFTER_S: Final = 1.0
MAX_ASK_AFTER_S: Final = 8.0
"""While the request is somebody's and nothing is new, it is asked for more and more rarely."""

UNANSWERED: Final = 3
RETRY_AFTER_S: Final = 0.25
ABSENCE_S: Final = 10.0
"""A mesh that has answered before is waited for so long: its services may be starting again."""

Frame = dict[str, Any]
Span = dict[str, Any]
_TRACEPARENT: Final = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")
_ASKED: Final = ("max_tokens", "temperature", "top_p", "top_k", "seed")
_ID: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")


class StreetcarClientError(Exception):
    """A request failed. `message` is for a person, `status` is that of HTTP."""

    def __init__(self, code: str, message: str, status: int) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message
        self.status = status


class Client:
    """A connection to the mesh. Any number of requests may run on it at once."""

    def __init__(
        self,
        url: str = DEFAULT_URL,
        *,
        prefix: str = "streetcar.v1",
        inbox_prefix: str = "_INBOX",
        first_frame_timeout_s: float = 120.0,
        next_frame_timeout_s: float = 120.0,
        on_span: Callable[[Span], None] | None = None,
    ) -> None:
        """inbox_prefix: first token of the inboxes that the bus lets this user read.

        A request ends with `timeout` where nothing new comes for so long. on_span: is given the
        span of each request when that has ended (`RequestSpan.end`), and must not raise.
        """
        self.first_frame_timeout_s = first_frame_timeout_s
        self.next_frame_timeout_s = next_frame_timeout_s
        self.prefix = prefix
        self.inbox = ""
        self.answered: set[str] = set()
        self._on_span = on_span
        self._url = url
        self._inbox_prefix = inbox_prefix
        self._connection = Connection()
        self._numbers = itertools.count(1)
        self._calls: dict[str, _Call] = {}

    async def __aenter__(self) -> Self:
        """Connect. Raises StreetcarClientError where no server answers."""
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await self._connection.connect(
                    servers=self._url.split(","),
                    inbox_prefix=self._inbox_prefix,
                    max_reconnect_attempts=-1,
                    reconnect_time_wait=RETRY_AFTER_S,  # type: ignore[arg-type]
                    ping_interval=2,
                    max_outstanding_pings=2,
                    pending_size=0,  # a request that waits out an outage comes too late
                    error_cb=_ignore,
                    reconnected_cb=self._reconnected,
                )
        except (TimeoutError, OSError, nats.errors.Error) as error:
            await self.__aexit__()
            # What comes before the host may be a password.
            message = f"no nats-server answers at {self._url.rpartition('@')[2]}"
            raise StreetcarClientError("no_server", message, 503) from error
        self.inbox = self._connection.new_inbox()
        await self._connection.subscribe(f"{self.inbox}.*", cb=self._deliver)
        return self

    async def __aexit__(self, *_exc: object) -> None:
        with contextlib.suppress(TimeoutError, OSError, nats.errors.Error, RuntimeError):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._connection.close()

    @property
    def max_payload(self) -> int:
        """Bytes that the server takes in one message."""
        return int(self._connection.max_payload)

    async def generate(
        self,
        model: str,
        *,
        request_id: str | None = None,
        traceparent: str | None = None,
        tracestate: str | None = None,
        **fields: Any,
    ) -> AsyncGenerator[Frame, None]:
        """Frames of one answer: `text`, `token_ids` ...; the last has `finish_reason` and `usage`.

        fields: `prompt`, `prompt_token_ids` or `messages`; `max_tokens`, `temperature`, `stop` ...
        Close the generator (`contextlib.aclosing`) to stop early. Raises StreetcarClientError.
        """
        request = {"request_id": request_id or uuid.uuid4().hex, **fields}
        if request.get("seed") is None:
            # Drawn here, so that a retry is the same request and gets the same tokens.
            request["seed"] = secrets.randbits(63)
        on_span = self._on_span if _is_sampled(traceparent) else None
        span = RequestSpan(model, request, traceparent, tracestate)
        traceparent = span.traceparent if on_span else traceparent
        trace = {"traceparent": traceparent, "tracestate": tracestate}
        headers = {name: value for name, value in trace.items() if value} or None
        number = str(next(self._numbers))
        call = self._calls[number] = _Call(self, model, request, number, headers)
        finished = False
        try:
            await call.send()
            while not finished:
                frame = await call.next()
                finished = frame["finish_reason"] is not None
                span.see(frame)
                yield frame
        except StreetcarClientError as error:
            # What the mesh itself has ended needs no cancel.
            finished = error.code not in {"slow_client", "timeout"}
            span.error = error.code
            raise
        finally:
            del self._calls[number]
            if on_span is not None:
                on_span(span.end(call.num_sent, call.num_resumes))
            if not finished:
                await self.cancel(request["request_id"])

    async def cancel(self, request_id: str) -> None:
        """Stop a request, wherever it is; one that is not known (yet) will not start either."""
        with contextlib.suppress(nats.errors.Error):
            await self.publish(f"cancel.{request_id}", b"")

    async def publish(self, subject: str, payload: bytes, **more: Any) -> None:
        """To `subject` below the prefix. Raises nats.errors.Error where the bus is away."""
        try:
            await self._connection.publish(f"{self.prefix}.{subject}", payload, **more)
        except RuntimeError as error:
            # What uvloop says of a connection that has just closed, before nats-py knows it.
            raise nats.errors.ConnectionClosedError from error

    async def _deliver(self, message: Msg) -> None:
        call = self._calls.get(message.subject.rpartition(".")[2])
        if call is not None and call.put(message):
            await self.cancel(call.request_id)

    async def _reconnected(self) -> None:
        for call in self._calls.values():
            call.ask_now()


class _Call:
    """One request: what came of it, and when to ask for more."""

    def __init__(
        self,
        client: Client,
        model: str,
        request: Frame,
        number: str,
        headers: dict[str, str] | None,
    ) -> None:
        self.request_id: str = request["request_id"]
        self._client = client
        self._model = model
        self._request = request
        self._inbox = f"{client.inbox}.{number}"
        self._headers = headers
        self._queue: asyncio.Queue[Msg | None] = asyncio.Queue(MAX_QUEUED_FRAMES)
        self._received = Received()
        self.num_sent = 0
        self.num_resumes = 0
        self._slow = False
        self._unanswered = 0
        self._pause_s = ASK_AFTER_S
        self._asked_s = self._new_s = time.monotonic()
        self._absent_s = 0.0

    def put(self, message: Msg) -> bool:
        """-> True where it is one more than may wait: the reader is too slow."""
        if self._slow:
            return False
        self._slow = self._queue.full()
        if not self._slow:
            self._queue.put_nowait(message)
        return self._slow

    def ask_now(self) -> None:
        """The connection is new: what was published meanwhile is lost."""
        self._unanswered = max(self._unanswered, UNANSWERED - 1)
        if not self._queue.full():
            self._queue.put_nowait(None)

    async def send(self, *, retry: bool = False) -> None:
        # Both names become tokens of a subject.
        if not _ID.fullmatch(self._model):
            raise StreetcarClientError("model_not_found", f"no model {self._model[:80]!r}", 404)
        if not _ID.fullmatch(self.request_id):
            message = f"request_id must match {_ID.pattern}"
            raise StreetcarClientError("invalid_request", message, 400)
        request = self._request | {"retry": True} if retry else self._request
        try:
            payload: bytes = msgpack.packb(request)
        except (TypeError, ValueError, OverflowError) as error:
            message = f"the request cannot be written as MessagePack: {error}"
            raise StreetcarClientError("invalid_request", message, 400) from None
        if len(payload) > self._client.max_payload:
            message = (
                f"the request has {len(payload)} bytes, the bus takes {self._client.max_payload}"
            )
            raise StreetcarClientError("payload_too_large", message, 413)
        subject = f"generate.{self._model}"
        self.num_sent += 1
        try:
            await self._client.publish(subject, payload, reply=self._inbox, headers=self._headers)
        except nats.errors.Error as error:
            if not retry:
                message = f"the bus is away ({type(error).__name__})"
                raise StreetcarClientError("no_server", message, 503) from error

    async def next(self) -> Frame:
        """The next frame with something new, or the last one."""
        while True:
            message = await self._wait()
            if self._slow and self._queue.empty():
                text = f"the reader is {MAX_QUEUED_FRAMES} frames behind"
                raise StreetcarClientError("slow_client", text, 499)
            if message is None:
                await self._ask()
                continue
            frame = await self._read(message)
            if frame is not None:
                return frame

    async def _wait(self) -> Msg | None:
        """The next message, or None where it is time to ask. Raises at the end of patience."""
        if not self._queue.empty():
            return self._queue.get_nowait()
        client = self._client
        begun = self._received.num_tokens > 0
        patience_s = client.next_frame_timeout_s if begun else client.first_frame_timeout_s
        left_s = self._new_s + patience_s - time.monotonic()
        if left_s <= 0:
            raise StreetcarClientError("timeout", f"nothing new for {patience_s:g} s", 504)
        try:
            async with asyncio.timeout(min(left_s, self._pause_s)):
                return await self._queue.get()
        except TimeoutError:
            return None

    async def _ask(self) -> None:
        """Who has our request? The owner answers with frames; where nobody does, send it again."""
        self._asked_s = time.monotonic()
        if self._unanswered >= UNANSWERED:
            self._unanswered = 0
            await self.send(retry=True)
            return
        self._unanswered += 1
        self.num_resumes += 1
        payload = msgpack.packb({"offset": self._received.num_tokens})
        with contextlib.suppress(nats.errors.Error):
            await self._client.publish(f"resume.{self.request_id}", payload)

    async def _read(self, message: Msg) -> Frame | None:
        """The frame where it has something new, or is the last; raises for one that is an error."""
        headers = message.headers or {}
        if not message.data and headers.get("Status") == "503":
            text = f"nobody serves {self._model!r}"
            self._absent(StreetcarClientError("no_worker", text, 503))
            return None
        frame: Frame = msgpack.unpackb(message.data)
        if error := frame.get("error"):
            status = int(headers.get("Nats-Service-Error-Code", "500"))
            problem = StreetcarClientError(error["code"], error["message"], status)
            if problem.code == "draining" and not self._received.num_tokens:
                # That admission is leaving; another one is there, or comes.
                self._absent(problem)
                return None
            raise problem
        self._client.answered.add(self._model)
        self._unanswered, self._absent_s = 0, 0.0
        new = self._received.trim(frame)
        if new is None:
            # Frames before it were lost; those that follow, too, until the owner has heard.
            if time.monotonic() - self._asked_s > RETRY_AFTER_S:
                await self._ask()
            return None
        if not new and frame["finish_reason"] is None:
            self._pause_s = min(2 * self._pause_s, MAX_ASK_AFTER_S)
            return None
        self._pause_s, self._new_s = ASK_AFTER_S, time.monotonic()
        return frame

    def _absent(self, problem: StreetcarClientError) -> None:
        """Nobody took it. Where the mesh has answered before, it is sent again in a moment."""
        now_s = time.monotonic()
        self._absent_s = self._absent_s or now_s
        if self._model not in self._client.answered or now_s - self._absent_s > ABSENCE_S:
            raise problem
        self._unanswered, self._pause_s = UNANSWERED, RETRY_AFTER_S


class Received:
    """What the reader has. starts: by frame offset, how many characters came before that frame.

    The text of k tokens is always the same, so frames of another sender, or cut elsewhere, fit.
    """

    def __init__(self) -> None:
        self.num_tokens = 0
        self.num_chars = 0
        self.starts = {0: 0}
        self._has_prompt = False

    def trim(self, frame: Frame) -> bool | None:
        """Cut from `frame` what the reader has -> whether anything is left; None for a gap."""
        offset, token_ids, text = frame["offset"], frame["token_ids"], frame["text"]
        start = self.starts.get(offset)
        if start is None:
            if token_ids or frame["finish_reason"] is None or offset > self.num_tokens:
                return None
            # The end of a request of which we have more than who ended it.
            offset, start = self.num_tokens, self.num_chars
        if frame["finish_reason"] is None:
            self.starts.setdefault(offset + len(token_ids), start + len(text))
        known = self.num_tokens - offset
        frame["offset"] = self.num_tokens
        frame["text"] = text[self.num_chars - start :]
        for name in ("token_ids", "logprobs"):
            frame[name] = frame[name][known:] if frame.get(name) else frame.get(name)
        if self._has_prompt:
            frame["prompt_logprobs"] = None
        self._has_prompt = self._has_prompt or bool(frame.get("prompt_logprobs"))
        self.num_tokens += len(frame["token_ids"])
        self.num_chars += len(frame["text"])
        return bool(frame["token_ids"] or frame["text"] or frame.get("prompt_logprobs"))


class RequestSpan:
    """One request as its client saw it: a span of kind client, named and described by the GenAI
    conventions of OpenTelemetry. No text, and no tokens.
    """

    def __init__(
        self, model: str, request: Frame, traceparent: str | None, tracestate: str | None
    ) -> None:
        caller = _TRACEPARENT.fullmatch(traceparent or "")
        self._trace_id, self._parent_id = (
            caller.group(1, 2) if caller else (secrets.token_hex(16), "")
        )
        self._span_id = secrets.token_hex(8)
        self.traceparent = f"00-{self._trace_id}-{self._span_id}-01"
        self.error = ""
        self._model = model
        self._request = request
        self._tracestate = tracestate or ""
        self._unix_ns, self._start_ns = time.time_ns(), time.monotonic_ns()
        self._seen: dict[str, Any] = {}

    def see(self, frame: Frame) -> None:
        """A frame has come."""
        if frame["token_ids"] and "gen_ai.response.time_to_first_chunk" not in self._seen:
            first_s = (time.monotonic_ns() - self._start_ns) / 1e9
            self._seen["gen_ai.response.time_to_first_chunk"] = first_s
        if frame["finish_reason"] is not None:
            self._seen["gen_ai.response.finish_reasons"] = frame["finish_reason"]
            usage = frame.get("usage") or {}
            self._seen |= {
                "gen_ai.usage.input_tokens": usage.get("prompt_tokens", 0),
                "gen_ai.usage.output_tokens": usage.get("completion_tokens", 0),
                "gen_ai.usage.cache_read.input_tokens": usage.get("cached_tokens", 0),
            }

    def end(self, num_sent: int, num_resumes: int) -> Span:
        """-> the closed span: ids in hex, wall time of its beginning, monotonic duration."""
        kind = "chat" if "messages" in self._request else "text_completion"
        asked = {
            name: self._request[name] for name in _ASKED if self._request.get(name) is not None
        }
        return {
            "trace_id": self._trace_id,
            "span_id": self._span_id,
            "parent_id": self._parent_id,
            "name": f"{kind} {self._model}",
            "kind": "client",
            "service": "client",
            "start_unix_ns": self._unix_ns,
            "duration_ns": time.monotonic_ns() - self._start_ns,
            "request_id": self._request["request_id"],
            "tracestate": self._tracestate,
            "attributes": {
                "gen_ai.operation.name": kind,
                "gen_ai.provider.name": "streetcar",
                "gen_ai.request.model": self._model,
                **{f"gen_ai.request.{name}": value for name, value in asked.items()},
                "gen_ai.response.id": self._request["request_id"],
                **self._seen,
                "streetcar.num_sent": num_sent,
                "streetcar.num_resumes": num_resumes,
            },
            "error": self.error,
        }


def _is_sampled(traceparent: str | None) -> bool:
    """False only where the caller's own context says so: then nobody records the request."""
    caller = _TRACEPARENT.fullmatch(traceparent or "")
    return caller is None or bool(int(caller.group(3), 16) & 1)


async def _ignore(_error: Exception) -> None:
    """The connection mends itself; what is lost meanwhile shows in the frames."""
