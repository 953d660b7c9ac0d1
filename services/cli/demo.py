"""`streetcar demo`: eight prompts of very different length at once, side by side.

Invariant: everything that the demo started has stopped when it ends; status 0 means that all
eight were answered.

Shell: processes, the public client, the terminal.
"""

from __future__ import annotations

import asyncio
import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from services.cli.demo_prompts import PROMPTS, SYSTEM, DemoPrompt
from services.cli.options import ClusterOptions
from services.cli.output import ClusterReporter, print_json

if TYPE_CHECKING:
    from rich.table import Table

    from services.client import Client
    from services.contracts.beats import EngineLoad
    from services.runtime.cluster import Cluster
    from services.runtime.settings import Settings

INTERRUPTED: Final = 130
REFRESH_S: Final = 0.1
PLAIN_PERIOD_S: Final = 1.0
BEAT_WAIT_S: Final = 0.6
"""Two periods of the heartbeat, and a little: the totals after it are the last ones."""


@dataclass(slots=True)
class Stream:
    """One answer as it arrives. Times are monotonic, in seconds."""

    prompt: DemoPrompt
    started: float = 0.0
    first: float = 0.0
    ended: float = 0.0
    text: str = ""
    num_tokens: int = 0
    finish_reason: str = ""
    usage: dict[str, int] = field(default_factory=dict)

    @property
    def seconds_to_first(self) -> float:
        return self.first - self.started

    @property
    def tokens_per_s(self) -> float:
        """Rate after the first token; 0 for an answer of one."""
        spent = self.ended - self.first
        return (self.num_tokens - 1) / spent if spent > 0 else 0.0

    def to_dict(self) -> dict[str, Any]:
        return {
            "title": self.prompt.title,
            "text": self.text,
            "finish_reason": self.finish_reason,
            "ttft_s": round(self.seconds_to_first, 4),
            "tokens_per_s": round(self.tokens_per_s, 2),
            **self.usage,
        }


@dataclass(frozen=True, slots=True)
class DemoResult:
    """What the demo measured, over the eight answers alone."""

    streams: list[Stream]
    seconds: float
    steps: int
    mean_batch_size: float
    prefix_queries: int
    prefix_hits: int

    @property
    def num_tokens(self) -> int:
        return sum(stream.num_tokens for stream in self.streams)

    def to_dict(self) -> dict[str, Any]:
        return {
            "requests": [stream.to_dict() for stream in self.streams],
            "seconds": round(self.seconds, 3),
            "completion_tokens": self.num_tokens,
            "tokens_per_s": round(self.num_tokens / self.seconds, 2),
            "steps": self.steps,
            "mean_batch_size": round(self.mean_batch_size, 2),
            "prefix_queries": self.prefix_queries,
            "prefix_hits": self.prefix_hits,
        }


def demo(options: ClusterOptions | None = None, *, json: bool = False) -> int:
    """Start a cluster, ask eight things at once, show the answers as they come, stop.

    Parameters
    ----------
    json
        Print the result as one object.
    """
    from services.cli.running import prepare, run_cluster
    from services.runtime.cluster import Cluster

    settings = prepare((options or ClusterOptions()).settings())

    async def work(cluster: Cluster) -> DemoResult:
        return await _ask_all(cluster, settings, live=not json)

    async def run() -> DemoResult | None:
        return await run_cluster(Cluster(settings, ClusterReporter()), work)

    result = asyncio.run(run())
    if result is None:
        return INTERRUPTED
    if json:
        print_json(result.to_dict())
    else:
        _print_summary(result)
    return 0 if all(stream.finish_reason in {"stop", "length"} for stream in result.streams) else 1


