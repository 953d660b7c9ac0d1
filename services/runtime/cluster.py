"""One whole cluster on this machine: the bus, then all services, under one supervisor.

Invariants: everything that was started is stopped, services first and the bus last; an embedded
bus that dies comes back on the same port; every service has a user of that bus for itself, whose
password it finds in its environment; `start` returns only when the gateway says that it can serve
(routes, a worker, blocks).

Shell: processes, a temporary directory, loopback HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Self
from urllib.parse import urlsplit

import services
from services.contracts.beats import ServiceKind
from services.contracts.permissions import User
from services.contracts.subjects import Subjects
from services.runtime.bus_access import BusAccess
from services.runtime.bus_url import is_loopback
from services.runtime.life import how_ended
from services.runtime.listener import listen, url_of
from services.runtime.nats_server import (
    NatsServer,
    NatsServerError,
    require_server,
)
from services.runtime.private_file import write_private
from services.runtime.problem import Problem
from services.runtime.restarts import RestartPolicy
from services.runtime.settings import (
    ADMISSION_ID_VARIABLE,
    ENV_PREFIX,
    HTTP_FD_VARIABLE,
    NATS_URL_VARIABLE,
    Settings,
)
from services.runtime.supervisor import (
    STOP_TIMEOUT_S,
    Observer,
    ServiceFailure,
    ServiceSpec,
    Supervisor,
    SupervisorEvent,
    waited_for_processor_s,
)
from services.runtime.watcher import Watcher

BUS: Final = "nats"
GATEWAY: Final = "gateway"
ADMISSION: Final = "admission"
MODULES: Final = {
    GATEWAY: "services.gateway",
    ADMISSION: "services.admission",
    "scheduler": "scheduler_svc",
    "worker": "gpu_worker",
    "kv_store": "kv_store",
}
"""Module of each service, in the order in which they stop."""

USERS: Final = {
    GATEWAY: User.GATEWAY,
    ADMISSION: User.ADMISSION,
    "scheduler": User.SCHEDULER,
    "worker": User.GPU_WORKER,
    "kv_store": User.KV_STORE,
}
"""Who each of them is on the bus."""

BESIDE: Final = frozenset({GATEWAY, ADMISSION})
"""Those whose successor starts while they still serve. The others own something that only one may
have: an epoch, the ledger, a device's memory.
"""

READYZ_TIMEOUT_S: Final = 60.0
END_TIMEOUT_S: Final = 5.0
"""For a task that was cancelled: libraries that use `wait_for` of Python 3.11 may lose that."""
_READYZ_PERIOD_S: Final = 0.05
_READYZ_REQUEST: Final = b"GET /readyz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


class Cluster:
    """The services of `settings` as processes. `async with Cluster(...) as cluster: ...`."""

    def __init__(self, settings: Settings, observer: Observer) -> None:
        """`observer` hears of every start, progress, death and stop; it must not raise."""
        self._settings = settings
        self._observer = observer
        self._temporary = "" if settings.run_dir else tempfile.mkdtemp(prefix="streetcar-")
        self._run_dir = Path(settings.run_dir or self._temporary)
        self._access = BusAccess.draw(
            Subjects(settings.subject_prefix), anonymous=is_loopback(settings.nats_host)
        )
        self._bus: NatsServer | None = None
        self._bus_task: asyncio.Task[None] | None = None
        self._bus_verdict = ""
        self._bus_failure: asyncio.Future[ServiceFailure] | None = None
        self._listener: socket.socket | None = None
        self._supervisor: Supervisor | None = None
        self._watcher = Watcher(self._beating(), self._on_hung, self._on_bus_hung, self._waited_s)
        self._watch_task: asyncio.Task[None] | None = None
        self._failed = False
        self._ending = False
        self._stopped = False

    @property
    def run_dir(self) -> Path:
        """Where the logs are. A temporary one is removed at a clean stop, kept at a failure."""
        return self._run_dir

    @property
    def nats_url(self) -> str:
        """Where clients connect; on loopback they need no password."""
        return self._settings.nats_url or self._running_bus().url

    @property
    def observer_url(self) -> str:
        """The bus with the right to hear heartbeats and steps: a secret."""
        return self._url_of(User.OBSERVER)

    @property
    def http_url(self) -> str:
        """Where the gateway listens."""
        assert self._listener is not None, "the cluster was never started"
        return url_of(self._listener)

    @property
    def pids(self) -> dict[str, int]:
        """Process ids by service, the embedded bus included."""
        pids = self._running().pids
        return pids if self._bus is None or self._stopped else {BUS: self._bus.pid, **pids}

    async def start(self) -> None:
        """Start everything and wait until requests can be served. Raises Problem."""
        self._bus_failure = asyncio.get_running_loop().create_future()
        try:
            self._listener = listen(self._settings.http_host, self._settings.http_port)
            if self._settings.embedded_nats:
                await self._start_bus()
            else:
                await require_server(self._settings.nats_url)
            self._supervisor = Supervisor(
                self._specs(),
                environment=self._environment(),
                run_dir=self._run_dir,
                observer=self._on_event,
            )
            for number in range(1, self._settings.num_admissions):
                name = _admission(number)
                self._supervisor.pin(name, ADMISSION_ID_VARIABLE, name)
            self._watch_task = asyncio.create_task(
                self._watcher.run(self.observer_url, Subjects(self._settings.subject_prefix)),
                name="watch heartbeats",
            )
            await self._supervisor.start()
            await self._wait_readyz()
        except BaseException as error:
            self._failed = isinstance(error, Problem)
            await self.stop()
            raise

    async def wait(self) -> Problem:
        """What ends the cluster, once something does."""
        assert self._bus_failure is not None, "the cluster was never started"
        services_end = asyncio.ensure_future(self._running().wait())
        ends: set[asyncio.Future[Any]] = {services_end, self._bus_failure}
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            services_end.cancel()
        self._failed = True
        failure: Problem = (
            self._bus_failure.result() if self._bus_failure.done() else services_end.result()
        )
        return failure

    @property
    def services(self) -> tuple[str, ...]:
        """Names of the services, in the order in which a rolling restart takes them."""
        return tuple(reversed(self._names()))

    async def restart(self, names: Sequence[str] = ()) -> None:
        """Each of `names` (all, where none is given) in turn, and on with the next when its
        successor is ready and requests can be served. Raises Problem.
        """
        for name in names or self.services:
            await self._running().restart(name)
            await self._wait_readyz()

    async def stop(self) -> None:
        """Stop the services in order, then the bus. Idempotent."""
        if self._stopped:
            return
        self._ending = True
        if self._watch_task is not None:
            self._watch_task.cancel()
            await asyncio.wait({self._watch_task}, timeout=END_TIMEOUT_S)
        if self._listener is not None:
            # From the gateway's end on, who comes is refused.
            self._listener.close()
        if self._supervisor is not None:
            await self._supervisor.stop()
        if self._bus_task is not None:
            self._bus_task.cancel()
            await asyncio.wait({self._bus_task}, timeout=END_TIMEOUT_S)
        if self._bus is not None:
            await self._bus.stop()
            self._emit_bus("stopped")
        self._stopped = True
        if self._temporary and not self._failed:
            shutil.rmtree(self._temporary, ignore_errors=True)

    def kill(self) -> None:
        """End every process at once; call `stop` after it."""
        if self._supervisor is not None:
            self._supervisor.kill()
        if self._bus_task is not None:
            self._bus_task.cancel()
        if self._bus is not None:
            self._bus.kill()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self.stop()

    def _running(self) -> Supervisor:
        assert self._supervisor is not None, "the cluster was never started"
        return self._supervisor

    def _running_bus(self) -> NatsServer:
        assert self._bus is not None, "the cluster was never started"
        return self._bus

    def _beating(self) -> dict[tuple[ServiceKind, str], str]:
        """Who must be heard on the bus, and what it is called here."""
        settings = self._settings
        admissions = {
            (ServiceKind.ADMISSION, _admission(n) if n else settings.admission_id): _admission(n)
            for n in range(settings.num_admissions)
        }
        return {
            (ServiceKind.GATEWAY, settings.gateway_id): GATEWAY,
            (ServiceKind.SCHEDULER, settings.engine_id): "scheduler",
            (ServiceKind.GPU_WORKER, settings.worker_id): "worker",
            (ServiceKind.KV_STORE, settings.kv_store_id): "kv_store",
            **admissions,
        }

    def _on_hung(self, name: str, silent_s: float) -> None:
        self._running().end_hung(name, f"it hung: no heartbeat for {silent_s:.1f} s, so killed")

    def _waited_s(self, name: str) -> float:
        pid = self._running().pids.get(name)
        return 0.0 if pid is None else waited_for_processor_s(pid)

    def _on_bus_hung(self, silent_s: float) -> None:
        if self._bus is not None:
            self._bus_verdict = f"it hung: no answer for {silent_s:.1f} s, so killed"
            self._bus.kill()

    def _names(self) -> dict[str, str]:
        """Services by the names of their processes, in the order in which they stop."""
        admissions = [_admission(n) for n in range(self._settings.num_admissions)]
        return {
            name: service
            for service in MODULES
            for name in (admissions if service == ADMISSION else [service])
        }

    def _specs(self) -> list[ServiceSpec]:
        return [self._spec(name, service) for name, service in self._names().items()]

    def _spec(self, name: str, service: str) -> ServiceSpec:
        environment = {NATS_URL_VARIABLE: self._url_of(USERS[service])}
        drain_s, pass_fds = STOP_TIMEOUT_S, tuple[int, ...]()
        if service == GATEWAY and self._listener is not None:
            environment[HTTP_FD_VARIABLE] = str(self._listener.fileno())
            drain_s += self._settings.http_drain_s
            pass_fds = (self._listener.fileno(),)
        return ServiceSpec(
            name,
            (sys.executable, "-P", "-m", MODULES[service]),
            environment,
            beside=service in BESIDE,
            drain_s=drain_s,
            pass_fds=pass_fds,
        )

    def _url_of(self, user: User) -> str:
        """The bus as `user`; on one that was running before, as the settings say."""
        address = self.nats_url
        return self._access.url(address, user) if self._settings.embedded_nats else address

    def _environment(self) -> dict[str, str]:
        """The children's environment: ours, with every setting spelled out."""
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(ENV_PREFIX)}
        settings = self._settings.replace(
            "supervisor", nats_url=self.nats_url, nats_port=0, run_dir=str(self._run_dir)
        )
        # `-P` keeps the working directory off the path, where a folder called `kernels` may be.
        root = str(Path(services.__file__).parents[1])
        path = os.pathsep.join(filter(None, [root, inherited.get("PYTHONPATH", "")]))
        return {**inherited, **settings.to_env(), "PYTHONPATH": path}

    async def _start_bus(self) -> None:
        self._emit_bus("starting")
        folder = self._run_dir / "bus"
        self._bus = NatsServer(
            folder,
            host=self._settings.nats_host,
            port=self._settings.nats_port,
            access=self._access,
        )
        await self._bus.start()
        for user in (User.OBSERVER, User.CLIENT):
            write_private(folder / f"{user}.url", self._url_of(user) + "\n")
        self._emit_bus("ready", fields={"url": self._bus.url})
        self._bus_task = asyncio.create_task(self._keep_bus(self._bus), name="supervise nats")

    async def _keep_bus(self, bus: NatsServer) -> None:
        policy = RestartPolicy()
        while True:
            code = await bus.wait()
            if self._ending:
                return
            reason, self._bus_verdict = self._bus_verdict or how_ended(code), ""
            self._emit_bus("died", reason)
            while True:
                delay = policy.on_death(time.monotonic(), was_ready=False)
                if delay is None:
                    self._bus_failed(NatsServerError(f"it keeps dying; last time {reason}"))
                    return
                self._emit_bus("restarting", f"in {delay:.2g} s: {reason}")
                await asyncio.sleep(delay)
                self._emit_bus("starting")
                try:
                    await bus.start()
                    break
                except NatsServerError as error:
                    reason = error.cause
            policy.on_ready()
            self._emit_bus("ready", fields={"url": bus.url})

    def _bus_failed(self, error: NatsServerError) -> None:
        assert self._bus_failure is not None
        failure = ServiceFailure(error.code, error.title, cause=error.cause, fix=error.fix)
        if not self._bus_failure.done():
            self._bus_failure.set_result(failure)

    async def _wait_readyz(self) -> None:
        """Ask the gateway's `/readyz` until it answers 200; the last reason is told if not."""
        parts = urlsplit(self.http_url)
        reason = "no answer"
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(READYZ_TIMEOUT_S):
                while True:
                    status, reason = await _ask(parts.hostname or "", parts.port or 80)
                    if status == 200:
                        return
                    await asyncio.sleep(_READYZ_PERIOD_S)
        raise ServiceFailure(
            "E404",
            "Cluster does not become ready",
            cause=f"/readyz after {READYZ_TIMEOUT_S:g} s: {reason}",
            fix=f"the logs are in {self._run_dir}",
        )

    def _on_event(self, event: SupervisorEvent) -> None:
        if event.kind == "ready":
            self._watcher.heartbeats.expect(event.service)
        elif event.kind in {"starting", "stopping", "died"}:
            self._watcher.heartbeats.forget(event.service)
        self._observer(event)

    def _emit_bus(self, kind: Any, text: str = "", fields: Mapping[str, Any] | None = None) -> None:
        self._observer(SupervisorEvent(BUS, kind, text, None, fields or {}))


def _admission(number: int) -> str:
    """Name of the admission process `number`; the first has the name of the service."""
    return f"{ADMISSION}-{number}" if number else ADMISSION


async def _ask(host: str, port: int) -> tuple[int, str]:
    """Status and body (at most 2,000 characters) of one GET /readyz; status 0 if none came."""
    connect_host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    try:
        reader, writer = await asyncio.open_connection(connect_host, port)
    except OSError as error:
        return 0, str(error.strerror or error)
    try:
        writer.write(_READYZ_REQUEST)
        answer = await reader.read()
        head, _, body = answer.partition(b"\r\n\r\n")
        parts = head.split(b" ", 2)
        status = int(parts[1]) if len(parts) > 1 and parts[1].isdigit() else 0
        return status, body.decode(errors="replace")[:2000]
    except OSError as error:
        return 0, str(error.strerror or error)
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
