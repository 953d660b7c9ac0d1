"""`streetcar chaos`: faults on real processes under load, and the proof that nothing was lost.

Shell: processes, the terminal.
"""

from __future__ import annotations

import asyncio
import secrets
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from cyclopts import App

from services.cli.output import print_json
from services.runtime.problem import Problem

if TYPE_CHECKING:
    from services.simulator.drill.run import Found
    from services.simulator.drill.schedule import Fault

app = App(name="chaos", help="Break a mesh of its own on purpose, and check that nothing is lost.")

FULL_KILLS: Final = 210
WIDTH: Final = 24
QUICK_WIDTH: Final = 12
FAULTS_PER_MESH: Final = 66
MAX_SEED: Final = 2**31
FAILED: Final = 3


@app.command
def schedule(*, seed: int, kills: int = FULL_KILLS, quick: bool = False) -> int:
    """Print the faults that a seed stands for, as the list that `chaos run --schedule` takes.

    Parameters
    ----------
    seed
        What they are drawn from.
    kills
        How many processes are killed.
    quick
        The short drill's.
    """
    from services.simulator.drill.schedule import dump

    print(dump(_faults(None, seed, kills, quick, "")))
    return 0


@app.command
def run(
    *,
    quick: bool = False,
    seed: int | None = None,
    kills: int = FULL_KILLS,
    only: str = "",
    model: str = "stub",
    width: int | None = None,
    schedule: Path | None = None,
    json: bool = False,
) -> int:
    """Kill, stop and starve services of a mesh under load; status 3 where anything was lost, leaked
    or wrong, or where a fault did not happen.

    Parameters
    ----------
    quick
        A handful of faults, one for each service.
    seed
        What faults, load and options are drawn from; a new one where none is given.
    kills
        How many processes are killed.
    only
        The services that are hit, with commas; all where empty.
    model
        `stub`, or a model, whose answers are learnt before the first fault.
    width
        Streams at once.
    schedule
        A file with faults, as `chaos schedule` prints them, instead of drawn ones.
    json
        Print the table as one object.
    """
    chosen = secrets.randbelow(MAX_SEED) if seed is None else seed
    faults = _faults(schedule, chosen, kills, quick, only)
    folder = Path(tempfile.mkdtemp(prefix="streetcar-chaos-"))
    _say(f"seed {chosen}  {len(faults)} faults  files in {folder}")
    streams = width or (QUICK_WIDTH if quick else WIDTH)
    report = asyncio.run(_drill(model, chosen, faults, streams, folder))
    if json:
        print_json(report)
    else:
        from services.simulator.drill.report import lines

        print("\n".join(lines(report)))
    if report["passed"]:
        shutil.rmtree(folder, ignore_errors=True)
        return 0
    _say(f"what the services wrote is in {folder}; again with --seed {chosen}")
    return FAILED


def _faults(path: Path | None, seed: int, kills: int, quick: bool, only: str) -> list[Fault]:
    from services.simulator.drill import schedule as schedules

    if path is not None:
        try:
            return schedules.parse(path.read_text())
        except OSError as error:
            raise Problem(
                "E106", "Schedule cannot be read", cause=f"{path}: {error.strerror}"
            ) from None
    services = only.split(",") if only else schedules.SERVICES
    if unknown := set(services) - set(schedules.SERVICES):
        known = ", ".join(schedules.SERVICES)
        cause = f"no service {', '.join(sorted(unknown))}; there are {known}"
        raise Problem("E106", "Schedule refused", cause=cause)
    return schedules.quick(seed, services) if quick else schedules.draw(seed, kills, services)


async def _drill(
    model: str, seed: int, faults: list[Fault], width: int, folder: Path
) -> dict[str, Any]:
    import random

    from services.cli.running import prepare
    from services.simulator.drill.checker import judge
    from services.simulator.drill.report import as_dict
    from services.simulator.drill.run import Mesh, draw_settings, run_mesh, split

    rng = random.Random(seed)
    found: list[Found] = []
    options: dict[str, Any] = {"streams_at_once": width}
    for number, part in enumerate(split(faults, FAULTS_PER_MESH)):
        settings, drawn = draw_settings(model, rng, folder / f"mesh-{number}")
        options[f"mesh_{number}"] = " ".join(f"{name}={value}" for name, value in drawn.items())
        _say(f"mesh {number}: {options[f'mesh_{number}']}")
        mesh = Mesh(number, prepare(settings), part, width, rng.randrange(MAX_SEED))
        found.append(await run_mesh(mesh, _say))
    outcomes = [outcome for mesh in found for outcome in mesh.outcomes]
    verdict = judge(
        [stream for mesh in found for stream in mesh.streams],
        outcomes,
        [mesh.books for mesh in found],
        [death for mesh in found for death in mesh.unexpected_deaths],
    )
    return as_dict(seed, options, verdict, outcomes)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
