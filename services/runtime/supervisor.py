"""Starts services as child processes, keeps them alive, and stops them in order.

Invariants: no child outlives the supervisor, even one that is killed; a death is followed by a
restart or by the end of the whole, and the reason is told either way; a fatal report ends the
whole with its message; services stop in the order of their specs, each before the next.

A child speaks JSON lines on standard output (`services.runtime.log.report_*`): `ready`,
`progress`, `fatal`. Its standard error goes to `<run_dir>/<name>.log`, of bounded size.

Shell: processes, pipes, files.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from services.runtime.launch import launch_command
from services.runtime.problem import Problem
from services.runtime.restarts import RestartPolicy

READY_TIMEOUT_S: Final = 300.0
STOP_TIMEOUT_S: Final = 5.0
STARTING_STOP_TIMEOUT_S: Final = 0.5
"""For a service that is not ready yet: it serves nobody, and may be loading a model for long."""
DRAIN_TIMEOUT_S: Final = 1.0
MAX_LOG_BYTES: Final = 4 * 1024 * 1024
MAX_LINE_BYTES: Final = 64 * 1024
TAIL_LINES: Final = 8
MAX_WORDS: Final = 300
_READ_BYTES: Final = 64 * 1024

EventKind = Literal[
    "starting", "progress", "ready", "died", "restarting", "failed", "stopping", "stopped"
]


@dataclass(frozen=True, slots=True)
class ServiceSpec:
    """A service to run: its name, its argv, and what it alone has in its environment."""

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SupervisorEvent:
    """Something happened to a service; `fraction` is in [0, 1] and set for `progress` only."""

    service: str
    kind: EventKind
    text: str = ""
    fraction: float | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)


Observer = Callable[[SupervisorEvent], None]


class ServiceFailure(Problem):
    """A service cannot run; the whole is to be stopped."""


class _Status(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One status line of a child, as `services.runtime.log` writes it."""

    event: Literal["ready", "progress", "fatal"]
    fields: dict[str, str | int | float] = {}
    fraction: float = 0.0
    text: str = ""
    code: str = "E401"
    message: str = ""
    fix: str = ""


