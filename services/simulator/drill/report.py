"""The checker's table, and the same as JSON.

Pure.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any, Final

from services.simulator.drill.checker import Outcome, Verdict

SLOWEST: Final = 5


def as_dict(
    seed: int, options: Mapping[str, Any], verdict: Verdict, outcomes: Sequence[Outcome]
) -> dict[str, Any]:
    """For `--json`."""
    return {
        "seed": seed,
        "options": dict(options),
        "passed": verdict.passed,
        "accepted": verdict.accepted,
        "finished": verdict.finished,
        "cancelled": verdict.cancelled,
        "cut_by_gateway": verdict.cut,
        "failed": dict(verdict.failed),
        "refused": dict(verdict.refused),
        "faults": verdict.faults,
        "faults_verified": verdict.faults_verified,
        "kills_verified": verdict.kills_verified,
        "faults_by_service": by_service(outcomes),
        "lost": verdict.lost,
        "duplicated": verdict.duplicated,
        "reordered": verdict.reordered,
        "wrong": verdict.wrong,
        "blocks_leaked": verdict.blocks_leaked,
        "worst_recovery_s": round(verdict.worst_recovery_s, 3),
        "worst_ready_s": round(verdict.worst_ready_s, 3),
        "crash_noticed_s": round(verdict.crash_noticed_s, 3),
        "hang_noticed_s": round(verdict.hang_noticed_s, 3),
        "unexpected_deaths": verdict.unexpected_deaths,
        "slowest": [
            f"{o.silence_s:.1f} s without tokens over {o.silent_via} after {o.fault.service} "
            f"{o.fault.label}, fault {number}, noticed after {o.noticed_s or 0.0:.1f} s"
            for number, o in sorted(enumerate(outcomes), key=lambda item: -item[1].silence_s)[
                :SLOWEST
            ]
        ],
        "noticed_last": [
            f"{o.noticed_s:.2f} s after {o.fault.service} {o.fault.label}, fault {number}"
            for number, o in sorted(
                enumerate(outcomes), key=lambda item: -(item[1].noticed_s or 0)
            )[:SLOWEST]
            if o.noticed_s is not None
        ],
        "crash_noticed_p50_s": _median_notice(outcomes),
        "not_verified": [
            f"{o.fault.service} {o.fault.label}: {o.evidence}" for o in outcomes if not o.verified
        ],
    }


def by_service(outcomes: Iterable[Outcome]) -> dict[str, dict[str, int]]:
    """Verified faults by service and kind."""
    counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for outcome in outcomes:
        counts[outcome.fault.service][outcome.fault.label] += outcome.verified
    return {service: dict(sorted(counts[service].items())) for service in sorted(counts)}


def lines(report: Mapping[str, Any]) -> list[str]:
    """The table for a person."""
    text = [f"{'seed':<22} {report['seed']}", f"{'options':<22} {_pairs(report['options'])}"]
    for service, counts in report["faults_by_service"].items():
        text.append(f"{'faults ' + service:<22} {sum(counts.values())}: {_pairs(counts)}")
    listed = ("slowest", "noticed_last", "not_verified", "unexpected_deaths")
    skipped = {"seed", "options", "faults_by_service", "passed", *listed}
    for name, value in report.items():
        if name in skipped:
            continue
        shown = (_pairs(value) or "none") if isinstance(value, dict) else value
        text.append(f"{name.replace('_', ' '):<22} {shown}")
    for name in listed:
        text += [f"{name.replace('_', ' '):<22} {line}" for line in report[name]]
    return [*text, "PASSED" if report["passed"] else "FAILED"]


def _median_notice(outcomes: Iterable[Outcome]) -> float:
    noticed = [o.noticed_s for o in outcomes if o.noticed_s is not None and o.is_crash]
    return round(median(noticed), 3) if noticed else 0.0


def _pairs(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())
