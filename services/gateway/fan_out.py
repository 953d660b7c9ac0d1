"""One HTTP request as one or several generations, their frames merged as they come.

Invariants: the end of the generator, for whatever reason, ends every generation that is not
finished; the first failure ends them all; no task is made per token.

Shell: owns the tasks of one request.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from hashlib import blake2b
from typing import Any, Final, Protocol

from services.client import Frame
from services.contracts.limits import MAX_SEED
from services.contracts.trace_context import TraceContext

Fields = dict[str, Any]
MAX_MERGED_FRAMES: Final = 256
"""Waiting for the reader; a generation that is ahead of it waits in its own queue."""


class Generator(Protocol):
    """The part of the client that is used here."""

    def generate(
        self,
        model: str,
        *,
        request_id: str | None = None,
        traceparent: str | None = None,
        tracestate: str | None = None,
        **fields: Any,
    ) -> AsyncGenerator[Frame, None]: ...


def child_seed(seed: int, index: int) -> int:
    """Seed of choice `index`: the request's own for the first, so that n = 1 is no special case.

    The others are 63 bits of BLAKE2b over both numbers, which no legal seed can overflow.
    """
    if index == 0:
        return seed
    digest = blake2b(f"{seed}:{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") & MAX_SEED


async def fan_out(
    client: Generator, model: str, children: Sequence[Fields], place: TraceContext
) -> AsyncGenerator[tuple[int, Frame], None]:
    """(index of the child, frame) in the order of arrival. Raises StreetcarClientError."""
    trace = {"traceparent": place.traceparent, "tracestate": place.tracestate or None}
    if len(children) == 1:
        generation = client.generate(model, **trace, **children[0])
        async with aclosing(generation) as frames:
            async for frame in frames:
                yield 0, frame
        return
    queue: asyncio.Queue[tuple[int, Frame] | Exception | None] = asyncio.Queue(MAX_MERGED_FRAMES)

    async def forward(index: int) -> None:
        try:
            generation = client.generate(model, **trace, **children[index])
            async with aclosing(generation) as frames:
                async for frame in frames:
                    await queue.put((index, frame))
        except Exception as error:  # noqa: BLE001 - raised again by the reader
            await queue.put(error)
            return
        await queue.put(None)

    tasks = [asyncio.create_task(forward(index)) for index in range(len(children))]
    try:
        num_open = len(tasks)
        while num_open:
            item = await queue.get()
            if item is None:
                num_open -= 1
            elif isinstance(item, Exception):
                raise item
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        # Each task sends its cancel while it ends.
        await asyncio.gather(*tasks, return_exceptions=True)