class Supervisor:
    """Runs the services of `specs`; they stop in that order and start all at once."""

    def __init__(
        self,
        specs: Sequence[ServiceSpec],
        *,
        environment: Mapping[str, str],
        run_dir: Path,
        observer: Observer,
    ) -> None:
        """`environment` is what all children have, before their own; `observer` must not raise."""
        run_dir.mkdir(parents=True, exist_ok=True)
        self._failure: asyncio.Future[ServiceFailure] = asyncio.get_running_loop().create_future()
        self._services = {
            spec.name: _Service(spec, environment, run_dir, observer, self._on_failure)
            for spec in specs
        }

    @property
    def pids(self) -> dict[str, int]:
        """Process ids by service; only those that run."""
        return {n: s.pid for n, s in self._services.items() if s.pid is not None}

    def ready_fields(self, name: str) -> Mapping[str, Any]:
        """What `name` reported when it became ready last; empty before that."""
        return self._services[name].fields

    async def restart(self, name: str) -> None:
        """SIGTERM to one service, and wait until its successor is ready. Raises ServiceFailure."""
        restarted = asyncio.ensure_future(self._services[name].restart())
        ends: set[asyncio.Future[Any]] = {restarted, self._failure}
        try:
            await asyncio.wait(ends, timeout=READY_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
            if self._failure.done():
                raise self._failure.result()
            if not restarted.done():
                raise self._too_slow()
        finally:
            restarted.cancel()

    def end_hung(self, name: str, reason: str) -> None:
        """SIGKILL to a service that lives and does nothing; it is started again like a dead one."""
        self._services[name].end_hung(reason)

    def pin(self, name: str, variable: str, value: str) -> None:
        """From its next start on, `name` finds `value` in this environment variable."""
        self._services[name].environment[variable] = value

    async def start(self) -> None:
        """Start all services and wait until every one is ready. Raises ServiceFailure."""
        for service in self._services.values():
            service.start()
        all_ready = asyncio.gather(*(s.ready.wait() for s in self._services.values()))
        ends: set[asyncio.Future[Any]] = {all_ready, self._failure}
        try:
            await asyncio.wait(ends, timeout=READY_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
            if self._failure.done():
                raise self._failure.result()
            if not all_ready.done():
                raise self._too_slow()
        finally:
            all_ready.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await all_ready

    async def wait(self) -> ServiceFailure:
        """The failure that ends the whole, once there is one; else this waits for ever."""
        return await asyncio.shield(self._failure)

    async def stop(self) -> None:
        """SIGINT to each service in order, SIGKILL to one that stays. Idempotent."""
        for service in self._services.values():
            service.retire()
        for service in self._services.values():
            await service.stop()
        self._failure.cancel()

    def kill(self) -> None:
        """SIGKILL to all services at once; `stop` then finds them gone."""
        for service in self._services.values():
            service.retire()
            service.send(signal.SIGKILL)

    def _on_failure(self, failure: ServiceFailure) -> None:
        if not self._failure.done():
            self._failure.set_result(failure)

    def _too_slow(self) -> ServiceFailure:
        waiting = [name for name, s in self._services.items() if not s.ready.is_set()]
        return ServiceFailure(
            "E402",
            "Start takes too long",
            cause=f"not ready after {READY_TIMEOUT_S:g} s: {', '.join(waiting)}",
            fix="the logs in the run directory tell what they wait for",
        )


class _Service:
    """One supervised service: its process, its restarts, its log."""

    def __init__(
        self,
        spec: ServiceSpec,
        environment: Mapping[str, str],
        run_dir: Path,
        observer: Observer,
        on_failure: Callable[[ServiceFailure], None],
    ) -> None:
        self.name = spec.name
        self.ready = asyncio.Event()
        self.fields: Mapping[str, Any] = {}
        self._command = launch_command(spec.command)
        self.environment = {**environment, **spec.environment}
        self._log = _BoundedLog(run_dir / f"{spec.name}.log")
        self._observer = observer
        self._on_failure = on_failure
        self._policy = RestartPolicy()
        self._process: asyncio.subprocess.Process | None = None
        self._retired = False
        self._fatal = False
        self._restart_asked = False
        self._verdict = ""
        self._task: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        process = self._process
        return process.pid if process is not None and process.returncode is None else None

    def start(self) -> None:
        self._task = asyncio.create_task(self._keep_alive(), name=f"supervise {self.name}")

    def retire(self) -> None:
        """From now on a death is final."""
        self._retired = True

    def send(self, number: signal.Signals) -> None:
        if self.pid is not None and self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    async def restart(self) -> None:
        """Until the next life is ready. Between two lives there is nothing to end."""
        process = self._process
        if process is not None and self.pid is not None:
            self._restart_asked = True
            self._emit("stopping", "to be started again")
            self.send(signal.SIGTERM)
            try:
                async with asyncio.timeout(STOP_TIMEOUT_S):
                    await process.wait()
            except TimeoutError:
                self.send(signal.SIGKILL)
                await process.wait()
            self.ready.clear()
        await self.ready.wait()

    def end_hung(self, reason: str) -> None:
        self._verdict = reason
        self.send(signal.SIGKILL)

    async def stop(self) -> None:
        if self._task is None:
            return
        if self.pid is None:
            # Between two lives: there is nothing to end but the wait for the next one.
            self._task.cancel()
        else:
            self._emit("stopping")
            # SIGINT says that nobody takes over; who is still importing has no handler for it.
            self.send(signal.SIGINT if self.ready.is_set() else signal.SIGTERM)
        timeout_s = STOP_TIMEOUT_S if self.ready.is_set() else STARTING_STOP_TIMEOUT_S
        done, _ = await asyncio.wait({self._task}, timeout=timeout_s)
        if not done:
            self.send(signal.SIGKILL)
            await asyncio.wait({self._task})
        self._task = None
        self._log.close()
        self._emit("stopped")

    async def _keep_alive(self) -> None:
        while not self._retired:
            self._emit("starting")
            was_ready, reason = await self._live_once()
            if self._retired:
                return
            if self._fatal:
                return
            if self._restart_asked:
                self._restart_asked = False
                continue
            self._emit("died", reason)
            delay = self._policy.on_death(time.monotonic(), was_ready=was_ready)
            if delay is None:
                self._fail("E403", f"{self.name} keeps dying", self._with_tail(reason))
                return
            self._emit("restarting", f"in {delay:.2g} s: {reason}")
            await asyncio.sleep(delay)

    async def _live_once(self) -> tuple[bool, str]:
        """Run the process to its end: whether it was ever ready, and how it ended."""
        try:
            process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                limit=MAX_LINE_BYTES,
                env=self.environment,
                # Ctrl-C in a terminal reaches the supervisor alone, which stops in order.
                start_new_session=True,
            )
        except OSError as error:
            return False, f"cannot start: {error.strerror}"
        self._process = process
        if self._retired:
            # Stopped while the process was being made: `stop` could not see it yet.
            self.send(signal.SIGTERM)
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
        was_ready = self.ready.is_set()
        self.ready.clear()
        return was_ready, self._why(code)

    def _why(self, code: int) -> str:
        """Why it ended: our own verdict, or its status and, of a failure, its last words."""
        verdict, self._verdict = self._verdict, ""
        if verdict:
            return verdict
        words = self._log.tail()[-1:] if code > 0 else []
        return "; its last words: ".join([how_ended(code), *(w[:MAX_WORDS] for w in words)])

    async def _read_status(self, stream: asyncio.StreamReader) -> None:
        decoder = msgspec.json.Decoder(_Status)
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
            self._on_status(status)

    def _on_status(self, status: _Status) -> None:
        if status.event == "ready":
            self.fields = status.fields
            self._policy.on_ready()
            self.ready.set()
            self._emit("ready", fields=status.fields)
        elif status.event == "progress":
            self._emit("progress", status.text, fraction=status.fraction)
        else:
            self._fatal = True
            self._fail(status.code, f"{self.name} cannot run", status.message, status.fix)

    async def _read_log(self, stream: asyncio.StreamReader) -> None:
        while chunk := await stream.read(_READ_BYTES):
            self._log.write(chunk)

    def _fail(self, code: str, title: str, cause: str, fix: str = "") -> None:
        self._emit("failed", cause)
        self._on_failure(ServiceFailure(code, title, cause=cause, fix=fix))

    def _with_tail(self, reason: str) -> str:
        return "\n".join([f"{reason}; the end of {self._log.path}:", *self._log.tail()])

    def _emit(
        self,
        kind: EventKind,
        text: str = "",
        *,
        fraction: float | None = None,
        fields: Mapping[str, Any] | None = None,
    ) -> None:
        self._observer(SupervisorEvent(self.name, kind, text, fraction, fields or {}))


class _BoundedLog:
    """A log file of at most MAX_LOG_BYTES, with the one before it kept as `.1`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("wb")
        self._size = 0
        self._recent: deque[bytes] = deque(maxlen=TAIL_LINES)

    def write(self, chunk: bytes) -> None:
        if self._size + len(chunk) > MAX_LOG_BYTES:
            self._file.close()
            self.path.replace(self.path.with_suffix(".log.1"))
            self._file = self.path.open("wb")
            self._size = 0
        self._file.write(chunk)
        self._file.flush()
        self._size += len(chunk)
        self._recent.extend(chunk.splitlines()[-TAIL_LINES:])

    def tail(self) -> list[str]:
        """The last lines written, shortened."""
        return [line[:400].decode(errors="replace") for line in self._recent]

    def close(self) -> None:
        self._file.close()


def how_ended(code: int) -> str:
    """A process's end, by its return code (negative: the signal that ended it)."""
    if code >= 0:
        return f"it exited with {code}"
    try:
        return f"it was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"it was ended by signal {-code}"


def waited_for_processor_s(pid: int) -> float:
    """How long the main thread of `pid` has been ready to run and did not; 0 where nobody says."""
    try:
        # Linux: nanoseconds run, nanoseconds waited, number of turns.
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0
