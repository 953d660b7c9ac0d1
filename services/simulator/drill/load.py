"""The load of a drill: streams over NATS and HTTP, each compared with what it must get.

Invariants: a stream is compared token by token as it comes, and ends within a bound; a request that
was refused, or cut by a dead gateway, is asked again as a stream of its own.

Shell: the public client, sockets, the clock.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from typing import Any, Final

from services.client import Client, StreetcarClientError
from services.simulator.drill.cases import MAX_MODEL_TOKENS, Case, Plan
from services.simulator.drill.checker import Stream, Wrong, compare
from services.simulator.drill.http_stream import HttpCut, HttpRefused, stream

ASK_AGAIN_S: Final = 0.1
STREAM_TIMEOUT_S: Final = 60.0
"""A stream that has not ended by then is lost."""

MAX_STREAMS: Final = 100_000


class Load:
    """`width` streams at once, from `begin` to `end`. streams: all of them, ended or not."""

    def __init__(
        self,
        client: Client,
        http_url: str,
        model: str,
        next_plan: Callable[[random.Random], Plan],
        seed: int,
    ) -> None:
        self._client = client
        self._http_url = http_url
        self._model = model
        self._next_plan = next_plan
        self._rng = random.Random(seed)
        self._ending = False
        self._tasks: list[asyncio.Task[None]] = []
        self.streams: list[Stream] = []

    def begin(self, width: int) -> None:
        self._tasks = [asyncio.create_task(self._ask_on()) for _ in range(width)]

    async def end(self) -> None:
        """Begin nothing new and wait for what is open. Raises what a stream was not made for."""
        self._ending = True
        await asyncio.gather(*self._tasks)

    def cancel(self) -> None:
        """Leave whatever is open."""
        for task in self._tasks:
            task.cancel()

    def check(self) -> None:
        """Raise what has ended one of the tasks, if anything has."""
        for task in self._tasks:
            if task.done():
                task.result()

    async def _ask_on(self) -> None:
        while not self._ending:
            plan = self._next_plan(self._rng)
            record = await self.run(plan)
            while (record.cut or record.refused) and not self._ending:
                await asyncio.sleep(ASK_AGAIN_S)
                record = await self.run(plan)

    async def run(self, plan: Plan) -> Stream:
        """One stream to its end."""
        assert len(self.streams) < MAX_STREAMS
        record = Stream(
            number=len(self.streams),
            via="http" if plan.over_http else "nats",
            asked_s=time.monotonic(),
            deadline=bool(plan.deadline_ms),
        )
        self.streams.append(record)
        follow = self._over_http if plan.over_http else self._over_nats
        try:
            async with asyncio.timeout(STREAM_TIMEOUT_S):
                await follow(plan, record)
        except TimeoutError:
            record.code = "no_end"
        record.ended_s = time.monotonic()
        return record

    async def _over_nats(self, plan: Plan, record: Stream) -> None:
        token_ids: list[int] = []
        frames = self._client.generate(
            self._model, prompt_token_ids=plan.case.prompt_token_ids, **plan.fields
        )
        try:
            async with aclosing(frames):
                async for frame in frames:
                    if frame["offset"] != len(token_ids):
                        record.wrong = Wrong.REORDERED
                        return
                    token_ids += frame["token_ids"]
                    record.heard(time.monotonic(), len(frame["token_ids"]))
                    if _is_over(plan, record, token_ids, frame["finish_reason"]):
                        return
        except StreetcarClientError as error:
            record.code = error.code

    async def _over_http(self, plan: Plan, record: Stream) -> None:
        """The stub's text names its tokens, each with a space after it."""
        token_ids: list[int] = []
        body = {"model": self._model, "prompt": plan.case.prompt_token_ids, **plan.fields}
        events = stream(self._http_url, body)
        try:
            async with aclosing(events):
                async for event in events:
                    if "error" in event:
                        record.code = str(event["error"]["code"])
                        return
                    choice = event["choices"][0]
                    new = [int(word) for word in choice["text"].split()]
                    token_ids += new
                    record.heard(time.monotonic(), len(new))
                    if _is_over(plan, record, token_ids, choice["finish_reason"]):
                        return
        except HttpRefused as refusal:
            record.code = refusal.code
        except HttpCut:
            record.cut = True


async def learn(client: Client, model: str, prompts: Sequence[list[int]]) -> list[Case]:
    """The answers of a mesh that nobody breaks. Raises StreetcarClientError."""

    async def answer(prompt: list[int]) -> Case:
        token_ids: list[int] = []
        asked: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
        async for frame in client.generate(
            model, prompt_token_ids=prompt, max_tokens=MAX_MODEL_TOKENS, **asked
        ):
            token_ids += frame["token_ids"]
        return Case(prompt, token_ids)

    return await asyncio.gather(*(answer(prompt) for prompt in prompts))


def _is_over(plan: Plan, record: Stream, token_ids: list[int], finish_reason: Any) -> bool:
    """Judge what has come so far -> whether the stream need not be followed any further."""
    record.wrong = compare(plan.expected, token_ids)
    if record.wrong is not None:
        return True
    if plan.cancel_after and len(token_ids) >= plan.cancel_after:
        record.cancelled = True
        return True
    if finish_reason is None:
        return False
    record.complete = finish_reason == "length" and len(token_ids) == len(plan.expected)
    if not record.complete:
        record.code = f"finished as {finish_reason} after {len(token_ids)} tokens"
    return True
