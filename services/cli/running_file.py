"""Where the cluster of this user runs: a small file that `up` writes and other commands read.

Invariants: the file names a process that lives, or it is ignored; it is written whole or not at
all. With it, `streetcar chat` needs no address.

Shell: one file in the cache directory.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from typing import Final

from services.runtime.problem import Problem
from services.runtime.settings import Settings

_FILE_NAME: Final = "running.json"
_MAX_BYTES: Final = 4096


@dataclass(frozen=True, slots=True)
class RunningCluster:
    """Addresses of a cluster, the name of its model, and the process that supervises it."""

    nats_url: str
    http_url: str
    model: str
    pid: int


def remember(settings: Settings, cluster: RunningCluster) -> None:
    """Write the file; the newest cluster wins. Where it cannot be written, nobody is told."""
    path = settings.cache_path / _FILE_NAME
    partial = path.with_suffix(f".{cluster.pid}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(asdict(cluster)))
        partial.replace(path)
    except OSError:
        # A convenience only: the addresses are on the screen.
        return


def forget(settings: Settings, pid: int) -> None:
    """Remove the file if it is that of `pid`."""
    found = _read(settings)
    if found is not None and found.pid == pid:
        (settings.cache_path / _FILE_NAME).unlink(missing_ok=True)


def find_cluster(settings: Settings) -> RunningCluster:
    """The bus named by the settings, else the cluster that `up` started last. Raises Problem."""
    if settings.nats_url:
        return RunningCluster(settings.nats_url, "", settings.served_name, 0)
    found = _read(settings)
    if found is None or not _is_alive(found.pid):
        raise Problem(
            "E107",
            "No cluster found",
            cause="no `streetcar up` of this user runs here, and no bus was named",
            fix="streetcar up   or   --nats nats://HOST:4222   or   STREETCAR_NATS_URL",
        )
    return found


def _read(settings: Settings) -> RunningCluster | None:
    try:
        with (settings.cache_path / _FILE_NAME).open("rb") as file:
            return RunningCluster(**json.loads(file.read(_MAX_BYTES)))
    except (OSError, ValueError, TypeError):
        return None


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
