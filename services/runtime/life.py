"""One process of a service, from its start to its end.

Invariants: it does not outlive this process; what it says is heard to the last line before its end
is told; who is told to end is killed where it does not within its time, however early it was told.

A child speaks JSON lines on standard output (`services.runtime.log.report_*`): `ready`, `progress`,
`leaving`, `fatal`. Its standard error goes to the service's log.

Shell: a process, pipes.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Literal

import msgspec

from services.runtime.bounded_log import BoundedLog
from services.runtime.launch import launch_command

DRAIN_TIMEOUT_S: Final = 1.0
MAX_LINE_BYTES: Final = 64 * 1024
MAX_WORDS: Final = 300
_READ_BYTES: Final = 64 * 1024


class Status(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One status line of a child, as `services.runtime.log` writes it."""

    event: Literal["ready", "progress", "leaving", "fatal"]
    fields: dict[str, str | int | float] = {}
    fraction: float = 0.0
    text: str = ""
    code: str = "E401"
    message: str = ""
    fix: str = ""


class Life:
    """A process that runs, or is being made. `task` ends with it, and says how.

    was_ready: it has said that it serves; leaving: that it takes nothing new. left: set where it
    makes room for its successor.
    verdict: why it was killed, where that was our own doing.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        log: BoundedLog,
        on_status: Callable[[Life, Status], None],
        pass_fds: Sequence[int] = (),
    ) -> None:
        """on_status: hears every status line. pass_fds: open files that it inherits."""
        self.was_ready = False
        self.leaving = False
        self.left = asyncio.Event()
        self.verdict = ""
        self._log = log
        self._on_status = on_status
        self._process: asyncio.subprocess.Process | None = None
        self._told: signal.Signals | None = None
        self.task = asyncio.create_task(self._live(command, environment, pass_fds))

    @property
    def pid(self) -> int | None:
        """None before it is there, and after its end."""
        process = self._process
        return process.pid if process is not None and process.returncode is None else None

    def send(self, number: signal.Signals) -> None:
        if self.pid is not None and self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    async def end(self, number: signal.Signals, timeout_s: float) -> None:
        """Tell it to end, and wait for that; SIGKILL where it takes longer than `timeout_s`."""
        self._told = number
        self.send(number)
        done, _ = await asyncio.wait({self.task}, timeout=timeout_s)
        if not done:
            self._told = signal.SIGKILL
            self.send(signal.SIGKILL)
            await asyncio.wait({self.task})

    async def _live(
        self, command: Sequence[str], environment: Mapping[str, str], pass_fds: Sequence[int]
    ) -> str:
        """Run the process to its end: how it ended."""
        try:
            process = await asyncio.create_subprocess_exec(
                *launch_command(command),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                limit=MAX_LINE_BYTES,
                env=environment,
                pass_fds=tuple(pass_fds),
                # Ctrl-C in a terminal reaches the supervisor alone, which stops in order.
                start_new_session=True,
            )
        except OSError as error:
            return f"cannot start: {error.strerror}"
        self._process = process
        if self._told is not None:
            # While it was being made; it has no handler for SIGINT yet.
            self.send(signal.SIGTERM if self._told is signal.SIGINT else self._told)
        assert process.stdout is not None
        assert process.stderr is not None
        readers = asyncio.gather(self._read_status(process.stdout), self._read_log(process.stderr))
        try:
            code = await process.wait()
            # A grandchild may hold the pipes open; what the service itself wrote is there by now.
            await asyncio.wait({readers}, timeout=DRAIN_TIMEOUT_S)
        finally:
            readers.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await readers
        return self._why(code)

    def _why(self, code: int) -> str:
        """Why it ended: our own verdict, or its status and, of a failure, its last words."""
        if self.verdict:
            return self.verdict
        words = self._log.tail()[-1:] if code > 0 else []
        return "; its last words: ".join([how_ended(code), *(w[:MAX_WORDS] for w in words)])

    async def _read_status(self, stream: asyncio.StreamReader) -> None:
        decoder = msgspec.json.Decoder(Status)
        while True:
            try:
                line = await stream.readline()
            except ValueError:
                # Longer than a status line can be: something else prints; drop what was read.
                continue
            if not line:
                return
            try:
                status = decoder.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError):
                self._log.write(line)
                continue
            self.was_ready = self.was_ready or status.event == "ready"
            self.leaving = self.leaving or status.event == "leaving"
            self._on_status(self, status)

    async def _read_log(self, stream: asyncio.StreamReader) -> None:
        while chunk := await stream.read(_READ_BYTES):
            self._log.write(chunk)


def how_ended(code: int) -> str:
    """A process's end, by its return code (negative: the signal that ended it)."""
    if code >= 0:
        return f"it exited with {code}"
    try:
        return f"it was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"it was ended by signal {-code}"
