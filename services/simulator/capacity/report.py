"""A comparison as one JSON object, or as a table for a person.

Pure: values to values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from .presets import Preset
from .scenario import Row, Setup
from .summary import flatten

# Heading and where the number lies in a row; a column that no row has is left out.
_COLUMNS: Final = (
    ("tok/s", "output_tokens_per_s", ",.0f"),
    ("steps", "steps", ",.0f"),
    ("seqs", "mean_num_seqs", ".1f"),
    ("padding", "padding_waste", ".1%"),
    ("preempt", "preemptions", ",.0f"),
    ("recomputed", "recomputed_tokens", ",.0f"),
    ("refused", "refused", ",.0f"),
    ("TTFT p50", "ttft_ms.p50", ",.1f"),
    ("p99", "ttft_ms.p99", ",.1f"),
    ("ITL p50", "itl_ms.p50", ",.1f"),
    ("p99", "itl_ms.p99", ",.1f"),
    ("TPOT p99", "tpot_ms.p99", ",.1f"),
    ("e2e p99", "e2e_ms.p99", ",.0f"),
    ("newcomer", "newcomer_ttft_ms", ",.1f"),
    ("stall p99", "stall_itl_ms.p99", ",.1f"),
)
_HIDDEN_WHEN_ZERO: Final = {"preemptions", "recomputed_tokens", "refused"}


def as_json(preset: Preset, setup: Setup, rows: Sequence[Row]) -> dict[str, Any]:
    """`policies`: by row. `verdict`: what the preset says of all rows, where all were run."""
    engine = setup.engine
    policies = engine.policies
    complete = len(rows) == len(preset.variants(engine))
    return {
        "preset": preset.name,
        "title": preset.title if setup == preset.setup else f"{preset.name}, varied",
        "workload": setup.workload.text,
        "step_time": engine.step_time.text,
        "engine": {
            "kv_tokens": engine.kv_tokens,
            "block_size": engine.block_size,
            "max_num_seqs": engine.max_num_seqs,
            "max_num_batched_tokens": engine.max_num_batched_tokens,
            "prefix_caching": engine.prefix_caching,
            "bus_ms": engine.bus_ms,
            "max_tokens": engine.max_tokens,
            "step_kind": policies.step_kind,
            "queue": policies.queue,
            "margin": policies.margin,
            "itl_target_ms": policies.itl_target_ms,
        },
        "policies": {row.variant.name: row.summary for row in rows},
        "verdict": preset.verdict(rows) if complete else {},
    }


def as_table(report: Mapping[str, Any]) -> str:
    """Lines of text; times in ms."""
    rows: Mapping[str, Mapping[str, Any]] = report["policies"]
    shown = [column for column in _COLUMNS if _is_shown(column[1], rows.values())]
    width = max(len(name) for name in rows)
    cells = {
        name: [_cell(flatten(row, path), form) for _, path, form in shown]
        for name, row in rows.items()
    }
    heads = [head for head, _, _ in shown]
    widths = [
        max(len(head), *(len(line[at]) for line in cells.values())) for at, head in enumerate(heads)
    ]
    lines = [
        report["title"],
        f"  {report['workload']}; {report['step_time']}",
        "",
        _line("", width, heads, widths),
        *(_line(name, width, line, widths) for name, line in cells.items()),
    ]
    if report["verdict"]:
        lines.append("")
        lines.extend(f"{name}: {_plain(value)}" for name, value in report["verdict"].items())
    return "\n".join(lines)


def _is_shown(path: str, rows: Any) -> bool:
    values = [flatten(row, path) for row in rows]
    known = [value for value in values if value == value]
    return bool(known) and (path not in _HIDDEN_WHEN_ZERO or any(known))


def _cell(value: float, form: str) -> str:
    return format(value, form) if value == value else "–"


def _line(name: str, width: int, cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = [f"{cell:>{w}}" for cell, w in zip(cells, widths, strict=True)]
    return f"  {name:<{width}}  {'  '.join(padded)}".rstrip()


def _plain(value: Any) -> str:
    return ", ".join(value) if isinstance(value, list) else str(value)
