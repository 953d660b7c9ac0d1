"""The public client: publish a request on a NATS subject, get a stream of tokens.

Copy this file into a program of your own; it needs `nats-py` and `msgpack`, nothing else.

    async with Client("nats://127.0.0.1:4222") as client:
        async for frame in client.generate("smollm2-135m", prompt="Hi", max_tokens=20):
            show(frame["text"])

Invariants: every token of an answer comes once and in order (repeated ones are trimmed, missing
ones are an error); a generator that is closed early cancels its request.

Shell: owns one connection to the bus.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import re
import uuid
from collections.abc import AsyncGenerator
from typing import Any, Final, Self

import msgpack
import nats.errors
from nats.aio.client import Client as Connection
from nats.aio.msg import Msg

DEFAULT_URL: Final = "nats://127.0.0.1:4222"
CONNECT_TIMEOUT_S: Final = 5.0
MAX_QUEUED_FRAMES: Final = 4096
"""Of one request; a reader that is further behind has lost frames, which is an error."""

Frame = dict[str, Any]
_Queue = asyncio.Queue[Msg]
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
        first_frame_timeout_s: float = 60.0,
        next_frame_timeout_s: float = 120.0,
    ) -> None:
        """inbox_prefix: first token of the inboxes that the bus lets this user read.
        first_frame_timeout_s: then the request is sent once more, and given up after as long."""
        self._url = url
        self._prefix = prefix
        self._inbox_prefix = inbox_prefix
        self._first_frame_timeout_s = first_frame_timeout_s
        self._next_frame_timeout_s = next_frame_timeout_s
        self._connection = Connection()
        self._inbox = ""
        self._numbers = itertools.count(1)
        self._queues: dict[str, _Queue] = {}

    async def __aenter__(self) -> Self:
        """Connect. Raises StreetcarClientError where no server answers."""
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await self._connection.connect(
                    servers=self._url.split(","),
                    inbox_prefix=self._inbox_prefix,
                    max_reconnect_attempts=-1,
                    pending_size=0,  # a request that waits out an outage comes too late
                    error_cb=_ignore,
                )
        except (TimeoutError, OSError, nats.errors.Error) as error:
            await self.__aexit__()
            # What comes before the host may be a password.
            message = f"no nats-server answers at {self._url.rpartition('@')[2]}"
            raise StreetcarClientError("no_server", message, 503) from error
        self._inbox = self._connection.new_inbox()
        await self._connection.subscribe(f"{self._inbox}.*", cb=self._deliver)
        return self

    async def __aexit__(self, *_exc: object) -> None:
        with contextlib.suppress(OSError, nats.errors.Error):
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
        **fields: Any,
    ) -> AsyncGenerator[Frame, None]:
        """Frames of one answer: `text`, `token_ids` ...; the last has `finish_reason` and `usage`.

        fields: `prompt`, `prompt_token_ids` or `messages`; `max_tokens`, `temperature`, `stop` ...
        Close the generator (`contextlib.aclosing`) to stop early. Raises StreetcarClientError.
        """
        request = {"request_id": request_id or uuid.uuid4().hex, **fields}
        headers = {"traceparent": traceparent} if traceparent else None
        number = str(next(self._numbers))
        queue = self._queues[number] = asyncio.Queue(MAX_QUEUED_FRAMES)
        received, finished = _Received(), False
        try:
            await self._send(model, request, number, headers)
            try:
                message = await _next(queue, self._first_frame_timeout_s)
            except StreetcarClientError:
                await self._send(model, request | {"retry": True}, number, headers)
                message = await _next(queue, self._first_frame_timeout_s)
            while not finished:
                frame = _open(message, model)
                finished = frame["finish_reason"] is not None
                if received.trim(frame) or finished:
                    yield frame
                if not finished:
                    message = await _next(queue, self._next_frame_timeout_s)
        except StreetcarClientError as error:
            # What the mesh itself has ended needs no cancel.
            finished = error.code not in {"lost_frames", "timeout"}
            raise
        finally:
            del self._queues[number]
            if not finished:
                await self.cancel(request["request_id"])

    async def cancel(self, request_id: str) -> None:
        """Stop a request, wherever it is; one that is not known (yet) will not start either."""
        with contextlib.suppress(nats.errors.Error):
            await self._connection.publish(f"{self._prefix}.cancel.{request_id}", b"")

    async def _send(
        self, model: str, request: Frame, number: str, headers: dict[str, str] | None
    ) -> None:
        # Both names become tokens of a subject.
        if not _ID.fullmatch(model):
            raise StreetcarClientError("model_not_found", f"no model {model[:80]!r}", 404)
        if not _ID.fullmatch(request["request_id"]):
            message = f"request_id must match {_ID.pattern}"
            raise StreetcarClientError("invalid_request", message, 400)
        try:
            payload: bytes = msgpack.packb(request)
        except (TypeError, ValueError, OverflowError) as error:
            message = f"the request cannot be written as MessagePack: {error}"
            raise StreetcarClientError("invalid_request", message, 400) from None
        if len(payload) > self.max_payload:
            message = f"the request has {len(payload)} bytes, the bus takes {self.max_payload}"
            raise StreetcarClientError("payload_too_large", message, 413)
        subject, reply = f"{self._prefix}.generate.{model}", f"{self._inbox}.{number}"
        try:
            await self._connection.publish(subject, payload, reply=reply, headers=headers)
        except nats.errors.Error as error:
            message = f"the bus is away ({type(error).__name__})"
            raise StreetcarClientError("no_server", message, 503) from error

    async def _deliver(self, message: Msg) -> None:
        queue = self._queues.get(message.subject.rpartition(".")[2])
        if queue is None:
            return
        if queue.full():
            # The reader finds the gap in the offsets.
            queue.get_nowait()
        queue.put_nowait(message)


class _Received:
    """What the reader has. starts: by frame offset, how many characters came before that frame."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self.num_chars = 0
        self.starts = {0: 0}

    def trim(self, frame: Frame) -> bool:
        """Cut from `frame` what the reader has already; False where nothing is left."""
        offset = frame["offset"]
        start = self.starts.get(offset)
        if start is None:
            message = f"tokens after the {self.num_tokens}th of the answer were lost"
            raise StreetcarClientError("lost_frames", message, 502)
        known = self.num_tokens - offset
        frame["text"] = frame["text"][self.num_chars - start :]
        frame["offset"] = self.num_tokens
        for name in ("token_ids", "logprobs"):
            frame[name] = frame[name][known:] if frame.get(name) else frame.get(name)
        self.num_tokens += len(frame["token_ids"])
        self.num_chars += len(frame["text"])
        self.starts.setdefault(self.num_tokens, self.num_chars)
        return bool(frame["token_ids"] or frame["text"] or frame.get("prompt_logprobs"))


def _open(message: Msg, model: str) -> Frame:
    """The frame in `message`; raises for one that says an error, or that nobody is there."""
    headers = message.headers or {}
    if not message.data and headers.get("Status") == "503":
        raise StreetcarClientError("no_worker", f"nobody serves {model!r}", 503)
    frame: Frame = msgpack.unpackb(message.data)
    if error := frame.get("error"):
        status = int(headers.get("Nats-Service-Error-Code", "500"))
        raise StreetcarClientError(error["code"], error["message"], status)
    return frame


async def _next(queue: _Queue, timeout_s: float) -> Msg:
    if not queue.empty():
        return queue.get_nowait()
    try:
        async with asyncio.timeout(timeout_s):
            return await queue.get()
    except TimeoutError:
        raise StreetcarClientError("timeout", f"no frame for {timeout_s:g} s", 504) from None


async def _ignore(_error: Exception) -> None:
    """The connection mends itself; what is lost meanwhile shows in the frames."""
