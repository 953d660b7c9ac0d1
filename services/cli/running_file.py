"""Where the clusters of this user run: one small file each, which `up` writes and others read.

Invariants: a file names a process that lives, or it is ignored; it is written whole or not at
all, for its owner's eyes only; a cluster removes its own file only. With it, `streetcar chat`
needs no address, and `streetcar ps` no password.

Shell: one directory in the cache directory.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from services.runtime.private_file import write_private
from services.runtime.problem import Problem
from services.runtime.settings import Settings

_DIRECTORY: Final = "running"
_MAX_FILES: Final = 64
_MAX_BYTES: Final = 4096


@dataclass(frozen=True, slots=True)
class RunningCluster:
    """Addresses of a cluster, the name of its model, and the process that supervises it.

    observer_url: the bus with the password of its observer; "" where nats_url is all there is.
    """

    nats_url: str
    http_url: str
    model: str
    pid: int
    observer_url: str = ""

    @property
    def watch_url(self) -> str:
        """The bus for commands that listen: heartbeats, steps, the ledger's books."""
        return self.observer_url or self.nats_url


def remember(settings: Settings, cluster: RunningCluster) -> None:
    """Write the file. Where it cannot be written, nobody is told."""
    path = _path(settings, cluster.pid)
    partial = path.with_suffix(".partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_private(partial, json.dumps(asdict(cluster)))
        partial.replace(path)
    except OSError:
        # A convenience only: the addresses are on the screen.
        return


def forget(settings: Settings, pid: int) -> None:
    """Remove the file of `pid`."""
    with contextlib.suppress(OSError):
        _path(settings, pid).unlink(missing_ok=True)


def find_cluster(settings: Settings) -> RunningCluster:
    """The bus named by the settings, else the youngest cluster that lives. Raises Problem."""
    if url := settings.nats_url:
        named = (c for c in _recorded(settings) if _same(c.nats_url, url) and is_alive(c.pid))
        observer_url = next((c.observer_url for c in named), "")
        return RunningCluster(url, "", settings.served_name, 0, observer_url)
    found = next((c for c in _recorded(settings) if is_alive(c.pid)), None)
    if found is None:
        raise Problem(
            "E107",
            "No cluster found",
            cause="no `streetcar up` of this user runs here, and no bus was named",
            fix="streetcar up   or   --nats nats://HOST:4222   or   STREETCAR_NATS_URL",
        )
    return found


def _same(url: str, other: str) -> bool:
    return url == other.replace("//localhost:", "//127.0.0.1:")


def _path(settings: Settings, pid: int) -> Path:
    return settings.cache_path / _DIRECTORY / f"{pid}.json"


def _recorded(settings: Settings) -> Iterator[RunningCluster]:
    """What the files say, the youngest first."""
    files = list((settings.cache_path / _DIRECTORY).glob("*.json"))[:_MAX_FILES]
    for path in sorted(files, key=_age):
        try:
            with path.open("rb") as file:
                yield RunningCluster(**json.loads(file.read(_MAX_BYTES)))
        except (OSError, ValueError, TypeError):
            continue


def _age(path: Path) -> float:
    try:
        return -path.stat().st_mtime
    except OSError:
        return 0.0


def restart_order(settings: Settings, pid: int) -> Path:
    """Where the names of services lie that the cluster of `pid` is to restart."""
    return _path(settings, pid).with_suffix(".restart")


def restart_failure(settings: Settings, pid: int) -> Path:
    """Where that cluster says why it could not restart them: the fields of a Problem, as JSON."""
    return _path(settings, pid).with_suffix(".restart-failed")


def is_alive(pid: int) -> bool:
    """Whether a process has this id."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
