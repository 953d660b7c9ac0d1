"""Real child processes, played by small scripts."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from services.runtime import bounded_log, life, restarts
from services.runtime import supervisor as module
from services.runtime.supervisor import (
    ServiceFailure,
    ServiceSpec,
    Supervisor,
    SupervisorEvent,
)

ROOT = Path(module.__file__).parents[2]

GOOD = """
import signal, sys
from services.runtime.log import report_progress, report_ready
bye = lambda *_: (print("bye", file=sys.stderr), sys.exit(0))
for number in (signal.SIGTERM, signal.SIGINT): signal.signal(number, bye)
report_progress(0.5, "half")
print("not a status line", flush=True)
report_ready(port=1234)
signal.pause()
"""
FATAL = """
from services.runtime.log import report_fatal
report_fatal("E301", "x.gguf is truncated", "pull it again")
raise SystemExit(1)
"""
BROKEN = """
import sys
print("the reason is here", file=sys.stderr)
sys.exit(3)
"""
STUBBORN = """
import signal
from services.runtime.log import report_ready
for number in (signal.SIGTERM, signal.SIGINT): signal.signal(number, signal.SIG_IGN)
report_ready()
while True: signal.pause()
"""
DRAINING = """
import os, signal, sys
def say(event): os.write(1, b'{"event": "%s"}\\n' % event.encode())
signal.signal(signal.SIGTERM, lambda *_: say("leaving"))
for number in (signal.SIGUSR1, signal.SIGINT): signal.signal(number, lambda *_: sys.exit(0))
say("ready")
while True: signal.pause()
"""
"""Ends its work at SIGUSR1, or at once where all end."""
FATAL_LATER = """
import signal, sys
from services.runtime.log import report_fatal, report_ready
signal.signal(signal.SIGUSR1, lambda *_: (report_fatal("E301", "gone"), sys.exit(1)))
report_ready()
while True: signal.pause()
"""


class _Recorder:
    def __init__(self) -> None:
        self.events: list[SupervisorEvent] = []
        self._changed = asyncio.Event()

    def __call__(self, event: SupervisorEvent) -> None:
        self.events.append(event)
        self._changed.set()

    def kinds(self, service: str) -> list[str]:
        return [event.kind for event in self.events if event.service == service]

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not condition():
                self._changed.clear()
                await self._changed.wait()


def _make(
    tmp_path: Path, *, beside: bool = False, drain_s: float = 30.0, **scripts: str
) -> tuple[Supervisor, _Recorder]:
    recorder = _Recorder()
    specs = [
        ServiceSpec(name, (sys.executable, "-c", code), beside=beside, drain_s=drain_s)
        for name, code in scripts.items()
    ]
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)}
    made = Supervisor(specs, environment=environment, run_dir=tmp_path, observer=recorder)
    return made, recorder


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def _stopped(run: Awaitable[None]) -> None:
    async with asyncio.timeout(15):
        await run


async def test_services_become_ready_and_stop_in_order(tmp_path: Path) -> None:
    supervisor, recorder = _make(tmp_path, gateway=GOOD, worker=GOOD, kv_store=GOOD)
    await supervisor.start()
    pids = supervisor.pids
    assert set(pids) == {"gateway", "worker", "kv_store"}
    assert supervisor.ready_fields("gateway") == {"port": 1234}
    assert ("progress", "half", 0.5) in [(e.kind, e.text, e.fraction) for e in recorder.events]
    await _stopped(supervisor.stop())
    assert not any(map(_alive, pids.values()))
    ends = [(e.service, e.kind) for e in recorder.events if e.kind in {"stopping", "stopped"}]
    assert ends == [
        (name, kind)
        for name in ("gateway", "worker", "kv_store")
        for kind in ("stopping", "stopped")
    ]
    log = (tmp_path / "worker.log").read_text()
    assert "not a status line" in log
    assert "bye" in log


async def test_killed_service_comes_back_and_says_why(tmp_path: Path) -> None:
    supervisor, recorder = _make(tmp_path, worker=GOOD, gateway=GOOD)
    await supervisor.start()
    before = supervisor.pids
    os.kill(before["worker"], signal.SIGKILL)
    await recorder.until(lambda: recorder.kinds("worker").count("ready") == 2)
    assert supervisor.pids["worker"] != before["worker"]
    assert supervisor.pids["gateway"] == before["gateway"]
    died = next(e for e in recorder.events if e.kind == "died")
    assert "SIGKILL" in died.text
    await _stopped(supervisor.stop())


async def test_fatal_report_ends_the_start_with_its_message(tmp_path: Path) -> None:
    supervisor, recorder = _make(tmp_path, gateway=GOOD, worker=FATAL)
    with pytest.raises(ServiceFailure) as caught:
        await supervisor.start()
    assert caught.value.code == "E301"
    assert caught.value.cause == "x.gguf is truncated"
    assert caught.value.fix == "pull it again"
    await _stopped(supervisor.stop())
    assert recorder.kinds("worker").count("starting") == 1
    assert supervisor.pids == {}


async def test_crash_loop_is_given_up_with_the_end_of_the_log(tmp_path: Path) -> None:
    supervisor, recorder = _make(tmp_path, worker=BROKEN)
    with pytest.raises(ServiceFailure) as caught:
        await supervisor.start()
    assert "exited with 3" in caught.value.cause
    assert "the reason is here" in caught.value.cause
    assert recorder.kinds("worker").count("starting") == 5
    await _stopped(supervisor.stop())


async def test_service_that_ignores_sigterm_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "STOP_TIMEOUT_S", 0.2)
    supervisor, _ = _make(tmp_path, worker=STUBBORN)
    await supervisor.start()
    pid = supervisor.pids["worker"]
    await _stopped(supervisor.stop())
    assert not _alive(pid)


async def test_kill_ends_all_at_once(tmp_path: Path) -> None:
    supervisor, _ = _make(tmp_path, worker=STUBBORN, gateway=GOOD)
    await supervisor.start()
    pids = supervisor.pids
    supervisor.kill()
    await _stopped(supervisor.stop())
    assert not any(map(_alive, pids.values()))


async def test_failure_while_running_wakes_the_waiter(tmp_path: Path) -> None:
    supervisor, _ = _make(tmp_path, worker=FATAL_LATER)
    await supervisor.start()
    waiter = asyncio.create_task(supervisor.wait())
    os.kill(supervisor.pids["worker"], signal.SIGUSR1)
    async with asyncio.timeout(10):
        failure = await waiter
    assert failure.cause == "gone"
    await _stopped(supervisor.stop())


async def test_children_die_with_a_killed_supervisor(tmp_path: Path) -> None:
    script = f"""
