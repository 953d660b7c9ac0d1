"""`streetcar sim`: capacity planning on the real scheduler core, and the fault histories' replay.

Invariant: with `--json`, standard output carries one JSON object.

Shell: the terminal, files for pages and pictures, the bus with `--fit`.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

from cyclopts import App, Parameter

from services.cli.output import ProgressLine, print_json
from services.cli.sim_options import SimOptions
from services.runtime.problem import Problem

if TYPE_CHECKING:
    from services.contracts.step import StepEvent
    from services.simulator.capacity.presets import Preset
    from services.simulator.capacity.scenario import Row, Setup
    from services.simulator.capacity.step_time import StepTime

sim = App(name="sim", help="Plan capacity on the real scheduler, in virtual time.")

_NO_OPTIONS: Final = SimOptions()
_MAX_FIT_STEPS: Final = 100_000

Html = Annotated[Path | None, Parameter(help="write a page with all pictures to this file")]
Png = Annotated[Path | None, Parameter(help="write the pictures into this directory (matplotlib)")]
Json = Annotated[bool, Parameter(help="print one object")]


@sim.command(name="deep-dive")
def deep_dive(
    options: SimOptions = _NO_OPTIONS, *, json: Json = False, html: Html = None, png: Png = None
) -> int:
    """2,000 requests on a 7B model: static (padded and not), dynamic, continuous."""
    return _simulate("deep-dive", options, json, html, png)


@sim.command(name="five-requests")
def five_requests(
    options: SimOptions = _NO_OPTIONS, *, json: Json = False, html: Html = None, png: Png = None
) -> int:
    """Five requests in three slots: 12 steps static, 8 continuous."""
    return _simulate("five-requests", options, json, html, png)


@sim.command(name="long-prompt")
def long_prompt(
    options: SimOptions = _NO_OPTIONS, *, json: Json = False, html: Html = None, png: Png = None
) -> int:
    """8,000 prompt tokens among 32 decodes: unchunked, fixed budgets, and an adaptive one."""
    return _simulate("long-prompt", options, json, html, png)


@sim.command(name="frontier")
def frontier(
    options: SimOptions = _NO_OPTIONS, *, json: Json = False, html: Html = None, png: Png = None
) -> int:
    """p99 TTFT over throughput as max_num_seqs and max_num_batched_tokens vary."""
    return _simulate("frontier", options, json, html, png)


@sim.command(name="kv-pressure")
def kv_pressure(
    options: SimOptions = _NO_OPTIONS, *, json: Json = False, html: Html = None, png: Png = None
) -> int:
    """A pool of half of what all lanes would hold: the learned margin, fixed ones, host memory."""
    return _simulate("kv-pressure", options, json, html, png)


@sim.command(name="faults")
def faults(*, seed: int = 1, count: int = 1, json: bool = False) -> int:
    """Replay one history of the fault simulation, or several; status 1 at the first that fails.

    Parameters
    ----------
    seed
        The first history's seed.
    count
        How many histories.
    json
        Print one object per history.
    """
    from services.simulator.replay import options_of, run_seed, summary

    for number in range(seed, seed + count):
        if count == 1 and not json:
            print(f"seed {number}: {options_of(number)}", flush=True)
        outcome = run_seed(number)
        report = summary(outcome.report) if outcome.report is not None else ""
        if json:
            failure = outcome.failure
            print_json(
                {"seed": number, "options": outcome.options, "report": report, "failure": failure}
            )
        elif count == 1 or outcome.failure:
            print(report or outcome.failure)
        if outcome.failure:
            print(f"replay: make sim SEED={number}", file=sys.stderr)
            return 1
    if not json and count > 1:
        print(f"{count} histories from seed {seed} on: all kept their invariants")
    return 0


# ---- one preset


def _simulate(
    name: str, options: SimOptions, json: bool, html: Path | None, png: Path | None
) -> int:
    from services.simulator.capacity.presets import PRESETS
    from services.simulator.capacity.report import as_json, as_table

    preset = PRESETS[name]
    fitted = asyncio.run(_fitted(options)) if options.fit else None
    setup = options.apply(preset.setup, fitted)
    rows = _run(preset, setup, options.only)
    report = as_json(preset, setup, rows)
    if json:
        print_json(report)
    else:
        print(as_table(report))
    if html is not None or png is not None:
        _pictures(report, html, png)
    return 0


def _run(preset: Preset, setup: Setup, only: list[str] | None) -> list[Row]:
    from services.contracts.errors import StreetcarError
    from services.simulator.capacity.scenario import compare

    variants = preset.variants(setup.engine)
    if only:
        known = [variant.name for variant in variants]
        unknown = [name for name in only if name not in known]
        if unknown:
            raise Problem(
                "E109",
                "Nothing to simulate",
                cause=f"no row is named {', '.join(unknown)}",
                fix=f"--only one of {', '.join(known)}",
            )
        variants = [variant for variant in variants if variant.name in only]
    progress = ProgressLine(preset.name)
    rows: list[Row] = []
    try:
        for row in compare(variants, setup.workload.requests(), preset.extra):
            rows.append(row)
            progress.update(len(rows) / len(variants), f"ran {row.variant.name}")
    except StreetcarError as error:
        raise Problem("E109", "The simulation cannot go on", cause=str(error)) from error
    return rows


def _pictures(report: dict[str, Any], html: Path | None, png: Path | None) -> None:
    from services.simulator.page.data import collect

    progress = ProgressLine("pictures")
    data = collect(report, progress.update)
    try:
        if html is not None:
            from services.simulator.page.render import render

            html.write_text(render(data), encoding="utf-8")
            print(f"wrote {html}", file=sys.stderr)
        if png is not None:
            from services.simulator.page.png import draw

            for path in draw(data, png):
                print(f"wrote {path}", file=sys.stderr)
    except OSError as error:
        raise Problem("E110", "Pictures cannot be written", cause=str(error)) from error
    except ImportError as error:
        raise Problem(
            "E110",
            "Pictures cannot be drawn",
            cause=f"{error}",
            fix="pip install 'streetcar[report]', or --html FILE, which needs nothing",
        ) from error


# ---- a live engine


async def _fitted(options: SimOptions) -> StepTime:
    """Listen to the StepEvents of the engine at `--fit`, and fit a line to them."""
    from services.simulator.capacity.fitting import TooFewSteps, fit
    from services.simulator.capacity.presets import DEEP_DIVE

    steps = await _listen(str(options.fit), options.fit_seconds)
    block_size = options.block_size or DEEP_DIVE.setup.engine.block_size
    try:
        found = fit(steps, block_size)
    except TooFewSteps as error:
        raise Problem(
            "E406",
            "Too few steps",
            cause=f"{error} (heard in {options.fit_seconds:g} s)",
            fix="put load on the engine, or more --fit-seconds",
        ) from error
    line = f"{found.step_time.text} (R² {found.r2:.3f}, {found.num_steps} steps)"
    print(f"fitted {line}", file=sys.stderr)
    return found.step_time


async def _listen(url: str, seconds: float) -> list[StepEvent]:
    from services.cli.bus import connect
    from services.cli.running_file import find_cluster
    from services.contracts.codec import Decoder
    from services.contracts.step import StepEvent
    from services.contracts.subjects import Subjects
    from services.runtime.settings import load

    decoder = Decoder(StepEvent)
    steps: list[StepEvent] = []

    async def on_step(message: Any) -> None:
        if len(steps) < _MAX_FIT_STEPS:
            steps.append(decoder.decode(message.data))

    settings = load(flags={"nats_url": url})
    async with connect(find_cluster(settings).watch_url) as bus:
        subject = Subjects(settings.subject_prefix).steps(settings.engine_id)
        await bus.subscribe(subject, cb=on_step)
        await asyncio.sleep(seconds)
    return steps
