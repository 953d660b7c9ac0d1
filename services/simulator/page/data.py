"""What the pictures show, simulated now: plain values for the page and for PNG files.

Invariant: nothing is drawn that a run, or the step-time model, did not give.

Pure: runs in virtual time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final, TypeAlias

from services.simulator.capacity.presets import (
    DEEP_DIVE,
    FIVE_REQUESTS,
    FRONTIER,
    LONG_PROMPT,
    newcomer,
)
from services.simulator.capacity.record import Record
from services.simulator.capacity.scenario import Row, Variant, compare, run_variant
from services.simulator.capacity.step_time import GPUS, MODELS, RooflineStepTime, StepLoad
from services.simulator.capacity.summary import flatten
from services.simulator.capacity.workload import LogNormal, closed, log_normal

Progress: TypeAlias = Callable[[float, str], None]

_MS_NS: Final = 1e6
_STAGGER_MS: Final = 400.0
_SIGMAS: Final = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0, 1.2, 1.4)
_SPREAD_BATCH: Final = 16
_SPREAD_REQUESTS: Final = 64
_SPREAD_MEAN: Final = 100.0
_SPREAD_MAX: Final = 1000
_KNEE_BATCHES: Final = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 160, 192, 224, 256, 288, 320, 384)
_KNEE_MORE: Final = (448, 512, 576, 640, 768, 896, 1024)
_KNEE_KV: Final = (0, 256, 512, 1024, 2048, 4096, 8192)
_SHOWN_BEFORE_NS: Final = 100_000_000
_SPIKES: Final = ("unchunked", "fixed-512", "adaptive")


def collect(report: Mapping[str, Any], progress: Progress) -> dict[str, Any]:
    """`report`: of the preset that was asked for (`as_json`) -> everything the pictures need."""
    progress(0.0, "simulating requests in slots")
    data: dict[str, Any] = {"report": report, "gantt": _gantt()}
    progress(0.1, "simulating padding")
    data["padding"] = _padding()
    progress(0.2, "simulating step time")
    data["knee"] = _knee()
    progress(0.3, "simulating long prompt")
    data["spike"] = _spike()
    progress(0.4, "simulating frontier")
    data["frontier"] = _frontier(report, progress)
    progress(1.0, "done")
    return data


# ---- who sits where, step by step


def _gantt() -> dict[str, Any]:
    setup = FIVE_REQUESTS.setup
    together = setup.workload
    staggered = replace(together, period_ms=_STAGGER_MS)
    step_ns = setup.engine.step_time.ms(StepLoad(1, 1, 0, 0)) * _MS_NS
    return {
        name: [
            _gantt_row(row, step_ns)
            for row in compare(
                FIVE_REQUESTS.variants(setup.engine), workload.requests(), FIVE_REQUESTS.extra
            )
        ]
        for name, workload in (("together", together), ("staggered", staggered))
    }


def _gantt_row(row: Row, step_ns: float) -> dict[str, Any]:
    """cells: (step at which it starts, lane, request), in units of one step."""
    record, options = row.record, row.variant.options
    cells = [
        (round(step.start_ns / step_ns, 3), lane, owner)
        for step in record.steps
        for lane, owner in zip(step.lanes.tolist(), step.owners.tolist(), strict=True)
    ]
    return {
        "name": row.variant.name,
        "lanes": options.max_num_seqs,
        "cells": cells,
        "steps": len(record.steps),
        "end": round(record.end_ns / step_ns, 3),
        "arrivals": [round(request.arrival_ns / step_ns, 3) for request in record.requests],
        "first": [round(int(first) / step_ns, 3) for first in record.first_ns],
    }


# ---- padding


def _padding() -> dict[str, Any]:
    """sweep: by spread of the lengths, the deep dive's machine with padded groups of 16, and with
    the real continuous batch of 16.
    """
    engine = replace(
        DEEP_DIVE.setup.engine,
        max_num_seqs=_SPREAD_BATCH,
        kv_tokens=_SPREAD_BATCH * 2 * _SPREAD_MAX,
    )
    sweep = []
    for sigma in _SIGMAS:
        shape = LogNormal(16.0, _SPREAD_MEAN, 0.0, sigma, _SPREAD_MAX)
        requests = closed(log_normal(_SPREAD_REQUESTS, shape, seed=3))
        padded = run_variant(Variant("static", engine, padded_batch=_SPREAD_BATCH), requests)
        packed = run_variant(Variant("continuous", engine), requests)
        sweep.append(
            {
                "sigma": sigma,
                "lengths": [r.num_output_tokens for r in requests[:_SPREAD_BATCH]],
                "waste": padded.summary["padding_waste"],
                "static": padded.summary["output_tokens_per_s"],
                "continuous": packed.summary["output_tokens_per_s"],
            }
        )
    return {
        "prompts": [5, 2, 3],
        "batch": _SPREAD_BATCH,
        "requests": _SPREAD_REQUESTS,
        "sweep": sweep,
    }


# ---- step time over batch


def _knee() -> dict[str, Any]:
    """Decode steps of an 8B model on an H100. doubled: first batch whose step takes twice as long
    as that of one sequence without cache.
    """
    roofline = RooflineStepTime(GPUS["h100"], MODELS["8b"])

    def step_ms(batch: int, kv: int) -> float:
        return roofline.ms(StepLoad(batch, batch, 0, batch * kv))

    alone_ms = step_ms(1, 0)
    curves = [
        {
            "kv": kv,
            "points": [(n, round(step_ms(n, kv), 4)) for n in (*_KNEE_BATCHES, *_KNEE_MORE)],
            "doubled": next(
                (n for n in range(1, _KNEE_MORE[-1] + 1) if step_ms(n, kv) >= 2 * alone_ms), None
            ),
            "fits": roofline.max_kv_tokens // kv if kv else None,
        }
        for kv in _KNEE_KV
    ]
    return {"text": roofline.text, "ridge": round(roofline.ridge_tokens, 1), "curves": curves}


# ---- the long prompt


def _spike() -> dict[str, Any]:
    setup = LONG_PROMPT.setup
    variants = LONG_PROMPT.variants(setup.engine)
    rows = list(compare(variants, setup.workload.requests(), LONG_PROMPT.extra))
    return {
        "target_ms": setup.engine.policies.itl_target_ms,
        "panels": [_spike_panel(row) for row in rows if row.variant.name in _SPIKES],
        "budgets": [
            {
                "name": row.variant.name,
                "budget": row.variant.options.max_num_batched_tokens,
                "itl_p99": flatten(row.summary, "stall_itl_ms.p99"),
                "ttft": row.summary["newcomer_ttft_ms"],
            }
            for row in rows
        ],
        "verdict": LONG_PROMPT.verdict(rows),
    }


def _spike_panel(row: Row) -> dict[str, Any]:
    """gaps: (ms after the newcomer's arrival, inter-token ms) of the first decoding request."""
    record = row.record
    index = newcomer(row)
    arrival_ns = record.requests[index].arrival_ns
    return {
        "name": row.variant.name,
        "gaps": [
            (round((at - arrival_ns) / _MS_NS, 2), round(gap / _MS_NS, 3))
            for at, gap in _gaps_of(record, 0)
            if at >= arrival_ns - _SHOWN_BEFORE_NS
        ],
        "ttft": row.summary["newcomer_ttft_ms"],
        "worst": flatten(row.summary, "stall_itl_ms.max"),
    }


def _gaps_of(record: Record, request: int) -> list[tuple[int, int]]:
    return [
        (each.at_ns, int(gap))
        for each in record.gaps
        for gap in each.gaps_ns[each.requests == request]
    ]


# ---- the frontier


def _frontier(report: Mapping[str, Any], progress: Progress) -> dict[str, Any]:
    """Of the report itself where it is the whole sweep, else of the preset as it stands."""
    if report["preset"] == FRONTIER.name and report["verdict"]:
        summaries, verdict = report["policies"], report["verdict"]
        workload = report["workload"]
    else:
        setup = FRONTIER.setup
        variants = FRONTIER.variants(setup.engine)
        rows = []
        for row in compare(variants, setup.workload.requests(), FRONTIER.extra):
            rows.append(row)
            progress(0.4 + 0.6 * len(rows) / (len(variants) + 1), f"simulating {row.variant.name}")
        summaries = {row.variant.name: row.summary for row in rows}
        verdict, workload = FRONTIER.verdict(rows), setup.workload.text
    points = [
        {
            "seqs": summary["max_num_seqs"],
            "budget": summary["max_num_batched_tokens"],
            "rate": summary["output_tokens_per_s"],
            "ttft": flatten(summary, "ttft_ms.p99"),
            "itl": flatten(summary, "itl_ms.p99"),
            "best": name in verdict["frontier"],
            "kept": name in verdict["frontier_with_itl"],
        }
        for name, summary in summaries.items()
    ]
    return {"workload": workload, "points": points}
