"""`streetcar chat`: a conversation, or one question.

Invariant: an answer that is interrupted by Ctrl-C is cancelled in the mesh, and the conversation
goes on without it.

Shell: the terminal and the public client.
"""

from __future__ import annotations

import asyncio
import sys
from contextlib import aclosing
from typing import TYPE_CHECKING

from services.cli.output import print_json
from services.cli.requests import RequestOptions, Traces, cluster_of, connected

if TYPE_CHECKING:
    from services.client import Client

Messages = list[dict[str, str]]


def chat(
    message: str | None = None,
    options: RequestOptions | None = None,
    *,
    system: str | None = None,
    trace: bool = False,
    json: bool = False,
) -> int:
    """Talk with the model; one answer if a message is given, else until end of input.

    Parameters
    ----------
    message
        A single question.
    system
        Instructions that stand before the conversation.
    trace
        Show on standard error where the time of each answer went.
    json
        Print every frame as one object, and with --trace every span; questions are the lines of
        standard input.
    """
    asked = options or RequestOptions()
    asyncio.run(_chat(message, system, asked, traced=trace, as_json=json))
    return 0


async def _chat(
    message: str | None,
    system: str | None,
    options: RequestOptions,
    *,
    traced: bool,
    as_json: bool,
) -> None:
    settings, cluster, model = cluster_of(options)
    traces = Traces(settings, cluster, as_json=as_json)
    messages: Messages = [{"role": "system", "content": system}] if system else []
    on_span = traces.add if traced else None
    async with connected(cluster.nats_url, settings.subject_prefix, on_span) as client:
        if message is not None:
            await _turn(client, model, messages, message, options, as_json=as_json)
            await traces.show()
            return
        while (line := await asyncio.to_thread(_read_line, quiet=as_json)) is not None:
            if line.strip():
                await _turn(client, model, messages, line, options, as_json=as_json)
                await traces.show()


async def _turn(
    client: Client,
    model: str,
    messages: Messages,
    question: str,
    options: RequestOptions,
    *,
    as_json: bool,
) -> None:
    """Ask, print the answer as it comes, and keep both in `messages`."""
    messages.append({"role": "user", "content": question})
    answer = ""
    frames = client.generate(model, messages=messages, **options.fields())
    async with aclosing(frames):
        async for frame in frames:
            answer += frame["text"]
            if as_json:
                print_json(frame)
            else:
                print(frame["text"], end="", flush=True)
    if not as_json:
        print()
    messages.append({"role": "assistant", "content": answer})


def _read_line(*, quiet: bool) -> str | None:
    """The next line of input, or None at its end."""
    if not quiet and sys.stdin.isatty():
        print("> ", end="", flush=True)
    line = sys.stdin.readline()
    return line.rstrip("\n") if line else None
