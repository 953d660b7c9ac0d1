"""A trace as a waterfall in the terminal: a tree of spans on one axis of time.

Shell: writes to the terminal.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from rich.console import Console
from rich.text import Text

from services.contracts.spans import Attribute, SpanRecord

BAR_WIDTH: Final = 30
NAME_WIDTH: Final = 28
SERVICE_WIDTH: Final = 10
MAX_ROWS: Final = 200
COLOURS: Final = {
    "client": "blue",
    "gateway": "cyan",
    "admission": "green",
    "scheduler": "yellow",
    "gpu_worker": "magenta",
}
_SHOWN: Final = (
    "num_tokens",
    "num_prefill_tokens",
    "num_cached_tokens",
    "num_hit_tokens",
    "num_output_tokens",
    "num_preemptions",
    "step_id",
    "epoch",
    "engine",
    "gen_ai.usage.input_tokens",
    "gen_ai.usage.output_tokens",
    "streetcar.num_submissions",
    "finish_reason",
    "gen_ai.response.finish_reasons",
    "gen_ai.response.time_to_first_chunk",
    "streetcar.num_resumes",
)
"""Attributes worth a place on the line; `--json` has them all."""


@dataclass(frozen=True, slots=True)
class Row:
    """A span at its depth in the tree. linked: it is of another trace, and links to this one."""

    span: SpanRecord
    depth: int
    linked: bool


def rows(spans: Sequence[SpanRecord], trace_id: str) -> list[Row]:
    """Parents before children, each level in the order of time.

    A span whose parent is not there (its service died before it closed it) stands under the root;
    steps of the worker, which only link to the trace, under the span that was under way.
    """
    own = [span for span in spans if span.trace_id == trace_id]
    known = {span.span_id: span for span in own}
    children: dict[str, list[SpanRecord]] = defaultdict(list)
    root = next((span for span in own if not span.parent_id), own[0])
    for span in own:
        if span is root:
            continue
        parent = span.parent_id if span.parent_id in known else root.span_id
        children[parent].append(span)
    for span in spans:
        if span.trace_id != trace_id:
            children[_around(span, own, root).span_id].append(span)

    def walk(span: SpanRecord, depth: int) -> Iterator[Row]:
        yield Row(span, depth, span.trace_id != trace_id)
        if span.trace_id == trace_id:
            for child in sorted(children[span.span_id], key=lambda c: c.start_unix_ns):
                yield from walk(child, depth + 1)

    return list(walk(root, 0))


def _around(step: SpanRecord, own: Sequence[SpanRecord], root: SpanRecord) -> SpanRecord:
    """The shortest span of the scheduler in which `step` ended."""
    end_ns = step.start_unix_ns + step.duration_ns
    around = [
        span
        for span in own
        if span.service.startswith("scheduler/")
        and span.start_unix_ns <= end_ns <= span.start_unix_ns + span.duration_ns
    ]
    return min(around, key=lambda span: span.duration_ns, default=root)


def show(
    request_id: str, spans: Sequence[SpanRecord], notes: Sequence[str], *, to_stderr: bool = False
) -> None:
    """Print it; lines are cut to the terminal, and as long as they need to be in a pipe."""
    console = Console(highlight=False, stderr=to_stderr)
    named = Counter(span.trace_id for span in spans if span.request_id == request_id)
    trace_id = named.most_common(1)[0][0] if named else spans[0].trace_id
    found = rows(spans, trace_id)
    first_ns = min(row.span.start_unix_ns for row in found)
    whole_ns = max(row.span.start_unix_ns + row.span.duration_ns for row in found) - first_ns
    services = len({row.span.service for row in found})
    facts = f"{whole_ns / 1e6:.1f} ms  {len(found)} spans of {services} services"
    console.print(f"trace {trace_id}  {facts}")
    for row in found[:MAX_ROWS]:
        text = line(row, first_ns, max(whole_ns, 1))
        if console.is_terminal:
            text.truncate(console.width, overflow="ellipsis")
        console.print(text, soft_wrap=True)
    if len(found) > MAX_ROWS:
        console.print(f"and {len(found) - MAX_ROWS} spans more; --json has them all")
    for note in notes:
        console.print(note)


def line(row: Row, first_ns: int, whole_ns: int) -> Text:
    """Name, service, bar, beginning and length in ms, and what there is to know."""
    span = row.span
    colour = COLOURS.get(span.service.partition("/")[0], "white")
    name = "  " * row.depth + ("~ " if row.linked else "") + span.name
    offset_ns = span.start_unix_ns - first_ns
    facts = [
        f"{key.rpartition('.')[2]} {_short(span.attributes[key])}"
        for key in _SHOWN
        if span.attributes.get(key) not in (None, 0, "")
    ]
    times = f" {offset_ns / 1e6:10.2f} {span.duration_ns / 1e6:10.2f}  "
    text = Text(f"{name:<{NAME_WIDTH}.{NAME_WIDTH}} ", style=colour)
    text.append(f"{span.service.partition('/')[0]:<{SERVICE_WIDTH}} ", style="dim")
    text.append(
        f"{bar(offset_ns, span.duration_ns, whole_ns):<{BAR_WIDTH}}",
        style="red" if span.error else colour,
    )
    text.append(times)
    if span.error:
        text.append(f"error {span.error}  ", style="red")
    text.append("  ".join(facts), style="dim")
    return text


def _short(value: Attribute) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def bar(offset_ns: int, duration_ns: int, whole_ns: int) -> str:
    """Where in `whole_ns` a span lies, in BAR_WIDTH columns; at least one of them."""
    start = min(BAR_WIDTH - 1, offset_ns * BAR_WIDTH // whole_ns)
    end = min(BAR_WIDTH, max(start + 1, -(-(offset_ns + duration_ns) * BAR_WIDTH // whole_ns)))
    return " " * start + "━" * (end - start)
