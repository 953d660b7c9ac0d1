"""A fake admission: answers `generate.<model>` on a real bus with scripted frames.

It stands where the mesh stands behind the public interface; nothing of the mesh runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgpack
import nats
from nats.aio.client import Client as Connection
from nats.aio.msg import Msg

from services.contracts.beats import AdmissionLoad, Beat, EngineLoad, ServiceKind
from services.contracts.codec import encode
from services.contracts.errors import ERRORS, ErrorCode
from services.contracts.subjects import Subjects

MODEL = "toy"
Request = dict[str, Any]


class FakeAdmission:
    """Per request: `count` tokens "t0 ", "t1 " ..., or what `script` does instead.

    requests, resumed, cancelled: what arrived, in order; of a resume its offset.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.gateway_url = ""
        self._connection: Connection
        self._tasks: set[asyncio.Task[None]] = set()
        self.script: Callable[[FakeAdmission, Request, str], Awaitable[None]] = answer
        self.requests: list[Request] = []
        self.headers: list[dict[str, str]] = []
        self.resumed: list[int] = []
        self.cancelled: list[str] = []
        self.arrived = asyncio.Condition()
        self.resume = asyncio.Event()

    async def __aenter__(self) -> FakeAdmission:
        self._connection = await nats.connect(self.url)
        subjects = Subjects()
        await self._connection.subscribe(subjects.any_generate, cb=self._on_generate)
        await self._connection.subscribe(subjects.any_resume, cb=self._on_resume)
        await self._connection.subscribe(subjects.any_cancel, cb=self._on_cancel)
        await self._connection.flush()
        return self

    async def leave(self) -> None:
        """From now on nobody listens."""
        await self._connection.close()

    async def __aexit__(self, *_exc: object) -> None:
        for task in self._tasks:
            task.cancel()
        await self._connection.close()

    async def send(self, reply: str, request: Request, offset: int, **fields: Any) -> None:
        frame = {
            "request_id": request["request_id"],
            "offset": offset,
            "text": "",
            "token_ids": [],
            "logprobs": None,
            "prompt_logprobs": None,
            "finish_reason": None,
            "usage": None,
            "error": None,
            **fields,
        }
        headers = None
        if frame["error"]:
            status = ERRORS[ErrorCode(frame["error"]["code"])].status
            headers = {"Nats-Service-Error-Code": str(status)}
        await self._connection.publish(reply, msgpack.packb(frame), headers=headers)

    async def beat(self, subject: str, payload: bytes) -> None:
        await self._connection.publish(subject, payload)
        await self._connection.flush()

    async def beat_as_mesh(self, **engine: Any) -> None:
        """One beat of an admission and one of a scheduler, both for MODEL."""
        subjects = Subjects()
        admission = Beat(ServiceKind.ADMISSION, "a", admission=AdmissionLoad([MODEL], 0))
        await self.beat(subjects.beat("admission", "a"), encode(admission))
        scheduler = Beat(ServiceKind.SCHEDULER, "s", engine=engine_load(**engine))
        await self.beat(subjects.beat("scheduler", "s"), encode(scheduler))

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until `condition` holds; it is looked at whenever something arrives."""
        async with asyncio.timeout(5), self.arrived:
            await self.arrived.wait_for(condition)

    async def _on_generate(self, message: Msg) -> None:
        request = msgpack.unpackb(message.data)
        self.headers.append(message.headers or {})
        await self._note(self.requests, request)
        task = asyncio.create_task(_run(self.script, self, request, message.reply))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def reset(self) -> None:
        """As new, for the next test."""
        self.script = answer
        self.resume = asyncio.Event()
        for seen in (self.requests, self.headers, self.resumed, self.cancelled):
            seen.clear()  # type: ignore[attr-defined]

    async def _on_resume(self, message: Msg) -> None:
        await self._note(self.resumed, msgpack.unpackb(message.data)["offset"])

    async def _on_cancel(self, message: Msg) -> None:
        await self._note(self.cancelled, message.subject.rpartition(".")[2])

    async def _note(self, where: list[Any], what: object) -> None:
        async with self.arrived:
            where.append(what)
            self.arrived.notify_all()


def engine_load(**changes: Any) -> EngineLoad:
    fields: dict[str, Any] = dict.fromkeys(EngineLoad.__struct_fields__, 0)
    fields |= {"model": MODEL, "ready": True, "max_model_len": 512, "num_blocks_total": 100}
    fields |= {"dp_group": "", "wants_prefill": False, "ledger": ""}
    return EngineLoad(**{**fields, **changes})


async def _run(script: Any, fake: FakeAdmission, request: Request, reply: str) -> None:
    await script(fake, request, reply)


def usage(request: Request, count: int) -> dict[str, int]:
    return {"prompt_tokens": 5, "completion_tokens": count, "cached_tokens": 2}


def logprobs(request: Request, index: int) -> list[dict[str, Any]] | None:
    if request.get("logprobs") is None:
        return None
    top = [
        {"token_id": 900 + rank, "token": f"r{rank}", "logprob": -1.0 - rank}
        for rank in range(request["logprobs"])
    ]
    return [{"token_id": index, "token": f"t{index} ", "logprob": -0.5, "top": top}]


async def answer(fake: FakeAdmission, request: Request, reply: str) -> None:
    """`max_tokens` tokens, 3 by default, one frame each, then the end."""
    count = request.get("max_tokens") or 3
    for index in range(count):
        last = index == count - 1
        await fake.send(
            reply,
            request,
            index,
            text=f"t{index} ",
            token_ids=[index],
            logprobs=logprobs(request, index),
            finish_reason="length" if last else None,
            usage=usage(request, count) if last else None,
        )


async def one_token_then_wait(fake: FakeAdmission, request: Request, reply: str) -> None:
    await fake.send(reply, request, 0, text="t0 ", token_ids=[0])
    await fake.resume.wait()
    await fake.send(reply, request, 1, finish_reason="length", usage=usage(request, 1))


async def silence(fake: FakeAdmission, request: Request, reply: str) -> None:
    """As while a request is queued."""


def failing(code: ErrorCode, message: str) -> Any:
    async def fail(fake: FakeAdmission, request: Request, reply: str) -> None:
        error = {"code": code.value, "message": message}
        await fake.send(reply, request, 0, finish_reason="error", error=error)

    return fail
