"""Starts services as child processes, keeps them alive, and stops them in order.

Invariants: no child outlives the supervisor, even one that is killed; a death is followed by a
restart or by the end of the whole, and the reason is told either way; a fatal report ends the
whole with its message; services stop in the order of their specs, each before the next; a service
that is replaced beside its successor is told to end only when that one is ready.

Shell: processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from services.runtime.bounded_log import BoundedLog
from services.runtime.life import Life, Status
from services.runtime.problem import Problem
from services.runtime.restarts import RestartPolicy

READY_TIMEOUT_S: Final = 300.0
STOP_TIMEOUT_S: Final = 5.0
STARTING_STOP_TIMEOUT_S: Final = 0.5
"""For a service that is not ready yet: it serves nobody, and may be loading a model for long."""
MAX_DRAINING: Final = 4
"""Processes of one service that end what they have begun; the oldest of more ends at once."""

EventKind = Literal[
    "starting",
    "progress",
    "ready",
    "died",
    "restarting",
    "failed",
    "draining",
    "drained",
    "stopping",
    "stopped",
]
"""draining, drained: of a process whose successor has taken its place."""


@dataclass(frozen=True, slots=True)
class ServiceSpec:
    """A service to run: its name, its argv, and what it alone has in its environment.

    beside: its successor is started while it still serves. drain_s: how long it may take to end
    what it has begun, once that one is ready. pass_fds: open files that it inherits.
    """

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    beside: bool = False
    drain_s: float = STOP_TIMEOUT_S
    pass_fds: tuple[int, ...] = ()


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
        """Replace one service, and wait until its successor is ready: after its end, or beside it,
        as its spec says. Raises ServiceFailure; where the one before it still serves, it goes on.
        """
        restarted = asyncio.ensure_future(self._services[name].restart())
        ends: set[asyncio.Future[Any]] = {restarted, self._failure}
        try:
            await asyncio.wait(ends, timeout=READY_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
            if self._failure.done():
                raise self._failure.result()
            if not restarted.done():
                raise self._too_slow()
            restarted.result()
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
        # Among the last to stop is the worker, which takes longest to be ready.
        for service in reversed(self._services.values()):
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
            service.kill()

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
    """One supervised service: its process, those that were before it, its restarts, its log."""

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
        self._spec = spec
        self.environment = {**environment, **spec.environment}
        self._log = BoundedLog(run_dir / f"{spec.name}.log")
        self._observer = observer
        self._on_failure = on_failure
        self._policy = RestartPolicy()
        self._life: Life | None = None
        # They still serve, until their successor does; and those that only end what they began.
        self._elders: list[Life] = []
        self._draining: list[Life] = []
        self._endings: set[asyncio.Task[None]] = set()
        self._retired = False
        self._fatal = False
        self._refusal: ServiceFailure | None = None
        self._restart_asked = False
        self._task: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        return None if self._life is None else self._life.pid

    def start(self) -> None:
        self._task = asyncio.create_task(self._keep_alive(), name=f"supervise {self.name}")

    def retire(self) -> None:
        """From now on a death is final."""
        self._retired = True

    def kill(self) -> None:
        for life in self._lives():
            life.send(signal.SIGKILL)

    async def restart(self) -> None:
        """Until the next life is ready. Between two lives there is nothing to end.

        Raises ServiceFailure where it cannot be started; then the life before it goes on.
        """
        life, self._refusal = self._life, None
        if life is not None and not life.task.done():
            self.ready.clear()
            if self._spec.beside and life.was_ready:
                life.left.set()
            else:
                self._restart_asked = True
                self._emit("stopping", "to be started again")
                await life.end(signal.SIGTERM, STOP_TIMEOUT_S)
        await self.ready.wait()
        if self._refusal is not None:
            refusal, self._refusal = self._refusal, None
            raise refusal

    def end_hung(self, reason: str) -> None:
        if self._life is not None:
            self._life.verdict = reason
            self._life.send(signal.SIGKILL)

    async def stop(self) -> None:
        if self._task is None:
            return
        lives = self._lives()
        if lives:
            self._emit("stopping")
            await asyncio.gather(*(self._stop(life) for life in lives))
        if self._life is None or self._life not in lives:
            # Between two lives: there is nothing to end but the wait for the next one.
            self._task.cancel()
        await asyncio.wait({self._task, *self._endings})
        self._task = None
        self._log.close()
        self._emit("stopped")

    async def _stop(self, life: Life) -> None:
        # SIGINT says that nobody takes over; who is still importing has no handler for it.
        number = signal.SIGINT if life.was_ready else signal.SIGTERM
        await life.end(number, STOP_TIMEOUT_S if life.was_ready else STARTING_STOP_TIMEOUT_S)

    def _lives(self) -> list[Life]:
        lives = [*self._draining, *self._elders, *([] if self._life is None else [self._life])]
        return [life for life in lives if not life.task.done()]

    async def _keep_alive(self) -> None:
        reinstated: Life | None = None
        while not self._retired:
            life, reinstated = reinstated or self._begin(), None
            if not await self._ended(life):
                self._elders.append(life)
                continue
            self.ready.clear()
            if self._retired:
                return
            if self._restart_asked:
                self._restart_asked = False
                continue
            if not self._fatal:
                await self._after_death(life)
            if self._fatal:
                if self._refusal is None:
                    return
                reinstated = self._reinstate()

    async def _after_death(self, life: Life) -> None:
        """Until it is time for the next life, where there is to be one."""
        reason = life.task.result()
        self._emit("died", reason)
        delay = self._policy.on_death(time.monotonic(), was_ready=life.was_ready)
        if delay is None:
            self._fail("E403", f"{self.name} keeps dying", self._with_tail(reason))
            return
        self._emit("restarting", f"in {delay:.2g} s: {reason}")
        await asyncio.sleep(delay)

    def _begin(self) -> Life:
        self._emit("starting")
        spec = self._spec
        self._life = Life(spec.command, self.environment, self._log, self._on_status, spec.pass_fds)
        return self._life

    def _reinstate(self) -> Life:
        """The one before goes on in its place, as it has served all the time."""
        self._fatal = False
        self._policy = RestartPolicy()
        life = self._life = self._elders.pop()
        life.left.clear()
        self.ready.set()
        self._emit("ready", fields=self.fields)
        return life

    async def _ended(self, life: Life) -> bool:
        """Until its end; False where it makes room for another one, which is no death, however
        soon its end follows.
        """
        leaving = asyncio.ensure_future(life.left.wait())
        try:
            await asyncio.wait({life.task, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            leaving.cancel()
        if self._retired:
            await asyncio.wait({life.task})
            return True
        return not life.left.is_set()

    def _on_status(self, life: Life, status: Status) -> None:
        if life is not self._life:
            return
        if status.event == "ready":
            self.fields = status.fields
            self._policy.on_ready()
            self.ready.set()
            self._emit("ready", fields=status.fields)
            self._end_elders()
        elif status.event == "progress":
            self._emit("progress", status.text, fraction=status.fraction)
        elif status.event == "leaving":
            if self._spec.beside and not self._retired and not self._restart_asked:
                self.ready.clear()
                life.left.set()
        else:
            self._fail(status.code, f"{self.name} cannot run", status.message, status.fix)

    def _end_elders(self) -> None:
        """Their successor serves: each ends what it has begun, in its own time."""
        while self._elders:
            life = self._elders.pop(0)
            self._draining.append(life)
            who = f"process {life.pid}" if life.pid else "the one before"
            self._emit("draining", f"{who} ends what it has begun")
            self._spawn(self._until_drained(life))
        for life in self._draining[:-MAX_DRAINING]:
            self._spawn(life.end(signal.SIGINT, STOP_TIMEOUT_S))

    async def _until_drained(self, life: Life) -> None:
        await life.end(signal.SIGTERM, self._spec.drain_s)
        self._draining.remove(life)
        self._emit("drained", life.task.result())

    def _spawn(self, ending: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(ending)
        self._endings.add(task)
        task.add_done_callback(self._endings.discard)

    def _fail(self, code: str, title: str, cause: str, fix: str = "") -> None:
        """It cannot run: the end of the whole, where not the one before it still serves."""
        self._fatal = True
        self._emit("failed", cause)
        failure = ServiceFailure(code, title, cause=cause, fix=fix)
        before = self._elders[-1] if self._elders else None
        if before is not None and not before.leaving and not before.task.done():
            self._refusal = failure
        else:
            self._on_failure(failure)

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


def waited_for_processor_s(pid: int) -> float:
    """How long the main thread of `pid` has been ready to run and did not; 0 where nobody says."""
    try:
        # Linux: nanoseconds run, nanoseconds waited, number of turns.
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0
