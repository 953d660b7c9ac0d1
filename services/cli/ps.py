"""`streetcar ps`: the services on the bus, and what they carry.

Shell: listens to heartbeats for a moment.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

import msgspec

from services.cli.output import print_json
from services.cli.requests import RequestOptions, cluster_of
from services.runtime.bus_url import without_password
from services.runtime.problem import Problem

if TYPE_CHECKING:
    from services.contracts.beats import Beat

LISTEN_S: Final = 0.8
"""Three periods of the heartbeat, and a little."""


def ps(options: RequestOptions | None = None, *, json: bool = False) -> int:
    """Show the services that are alive: kind, id, epoch, load.

    Parameters
    ----------
    json
        Print one object per service.
    """
    settings, cluster, _ = cluster_of(options or RequestOptions())
    beats = asyncio.run(listen(cluster.watch_url, settings.subject_prefix))
    for beat in sorted(beats, key=lambda b: (b.kind, b.service_id)):
        if json:
            print_json(_as_dict(beat))
        else:
            epochs = f"generation {beat.generation} epoch {beat.epoch}"
            print(f"{beat.kind:<12} {beat.service_id:<18} {epochs:<24} {_load(beat)}".rstrip())
    if not beats:
        bus = without_password(cluster.nats_url)
        raise Problem("E203", "No service is alive", cause=f"no heartbeat on {bus}")
    return 0


async def listen(url: str, prefix: str, seconds: float = LISTEN_S) -> list[Beat]:
    """The last heartbeat of every service heard within `seconds`. Raises Problem."""
    from services.cli.bus import connect
    from services.contracts.beats import Beat
    from services.contracts.codec import Decoder
    from services.contracts.errors import WireError
    from services.contracts.subjects import Subjects

    decoder = Decoder(Beat)
    heard: dict[tuple[str, str], Beat] = {}

    async def on_beat(message: Any) -> None:
        try:
            beat = decoder.decode(message.data)
        except WireError:
            # Of another version of Streetcar on the same bus.
            return
        heard[beat.kind, beat.service_id] = beat

    async with connect(url) as client:
        await client.subscribe(Subjects(prefix).any_beat(), cb=on_beat)
        await asyncio.sleep(seconds)
    return list(heard.values())


def _as_dict(beat: Beat) -> dict[str, Any]:
    """The heartbeat with its field names, which the wire leaves out."""
    whole = msgspec.structs.asdict(beat)
    parts = {
        name: msgspec.structs.asdict(value)
        for name, value in whole.items()
        if isinstance(value, msgspec.Struct)
    }
    pools = [msgspec.structs.asdict(pool) for pool in beat.pools]
    streams = {mark.name: mark.number for mark in beat.streams}
    return {**whole, **parts, "pools": pools, "streams": streams}


def _load(beat: Beat) -> str:
    if beat.engine is not None:
        load = beat.engine
        blocks = f"{load.num_blocks_held}/{load.num_blocks_total} blocks"
        return f"{load.model}  {load.num_running} running  {load.num_waiting} waiting  {blocks}"
    if beat.admission is not None:
        return f"{beat.admission.num_open} open  serves {', '.join(beat.admission.models)}"
    if beat.worker is not None:
        return f"{beat.worker.model}  step {beat.worker.last_step_id}"
    pools = [f"{p.num_free} free {p.num_leased} leased {p.num_cached} cached" for p in beat.pools]
    return ", ".join(pools)
