from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import pytest

from services.client import Frame, StreetcarClientError
from services.contracts.trace_context import TraceContext
from services.gateway.fan_out import fan_out

PLACE = TraceContext("ab" * 16, "cd" * 8, sampled=True, tracestate="a=1")


class FakeClient:
    """Generations of `count` frames; `stuck` ones wait for ever, `broken` ones fail."""

    def __init__(self) -> None:
        self.open = 0
        self.ended: list[str] = []

    async def generate(
        self,
        model: str,
        *,
        request_id: str | None = None,
        traceparent: str | None = None,
        tracestate: str | None = None,
        **fields: Any,
    ) -> AsyncGenerator[Frame, None]:
        self.open += 1
        try:
            for index in range(fields["count"]):
                yield {"model": model, "index": index, "trace": traceparent, "state": tracestate}
            if fields.get("stuck"):
                await asyncio.get_running_loop().create_future()
            if fields.get("broken"):
                raise StreetcarClientError("queue_full", "full", 429)
        finally:
            self.open -= 1
            self.ended.append(request_id or "")


def children(*fields: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"request_id": str(index), **child} for index, child in enumerate(fields)]


@pytest.mark.parametrize("counts", [[3], [3, 0, 2], [500, 500]])
async def test_all_frames_of_all_children(counts: list[int]) -> None:
    client = FakeClient()
    asked = children(*({"count": count} for count in counts))
    seen: list[list[int]] = [[] for _ in counts]
    async for index, frame in fan_out(client, "m", asked, PLACE):
        assert (frame["model"], frame["trace"], frame["state"]) == ("m", PLACE.traceparent, "a=1")
        seen[index].append(frame["index"])
    assert seen == [list(range(count)) for count in counts]
    assert client.open == 0


@pytest.mark.parametrize("num_children", [1, 3])
async def test_case_08_closing_ends_every_child(num_children: int) -> None:
    client = FakeClient()
    asked = children(*[{"count": 1, "stuck": True}] * num_children)
    async with aclosing(fan_out(client, "m", asked, PLACE)) as frames:
        await anext(frames)
    assert client.open == 0
    assert sorted(client.ended) == [str(index) for index in range(num_children)]


@pytest.mark.parametrize("num_children", [1, 3])
async def test_cancelling_ends_every_child(num_children: int) -> None:
    client = FakeClient()
    asked = children(*[{"count": 0, "stuck": True}] * num_children)

    async def read() -> None:
        async with aclosing(fan_out(client, "m", asked, PLACE)) as frames:
            await anext(frames)

    task = asyncio.create_task(read())
    while client.open < num_children:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert client.open == 0


async def test_the_first_failure_ends_them_all() -> None:
    client = FakeClient()
    asked = children({"count": 1, "stuck": True}, {"count": 0, "broken": True})
    with pytest.raises(StreetcarClientError, match="full"):
        async for _ in fan_out(client, "m", asked, PLACE):
            pass
    assert client.open == 0


async def test_a_reader_that_stops_reading_is_not_run_over() -> None:
    client = FakeClient()
    asked = children({"count": 10_000}, {"count": 10_000})
    async with aclosing(fan_out(client, "m", asked, PLACE)) as frames:
        await anext(frames)
        for _ in range(100):
            await asyncio.sleep(0)
        assert client.open == 2, "the children wait for the reader"
    assert client.open == 0