import asyncio, os, pathlib, sys
from services.runtime.supervisor import ServiceSpec, Supervisor
async def main():
    spec = ServiceSpec("worker", (sys.executable, "-c", {STUBBORN!r}))
    made = Supervisor([spec], environment=os.environ, run_dir=pathlib.Path(sys.argv[1]),
                      observer=lambda event: None)
    await made.start()
    print(made.pids["worker"], flush=True)
    await made.wait()
asyncio.run(main())
"""
    parent = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        script,
        str(tmp_path),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert parent.stdout is not None
    pid = int(await parent.stdout.readline())
    assert _alive(pid)
    parent.kill()
    await parent.wait()
    async with asyncio.timeout(5):
        while _is_running(pid):
            await asyncio.sleep(0)


def _is_running(pid: int) -> bool:
    """Alive and not a zombie that waits for a reaper."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def test_log_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_log, "MAX_LOG_BYTES", 10_000)
    monkeypatch.setattr(life, "_READ_BYTES", 1000)
    fill = "print(('y' * 99 + chr(10)) * 15, file=sys.stderr, flush=True)\n"
    noisy = GOOD.replace("report_ready(", fill * 30 + "report_ready(")
    supervisor, _ = _make(tmp_path, worker=noisy)
    await supervisor.start()
    await _stopped(supervisor.stop())
    sizes = [file.stat().st_size for file in tmp_path.iterdir()]
    assert len(sizes) == 2
    assert max(sizes) <= 10_000


async def test_a_restart_on_demand_is_no_death(tmp_path: Path) -> None:
    supervisor, recorder = _make(tmp_path, worker=GOOD, gateway=STUBBORN)
    await supervisor.start()
    before = supervisor.pids
    for _ in range(6):
        await supervisor.restart("worker")
    assert supervisor.pids["worker"] != before["worker"]
    assert supervisor.pids["gateway"] == before["gateway"]
    assert not {"died", "restarting", "failed"} & set(recorder.kinds("worker"))
    assert recorder.kinds("worker").count("ready") == 7
    await _stopped(supervisor.stop())


async def test_a_service_that_does_not_stop_is_killed_and_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "STOP_TIMEOUT_S", 0.2)
    supervisor, recorder = _make(tmp_path, worker=STUBBORN)
    await supervisor.start()
    await supervisor.restart("worker")
    assert recorder.kinds("worker").count("ready") == 2
    await _stopped(supervisor.stop())


async def test_a_hung_service_is_killed_and_says_so(tmp_path: Path) -> None:
    supervisor, recorder = _make(tmp_path, worker=GOOD)
    await supervisor.start()
    os.kill(supervisor.pids["worker"], signal.SIGSTOP)
    supervisor.end_hung("worker", "it hung")
    await recorder.until(lambda: recorder.kinds("worker").count("ready") == 2)
    (died,) = [e for e in recorder.events if e.kind == "died"]
    assert died.text == "it hung"
    await _stopped(supervisor.stop())


