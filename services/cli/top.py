"""`streetcar top`: engines, lanes, queue, KV and the last steps, live.

Shell: listens to heartbeats and StepEvents; draws on the terminal.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Annotated, Any, Final

from cyclopts import Parameter

from services.cli.output import print_json
from services.cli.running_file import find_cluster
from services.runtime.problem import Problem
from services.runtime.settings import load

if TYPE_CHECKING:
    from services.cli.board import Board

LISTEN_S: Final = 0.8
"""Three periods of the heartbeat, and a little: who is not heard in it is not there."""

FRAMES_PER_S: Final = 4


def top(
    *,
    nats_url: Annotated[str | None, Parameter(name="--nats", help="bus of the cluster")] = None,
    once: bool = False,
    json: bool = False,
) -> int:
    """Watch the engines: lanes, queue, KV blocks, the last steps. Ctrl-C ends it.

    Parameters
    ----------
    once
        Listen for a second, print, and end.
    json
        Print one object per engine instead, every second; with --once, once.
    """
    settings = load(flags={} if nats_url is None else {"nats_url": nats_url})
    url = find_cluster(settings).watch_url
    # Ctrl-C is how one leaves it, and no failure.
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_watch(url, settings.subject_prefix, once=once, as_json=json))
    return 0


async def _watch(url: str, prefix: str, *, once: bool, as_json: bool) -> None:
    async with _listening(url, prefix) as board:
        await asyncio.sleep(LISTEN_S)
        if once or as_json:
            if once and not board.engines(time.monotonic_ns()):
                raise Problem("E203", "No engine is alive", cause=board.nothing())
            while True:
                _print(board, as_json=as_json)
                if once:
                    return
                await asyncio.sleep(1.0)
        await _live(board)


def _print(board: Board, *, as_json: bool) -> None:
    if as_json:
        for engine in board.as_dicts(time.monotonic_ns()):
            print_json(engine)
        return
    from rich.console import Console

    Console(highlight=False).print(board.render(time.monotonic_ns()))


async def _live(board: Board) -> None:
    """Until Ctrl-C; where no terminal is, one page a second."""
    from rich.live import Live

    with Live(board.render(time.monotonic_ns()), auto_refresh=False, screen=False) as live:
        while True:
            await asyncio.sleep(1.0 / FRAMES_PER_S)
            live.update(board.render(time.monotonic_ns()), refresh=True)


@contextlib.asynccontextmanager
async def _listening(url: str, prefix: str) -> AsyncIterator[Board]:
    """A board that hears the mesh. Raises Problem."""
    from services.cli.board import Board
    from services.cli.bus import connect
    from services.contracts.beats import Beat
    from services.contracts.codec import Decoder
    from services.contracts.errors import WireError
    from services.contracts.step import StepEvent
    from services.contracts.subjects import Subjects

    board, names = Board(), Subjects(prefix)
    beats, steps = Decoder(Beat), Decoder(StepEvent)

    async def on_beat(message: Any) -> None:
        # Another version of Streetcar may be on the same bus.
        with contextlib.suppress(WireError):
            board.hear_beat(beats.decode(message.data), time.monotonic_ns())

    async def on_step(message: Any) -> None:
        with contextlib.suppress(WireError):
            board.hear_step(steps.decode(message.data), time.monotonic_ns())

    async with connect(url) as client:
        await client.subscribe(names.any_beat(), cb=on_beat)
        await client.subscribe(names.any_steps, cb=on_step)
        yield board
