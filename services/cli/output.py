"""What the commands print: results on standard output, progress and problems on standard error.

Invariant: with `--json`, standard output carries JSON only, one object a line.

Shell: writes to the terminal.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from services.runtime.problem import Problem

if TYPE_CHECKING:
    from services.runtime.supervisor import SupervisorEvent

_NAME_WIDTH: Final = 10
_KIND_WIDTH: Final = 10
_PROGRESS_STEP: Final = 0.25


def print_json(value: Mapping[str, Any]) -> None:
    """One object, one line, at once."""
    print(json.dumps(value, ensure_ascii=False), flush=True)


def print_problem(problem: Problem, *, as_json: bool) -> None:
    """The problem for a person on standard error, or as one object on standard output."""
    if as_json:
        body = {"code": problem.code, "title": problem.title, "cause": problem.cause}
        print_json({"error": {**body, "fix": problem.fix}})
        return
    print("\n".join(problem.lines()), file=sys.stderr, flush=True)


class ProgressLine:
    """Progress of one piece of work on standard error: in place on a terminal, else by quarters."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._terminal = sys.stderr.isatty()
        self._last = ("", -1.0)

    def update(self, fraction: float, text: str) -> None:
        """`fraction` in [0, 1]; `text` says what is being done."""
        line = f"  {self._name:<{_NAME_WIDTH}} {fraction:4.0%}  {text}"
        if self._terminal:
            end = "\n" if fraction >= 1.0 else ""
            print(f"\r\x1b[2K{line}", end=end, file=sys.stderr, flush=True)
            return
        label, shown = self._last
        stage = text.split(" ", 1)[0]
        if stage != label or fraction >= min(1.0, shown + _PROGRESS_STEP):
            print(line, file=sys.stderr, flush=True)
            self._last = (stage, fraction)


class ClusterReporter:
    """Tells a person how the services come up, die and stop; an observer of the supervisor."""

    def __init__(self, *, quiet: bool = False) -> None:
        """`quiet` keeps only what went wrong."""
        self._quiet = quiet
        self._terminal = sys.stderr.isatty()
        self._started: dict[str, float] = {}
        self._progress: dict[str, ProgressLine] = {}

    def __call__(self, event: SupervisorEvent) -> None:
        if event.kind == "starting":
            self._started[event.service] = time.monotonic()
        elif event.kind == "progress":
            if not self._quiet:
                line = self._progress.setdefault(event.service, ProgressLine(event.service))
                line.update(event.fraction or 0.0, event.text)
        elif event.kind == "ready":
            took = time.monotonic() - self._started.get(event.service, time.monotonic())
            self._say(event, f"{_facts(event.fields)}  {took:.1f} s".strip())
        elif event.kind != "stopping":
            self._say(event, event.text)

    def _say(self, event: SupervisorEvent, text: str) -> None:
        if self._quiet and event.kind in {"ready", "stopped"}:
            return
        clear = "\r\x1b[2K" if self._terminal else ""
        name, kind = f"{event.service:<{_NAME_WIDTH}}", f"{event.kind:<{_KIND_WIDTH}}"
        print(f"{clear}  {name} {kind} {text}".rstrip(), file=sys.stderr, flush=True)


def _facts(fields: Mapping[str, Any]) -> str:
    return "  ".join(f"{name} {value}" for name, value in fields.items())