async def _ask_all(cluster: Cluster, settings: Settings, *, live: bool) -> DemoResult:
    from services.cli.requests import connected

    async with connected(cluster.nats_url, settings.subject_prefix) as client:
        # The first answer warms the kernels up, and leaves the common prefix in the cache.
        await _ask(client, settings.served_name, Stream(DemoPrompt("warm-up", "Hi", 1)))
        before = await _engine_load(cluster.observer_url, settings)
        streams = [Stream(prompt) for prompt in PROMPTS]
        started = time.monotonic()
        tasks = [asyncio.create_task(_ask(client, settings.served_name, s)) for s in streams]
        show = asyncio.create_task(_show(streams, live=live))
        try:
            await asyncio.gather(*tasks)
        finally:
            seconds = time.monotonic() - started
            for task in (*tasks, show):
                task.cancel()
            await asyncio.wait({*tasks, show})
    after = await _engine_load(cluster.observer_url, settings)
    steps = after.num_steps - before.num_steps
    return DemoResult(
        streams=streams,
        seconds=seconds,
        steps=steps,
        mean_batch_size=(after.num_step_seqs - before.num_step_seqs) / max(1, steps),
        prefix_queries=after.num_prefix_queries - before.num_prefix_queries,
        prefix_hits=after.num_prefix_hits - before.num_prefix_hits,
    )


async def _ask(client: Client, model: str, stream: Stream) -> None:
    messages = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": stream.prompt.text},
    ]
    stream.started = time.monotonic()
    frames = client.generate(
        model, messages=messages, max_tokens=stream.prompt.max_tokens, temperature=0.0
    )
    async for frame in frames:
        now = time.monotonic()
        if frame["token_ids"] and not stream.num_tokens:
            stream.first = now
        stream.num_tokens += len(frame["token_ids"])
        stream.text += frame["text"]
        if frame["finish_reason"] is not None:
            stream.ended = now
            stream.finish_reason = frame["finish_reason"]
            stream.usage = dict(frame["usage"])


async def _engine_load(url: str, settings: Settings) -> EngineLoad:
    """The scheduler's totals, from its last heartbeat."""
    from services.cli.ps import listen
    from services.runtime.problem import Problem

    for beat in await listen(url, settings.subject_prefix, BEAT_WAIT_S):
        if beat.engine is not None:
            return beat.engine
    raise Problem("E203", "Service is not alive", cause="no heartbeat of a scheduler")


async def _show(streams: list[Stream], *, live: bool) -> None:
    """The answers side by side: a table that redraws on a terminal, else a line each second."""
    if live and sys.stdout.isatty():
        from rich.live import Live

        with Live(_table(streams), refresh_per_second=1 / REFRESH_S, transient=True) as view:
            while True:
                await asyncio.sleep(REFRESH_S)
                view.update(_table(streams))
    while live:
        await asyncio.sleep(PLAIN_PERIOD_S)
        for number, stream in enumerate(streams, 1):
            tail = " ".join(stream.text.split())[-60:]
            print(f"  [{number}] {stream.num_tokens:>3} tokens  ...{tail}", flush=True)
        print(flush=True)


def _table(streams: list[Stream]) -> Table:
    from rich.table import Table

    table = Table(expand=True, show_edge=False)
    table.add_column("#", width=2)
    table.add_column("asked", width=14)
    table.add_column("tokens", justify="right", width=6)
    table.add_column("answer", ratio=1, no_wrap=True, overflow="ellipsis")
    for number, stream in enumerate(streams, 1):
        tail = " ".join(stream.text.split())[-200:]
        table.add_row(str(number), stream.prompt.title, str(stream.num_tokens), tail[-80:])
    return table


def _print_summary(result: DemoResult) -> None:
    print()
    for number, stream in enumerate(result.streams, 1):
        print(f"  {number}. {stream.prompt.title}: {' '.join(stream.text.split())}")
    head = ("", "prompt", "cached", "tokens", "first token", "tokens/s", "end")
    print("\n  {:<16}{:>8}{:>8}{:>8}{:>13}{:>10}  {}".format(*head))
    for stream in result.streams:
        prompt, cached = (stream.usage.get(f"{n}_tokens", 0) for n in ("prompt", "cached"))
        print(
            f"  {stream.prompt.title:<16}{prompt:>8}{cached:>8}{stream.num_tokens:>8}"
            f"{stream.seconds_to_first:>11.2f} s{stream.tokens_per_s:>10.1f}"
            f"  {stream.finish_reason}"
        )
    rate = result.num_tokens / result.seconds
    print(
        f"\n  {result.num_tokens} tokens in {result.seconds:.1f} s: {rate:.1f} tokens/s"
        f"\n  {result.steps} steps, mean batch size {result.mean_batch_size:.2f}"
        f"\n  prefix hits: {result.prefix_hits} of {result.prefix_queries} tokens asked for",
        flush=True,
    )
