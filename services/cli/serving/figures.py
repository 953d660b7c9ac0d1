"""From single answers to the figures of a turn, and from turns to medians and ratios.

TTFT: start of the request to its first text. TPOT: of one answer, from first to last text over the
tokens after the first. ITL: between two texts of one answer. Goodput: answers per second that kept
every bound of the SLO.

Pure.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

QUANTILES: Final = {"p50": 0.5, "p99": 0.99}


@dataclass(slots=True)
class Answer:
    """One request. started, texts: seconds, monotonic; `error` is empty where it was answered."""

    started: float
    texts: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    completion_tokens: int = 0
    error: str = ""

    @property
    def ttft(self) -> float:
        return self.texts[0] - self.started

    @property
    def tpot(self) -> float:
        return (self.texts[-1] - self.texts[0]) / max(1, self.completion_tokens - 1)


@dataclass(frozen=True, slots=True)
class Slo:
    """Bounds in milliseconds; 0 for none."""

    ttft_ms: float = 0.0
    tpot_ms: float = 0.0

    def kept_by(self, answer: Answer) -> bool:
        return not (self.ttft_ms and answer.ttft * 1e3 > self.ttft_ms) and not (
            self.tpot_ms and answer.tpot * 1e3 > self.tpot_ms
        )


def figures(answers: Sequence[Answer], seconds: float, slo: Slo) -> dict[str, Any]:
    """One turn. `seconds`: from its first request to its last answer. Latencies in ms."""
    good = [answer for answer in answers if not answer.error and answer.texts]
    gaps = [
        later - earlier
        for answer in good
        for earlier, later in zip(answer.texts, answer.texts[1:], strict=False)
    ]
    produced = sum(answer.completion_tokens for answer in good)
    return {
        "requests": len(answers),
        "failed": dict(Counter(answer.error for answer in answers if answer.error)),
        "seconds": round(seconds, 2),
        "prompt_tokens": sum(answer.prompt_tokens for answer in good),
        "output_tokens": produced,
        "output_tokens_per_s": round(produced / seconds, 1),
        "requests_per_s": round(len(good) / seconds, 3),
        "goodput_per_s": round(sum(slo.kept_by(answer) for answer in good) / seconds, 3),
        "ttft_ms": _quantiles([answer.ttft for answer in good]),
        "tpot_ms": _quantiles([answer.tpot for answer in good if len(answer.texts) > 1]),
        "itl_ms": _quantiles(gaps),
    }


def _quantiles(seconds: Sequence[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    return {
        **{name: _at(ordered, q) for name, q in QUANTILES.items()},
        "max": _at(ordered, 1.0),
    }


def _at(ordered: Sequence[float], quantile: float) -> float:
    """The nearest-rank quantile, in ms; 0 for nothing."""
    if not ordered:
        return 0.0
    return round(ordered[min(len(ordered) - 1, int(len(ordered) * quantile))] * 1e3, 2)


def medians(turns: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Figure by figure, over turns of the same load."""
    first = turns[0]
    return {name: _median([turn[name] for turn in turns]) for name in first if name != "failed"} | {
        "failed": dict(sum((Counter(turn["failed"]) for turn in turns), Counter()))
    }


def _median(values: Sequence[Any]) -> Any:
    if isinstance(values[0], dict):
        return {name: _median([value[name] for value in values]) for name in values[0]}
    return statistics.median(values)


RATIOS: Final = {
    "output_tokens_per_s": ("output_tokens_per_s",),
    "ttft_p50": ("ttft_ms", "p50"),
    "tpot_p50": ("tpot_ms", "p50"),
    "itl_p99": ("itl_ms", "p99"),
}


def ratios(mine: Sequence[dict[str, Any]], base: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Median over pairs of turns of mine / base: pairs share a seed and the machine's mood."""
    result = {}
    for name, path in RATIOS.items():
        pairs = [(_get(a, path), _get(b, path)) for a, b in zip(mine, base, strict=True)]
        quotients = [a / b for a, b in pairs if b]
        result[name] = round(statistics.median(quotients), 3) if quotients else 0.0
    return result


def _get(turn: dict[str, Any], path: tuple[str, ...]) -> float:
    value: Any = turn
    for name in path:
        value = value[name]
    return float(value)
