"""`streetcar health`: whether a service of a kind is alive on the bus, for container checks.

Shell: one connection, one heartbeat.
"""

from __future__ import annotations

import asyncio
import time
from typing import Final

from services.cli.options import ClusterOptions
from services.cli.output import print_json
from services.cli.running_file import find_cluster
from services.runtime.problem import Problem

BEAT_TIMEOUT_S: Final = 3.0


def health(kind: str, options: ClusterOptions | None = None, *, json: bool = False) -> int:
    """Wait for one heartbeat of a service of this kind; status 1 if none comes.

    Parameters
    ----------
    kind
        admission, scheduler, kv_store, gpu_worker or gateway.
    json
        Print the result as one object.
    """
    settings = (options or ClusterOptions()).settings()
    if not settings.nats_url:
        raise Problem(
            "E107",
            "No bus to ask",
            cause="a heartbeat is heard on a running bus",
            fix="--nats nats://HOST:4222   or   STREETCAR_NATS_URL",
        )
    url = find_cluster(settings).watch_url
    waited = asyncio.run(_wait_for_beat(url, settings.subject_prefix, kind))
    if json:
        print_json({"kind": kind, "alive": True, "waited_s": round(waited, 3)})
    else:
        print(f"{kind} is alive: a heartbeat after {waited:.2f} s")
    return 0


async def _wait_for_beat(url: str, prefix: str, kind: str) -> float:
    import nats.errors

    from services.cli.bus import connect
    from services.contracts.beats import ServiceKind
    from services.contracts.subjects import Subjects

    if kind not in list(ServiceKind):
        kinds = ", ".join(ServiceKind)
        raise Problem("E107", "No such kind of service", cause=repr(kind), fix=f"one of {kinds}")
    async with connect(url) as client:
        started = time.monotonic()
        try:
            beats = await client.subscribe(Subjects(prefix).any_beat(kind))
            await beats.next_msg(timeout=BEAT_TIMEOUT_S)
        except nats.errors.TimeoutError:
            raise Problem(
                "E203",
                "Service is not alive",
                cause=f"no heartbeat of a {kind} within {BEAT_TIMEOUT_S:g} s",
            ) from None
    return time.monotonic() - started