async def test_a_death_says_its_last_words(tmp_path: Path) -> None:
    supervisor, recorder = _make(tmp_path, worker=BROKEN)
    with pytest.raises(ServiceFailure):
        await supervisor.start()
    died = next(e for e in recorder.events if e.kind == "died")
    assert died.text == "it exited with 3; its last words: the reason is here"
    await _stopped(supervisor.stop())


# ---- replaced beside its successor


async def test_a_successor_is_ready_before_the_one_before_it_is_told(tmp_path: Path) -> None:
    supervisor, recorder = _make(tmp_path, beside=True, gateway=DRAINING)
    await supervisor.start()
    old = supervisor.pids["gateway"]
    await supervisor.restart("gateway")
    new = supervisor.pids["gateway"]
    assert new != old and _is_running(old)
    kinds = recorder.kinds("gateway")
    assert kinds == ["starting", "ready", "starting", "ready", "draining"]
    os.kill(old, signal.SIGUSR1)
    await recorder.until(lambda: recorder.kinds("gateway")[-1] == "drained")
    assert recorder.events[-1].text == "it exited with 0"
    assert supervisor.pids["gateway"] == new
    await _stopped(supervisor.stop())


async def test_who_leaves_by_itself_is_replaced_at_once(tmp_path: Path) -> None:
    """SIGTERM from anybody; that it ends later is no death."""
    supervisor, recorder = _make(tmp_path, beside=True, gateway=DRAINING)
    await supervisor.start()
    old = supervisor.pids["gateway"]
    os.kill(old, signal.SIGTERM)
    await recorder.until(lambda: recorder.kinds("gateway").count("ready") == 2)
    assert supervisor.pids["gateway"] != old and _is_running(old)
    await _stopped(supervisor.stop())
    assert not _is_running(old), "a stop does not wait for a drain"
    assert "died" not in recorder.kinds("gateway")


async def test_a_drain_has_an_end(tmp_path: Path) -> None:
    supervisor, recorder = _make(tmp_path, beside=True, drain_s=0.2, gateway=DRAINING)
    await supervisor.start()
    await supervisor.restart("gateway")
    await recorder.until(lambda: recorder.kinds("gateway")[-1] == "drained")
    assert recorder.events[-1].text == "it was ended by SIGKILL"
    await _stopped(supervisor.stop())


async def test_only_so_many_drain_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_DRAINING", 1)
    supervisor, recorder = _make(tmp_path, beside=True, gateway=DRAINING)
    await supervisor.start()
    first = supervisor.pids["gateway"]
    await supervisor.restart("gateway")
    second = supervisor.pids["gateway"]
    await supervisor.restart("gateway")
    await recorder.until(lambda: "drained" in recorder.kinds("gateway"))
    assert not _is_running(first) and _is_running(second)
    await _stopped(supervisor.stop())
    assert not _is_running(second)


async def test_a_successor_that_dies_first_is_tried_again_while_the_old_one_serves(
    tmp_path: Path,
) -> None:
    marker = tmp_path / "marker"
    late = f"""
import pathlib, sys
marker = pathlib.Path({str(marker)!r})
lives = marker.read_text() if marker.exists() else ""
marker.write_text(lives + "x")
if len(lives) == 1: sys.exit(3)
{DRAINING}
"""
    supervisor, recorder = _make(tmp_path, beside=True, gateway=late)
    await supervisor.start()
    old = supervisor.pids["gateway"]
    await supervisor.restart("gateway")
    assert _is_running(old)
    kinds = recorder.kinds("gateway")
    assert kinds[2:] == ["starting", "died", "restarting", "starting", "ready", "draining"]
    await _stopped(supervisor.stop())


@pytest.mark.parametrize("ending", ["fatal", "crash"])
async def test_a_successor_that_cannot_run_leaves_the_old_one_in_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    monkeypatch.setattr(restarts, "MAX_FAILED_STARTS", 2)
    broken = tmp_path / "broken"
    last_words = '{"event": "fatal", "message": "no"}' if ending == "fatal" else "no"
    script = f"""
import os, sys
if os.path.exists({str(broken)!r}): print({last_words!r}, flush=True); sys.exit(1)
{DRAINING}
"""
    supervisor, recorder = _make(tmp_path, beside=True, gateway=script)
    await supervisor.start()
    old = supervisor.pids["gateway"]
    broken.touch()
    with pytest.raises(ServiceFailure) as caught:
        await supervisor.restart("gateway")
    assert "no" in caught.value.cause
    assert supervisor.pids["gateway"] == old and _is_running(old)
    assert recorder.kinds("gateway")[-2:] == ["failed", "ready"]
    broken.unlink()
    await supervisor.restart("gateway")
    assert supervisor.pids["gateway"] != old
    os.kill(supervisor.pids["gateway"], signal.SIGKILL)
    await recorder.until(lambda: recorder.kinds("gateway")[-1] == "ready")
    await _stopped(supervisor.stop())
