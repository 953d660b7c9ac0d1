"""A record in a few numbers: rates, counts, and percentiles of what a client feels.

Invariant: times are milliseconds; TTFT and end-to-end count from the arrival, ITL is every gap
between two tokens of a request, TPOT the mean gap of each request.

Pure: numpy only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from .record import NEVER, Record

_MS_NS: Final = 1e6
_PERCENTILES: Final = (50, 90, 99)


def percentiles_ms(times_ns: npt.NDArray[Any]) -> dict[str, float] | None:
    """p50, p90, p99 and max of ns, in ms; None where there are no times."""
    if not len(times_ns):
        return None
    values = np.percentile(times_ns, _PERCENTILES) / _MS_NS
    found = {f"p{p}": round(float(v), 3) for p, v in zip(_PERCENTILES, values, strict=True)}
    return {**found, "max": round(float(times_ns.max()) / _MS_NS, 3)}


def summarize(record: Record) -> dict[str, Any]:
    """The row of a report; `padding_waste` is there only where rows are padded."""
    arrival = np.array([request.arrival_ns for request in record.requests])
    done = record.first_ns != NEVER
    first, last, count = record.first_ns[done], record.last_ns[done], record.num_tokens[done]
    several = count > 1
    span_s = (record.end_ns - int(arrival.min())) / 1e9
    num_tokens = int(count.sum())
    busy_ns = sum(step.end_ns - step.start_ns for step in record.steps)
    seqs_ns = sum(step.load.num_seqs * (step.end_ns - step.start_ns) for step in record.steps)
    row: dict[str, Any] = {
        "output_tokens_per_s": round(num_tokens / span_s, 1) if span_s else 0.0,
        "output_tokens": num_tokens,
        "requests": int(done.sum()),
        "refused": len(record.refused),
        "steps": len(record.steps),
        "duration_s": round(span_s, 3),
        "busy": round(busy_ns / 1e9 / span_s, 4) if span_s else 0.0,
        "mean_num_seqs": round(seqs_ns / busy_ns, 1) if busy_ns else 0.0,
        "preemptions": record.num_preemptions,
        "computed_tokens": record.num_computed_tokens,
        "recomputed_tokens": record.num_recomputed_tokens,
        "discarded_tokens": record.num_discarded_tokens,
        "ttft_ms": percentiles_ms(first - arrival[done]),
        "itl_ms": percentiles_ms(_all_gaps(record)),
        "tpot_ms": percentiles_ms((last - first)[several] / (count[several] - 1)),
        "e2e_ms": percentiles_ms(last - arrival[done]),
    }
    if record.num_slots:
        row["recomputed_tokens"] = 0
        row["padding_waste"] = round(1 - num_tokens / record.num_slots, 4)
    return row


def _all_gaps(record: Record) -> npt.NDArray[np.int64]:
    return record.gaps_between(-1, record.end_ns)


def flatten(row: Mapping[str, Any], name: str) -> float:
    """`ttft_ms.p99` of a row -> its number; nan where it has none."""
    value: Any = row
    for part in name.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return float(value) if isinstance(value, int | float) else float("nan")
