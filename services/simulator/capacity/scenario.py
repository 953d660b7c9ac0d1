"""One question to the simulator: a workload, an engine, and the variants to be compared.

Pure: builds values; `compare` runs them in virtual time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from . import workload
from .engine import EngineOptions, run
from .padded import run_padded
from .record import Record
from .summary import summarize
from .workload import SHAREGPT, Lengths, LogNormal, Request

WorkloadKind: TypeAlias = Literal["preset", "deep-dive", "sharegpt", "log-normal", "fixed", "trace"]
MAX_TOKENS: Final = 8192
"""Longest prompt or output that the log-normal kind draws."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Lengths and arrivals. preset: the lengths that the preset itself names.

    num_prompt_tokens, num_output_tokens: fixed, or means of the log-normal kind with the sigmas.
    rate: Poisson arrivals per second, 0 for all at the start. period_ms: even arrivals instead.
    lengths: of the preset; trace: recorded requests.
    """

    kind: WorkloadKind
    count: int
    num_prompt_tokens: int = 512
    num_output_tokens: int = 128
    prompt_sigma: float = SHAREGPT.prompt_sigma
    output_sigma: float = SHAREGPT.output_sigma
    rate: float = 0.0
    period_ms: float = 0.0
    seed: int = 0
    lengths: tuple[Lengths, ...] = ()
    trace: tuple[Request, ...] = ()

    def requests(self) -> list[Request]:
        """In order of arrival; at least one."""
        if self.kind == "trace":
            return list(self.trace)
        lengths = self._lengths()
        if self.rate:
            return workload.poisson(lengths, self.rate, self.seed)
        if self.period_ms:
            return workload.every(lengths, self.period_ms)
        return workload.closed(lengths)

    def _lengths(self) -> list[Lengths]:
        if self.kind == "deep-dive":
            return workload.deep_dive(self.count)
        if self.kind == "sharegpt":
            return workload.log_normal(self.count, SHAREGPT, self.seed)
        if self.kind == "log-normal":
            shape = LogNormal(*self._means, self.prompt_sigma, self.output_sigma, MAX_TOKENS)
            return workload.log_normal(self.count, shape, self.seed)
        if self.kind == "fixed":
            return workload.fixed(self.count, self.num_prompt_tokens, self.num_output_tokens)
        return list(self.lengths)

    @property
    def _means(self) -> tuple[int, int]:
        return self.num_prompt_tokens, self.num_output_tokens

    @property
    def text(self) -> str:
        """One line, for reports."""
        prompt, output = self._means
        lengths = {
            "deep-dive": "lengths of the deep dive's generator",
            "sharegpt": f"ShareGPT-like log-normal lengths (seed {self.seed})",
            "log-normal": f"log-normal lengths around {prompt} and {output} (seed {self.seed})",
            "fixed": f"{prompt} prompt and {output} output tokens",
        }.get(self.kind, f"lengths of the {self.kind}")
        if self.kind == "trace":
            return f"{len(self.trace):,} recorded requests"
        arrivals = "all at the start"
        if self.rate:
            arrivals = f"Poisson at {self.rate:g}/s"
        elif self.period_ms:
            arrivals = f"one every {self.period_ms:g} ms"
        count = len(self.lengths) if self.kind == "preset" else self.count
        return f"{count:,} requests, {lengths}, {arrivals}"


class Variant(NamedTuple):
    """One row. padded_batch: groups of so many, charged by the padded formula instead of run."""

    name: str
    options: EngineOptions
    padded_batch: int = 0


class Row(NamedTuple):
    """summary: see `summarize`, and what the preset adds."""

    variant: Variant
    record: Record
    summary: dict[str, Any]


class Setup(NamedTuple):
    """What a preset starts from, and what flags may change."""

    workload: Workload
    engine: EngineOptions


def run_variant(variant: Variant, requests: list[Request]) -> Row:
    options = variant.options
    if variant.padded_batch:
        record = run_padded(options.step_time, variant.padded_batch, requests)
    else:
        record = run(options, requests)
    return Row(variant, record, summarize(record))


def compare(
    variants: list[Variant], requests: list[Request], extra: Callable[[Row], dict[str, Any]]
) -> Iterator[Row]:
    """The same requests for each variant; `extra` adds the preset's own numbers to a row."""
    for variant in variants:
        row = run_variant(variant, requests)
        row.summary.update(extra(row))
        yield row
