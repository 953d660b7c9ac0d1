"""The questions that the project was built on, as the literature asks them.

deep-dive: 2,000 requests on a 7B model and one H100. five-requests: the batching page's worked
example. long-prompt: what 8,000 prompt tokens do to those who decode. frontier: latency over
throughput as `max_num_seqs` and `max_num_batched_tokens` vary. kv-pressure: half of the KV that
all lanes would fill; what a margin saves and costs.

Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from scheduler_svc.policies import Policies

from .engine import EngineOptions
from .scenario import Row, Setup, Variant, Workload
from .step_time import LinearStepTime
from .summary import flatten, percentiles_ms
from .workload import Lengths, Request

_MS_NS: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class Preset:
    """variants: rows to compare. extra: numbers of its own for one row; verdict: for all rows."""

    name: str
    title: str
    setup: Setup
    variants: Callable[[EngineOptions], list[Variant]]
    extra: Callable[[Row], dict[str, Any]] = lambda row: {}
    verdict: Callable[[Sequence[Row]], dict[str, Any]] = lambda rows: {}


def _with(options: EngineOptions, **changes: Any) -> EngineOptions:
    return replace(options, policies=replace(options.policies, **changes))


# ---- deep-dive

_MAX_TOKENS_OF_A_SLOT: Final = 2000


def _deep_dive_variants(options: EngineOptions) -> list[Variant]:
    """Static reserves the longest prompt and output for each slot: 450,000 / 2,000 = 225."""
    batch = max(1, min(options.kv_tokens // _MAX_TOKENS_OF_A_SLOT, options.max_num_seqs))
    return [
        Variant("static", options, padded_batch=batch),
        Variant("static-unpadded", _with(options, batching="static", batch_size=batch)),
        Variant("dynamic", _with(options, batching="dynamic", batch_size=batch)),
        Variant("continuous", _with(options, batching="continuous")),
    ]


DEEP_DIVE: Final = Preset(
    name="deep-dive",
    title="2,000 requests on a 7B model and one H100",
    setup=Setup(
        Workload("deep-dive", count=2000),
        EngineOptions(
            # 14 GB at 3.35 TB/s, and 14 GFLOP a token at an achieved 600 TFLOP/s.
            step_time=LinearStepTime(4.2, 0.023),
            kv_tokens=450_000,
            max_num_seqs=256,
            max_num_batched_tokens=2048,
        ),
    ),
    variants=_deep_dive_variants,
)

# ---- five-requests

FIVE_OUTPUTS: Final = (3, 7, 4, 5, 2)


def _five_variants(options: EngineOptions) -> list[Variant]:
    return [
        Variant("static", _with(options, batching="static")),
        Variant("dynamic", _with(options, batching="dynamic", max_delay_ms=200.0)),
        Variant("continuous", _with(options, batching="continuous")),
    ]


FIVE_REQUESTS: Final = Preset(
    name="five-requests",
    title="3 slots; A to E want 3, 7, 4, 5 and 2 tokens",
    setup=Setup(
        # A step is one forward pass; the one that reads a prompt also yields its first token.
        Workload("preset", count=5, lengths=tuple(Lengths(8, n) for n in FIVE_OUTPUTS)),
        EngineOptions(
            step_time=LinearStepTime(200.0),
            kv_tokens=4096,
            max_num_seqs=3,
            max_num_batched_tokens=256,
        ),
    ),
    variants=_five_variants,
)

# ---- long-prompt

NUM_DECODES: Final = 32
_DECODING: Final = Request(0, num_prompt_tokens=16, num_output_tokens=64)
_NEWCOMER: Final = Request(300 * _MS_NS, num_prompt_tokens=8000, num_output_tokens=8)
ITL_TARGET_MS: Final = 30.0
# With 32 decodes and t = 20 + 0.0475 · prompt tokens, 242 is the largest budget within 30 ms.
BUDGETS: Final = (
    *(48, 64, 96, 128, 160, 192, 208, 224, 232, 242, 256, 272, 288, 304, 320, 384),
    *(512, 1024, 2048, 4096, 8192),
)


def _long_prompt_variants(options: EngineOptions) -> list[Variant]:
    target = options.policies.itl_target_ms
    fixed = _with(options, itl_target_ms=0.0)
    whole = options.max_num_batched_tokens
    rows = [Variant("unchunked", fixed), Variant("adaptive", _with(options, itl_target_ms=target))]
    rows += [
        Variant(f"fixed-{budget}", replace(fixed, max_num_batched_tokens=budget))
        for budget in BUDGETS
        if options.max_num_seqs <= budget < whole
    ]
    return rows


def newcomer(row: Row) -> int:
    """The request with the longest prompt."""
    requests = row.record.requests
    return max(range(len(requests)), key=lambda index: requests[index].num_prompt_tokens)


def _long_prompt_extra(row: Row) -> dict[str, Any]:
    """newcomer_ttft_ms; stall_itl_ms: of those who decode, while the newcomer is prefilled."""
    record, index = row.record, newcomer(row)
    arrival_ns, first_ns = record.requests[index].arrival_ns, int(record.first_ns[index])
    return {
        "newcomer_ttft_ms": round((first_ns - arrival_ns) / _MS_NS, 3),
        "stall_itl_ms": percentiles_ms(record.gaps_between(arrival_ns, first_ns)),
        "max_num_batched_tokens": row.variant.options.max_num_batched_tokens,
    }


def _long_prompt_verdict(rows: Sequence[Row]) -> dict[str, Any]:
    """best_fixed: the fixed budget with the shortest newcomer TTFT whose p99 meets the target."""
    adaptive = next(row for row in rows if row.variant.name == "adaptive")
    target = adaptive.variant.options.policies.itl_target_ms
    meeting = [
        row
        for row in rows
        if row is not adaptive and flatten(row.summary, "stall_itl_ms.p99") <= target
    ]
    if not meeting:
        return {"itl_target_ms": target, "best_fixed": None}
    best = min(meeting, key=lambda row: row.summary["newcomer_ttft_ms"])
    ratio = adaptive.summary["newcomer_ttft_ms"] / best.summary["newcomer_ttft_ms"]
    return {
        "itl_target_ms": target,
        "best_fixed": best.variant.name,
        "best_fixed_ttft_ms": best.summary["newcomer_ttft_ms"],
        "adaptive_over_best_fixed": round(ratio, 4),
    }


LONG_PROMPT: Final = Preset(
    name="long-prompt",
    title="32 sequences decode; a prompt of 8,000 tokens arrives",
    setup=Setup(
        Workload("trace", count=NUM_DECODES + 1, trace=(*[_DECODING] * NUM_DECODES, _NEWCOMER)),
        EngineOptions(
            step_time=LinearStepTime(20.0, prompt_token_ms=0.0475),
            kv_tokens=65_536,
            max_num_seqs=48,
            max_num_batched_tokens=8192,
            policies=Policies(itl_target_ms=ITL_TARGET_MS),
        ),
    ),
    variants=_long_prompt_variants,
    extra=_long_prompt_extra,
    verdict=_long_prompt_verdict,
)

# ---- frontier

SEQS: Final = (8, 12, 16, 24, 32, 64)
FRONTIER_BUDGETS: Final = (256, 512, 1024, 2048, 8192)


def _frontier_variants(options: EngineOptions) -> list[Variant]:
    return [
        Variant(
            f"seqs-{seqs}-budget-{budget}",
            replace(options, max_num_seqs=seqs, max_num_batched_tokens=budget),
        )
        for seqs in SEQS
        for budget in FRONTIER_BUDGETS
        if budget >= seqs
    ]


def _frontier_extra(row: Row) -> dict[str, Any]:
    options = row.variant.options
    return {
        "max_num_seqs": options.max_num_seqs,
        "max_num_batched_tokens": options.max_num_batched_tokens,
    }


def pareto(rows: Sequence[Row], *latencies: str) -> list[Row]:
    """Rows that no other beats in throughput and every one of `latencies`, by rising throughput."""

    def point(row: Row) -> tuple[float, ...]:
        rate = -flatten(row.summary, "output_tokens_per_s")
        return (rate, *(flatten(row.summary, name) for name in latencies))

    def beaten(row: Row) -> bool:
        mine = point(row)
        return any(
            theirs != mine and all(t <= m for t, m in zip(theirs, mine, strict=True))
            for theirs in map(point, rows)
        )

    return sorted((row for row in rows if not beaten(row)), key=point, reverse=True)


def _frontier_verdict(rows: Sequence[Row]) -> dict[str, Any]:
    """frontier: by p99 TTFT; frontier_with_itl: by p99 TTFT and p99 ITL, which pull apart."""
    both = pareto(rows, "ttft_ms.p99", "itl_ms.p99")
    return {
        "frontier": [row.variant.name for row in pareto(rows, "ttft_ms.p99")],
        "frontier_with_itl": [row.variant.name for row in both],
    }


FRONTIER: Final = Preset(
    name="frontier",
    title="p99 TTFT over throughput: max_num_seqs and max_num_batched_tokens",
    setup=Setup(
        # Prompts ten times as long as outputs: the token budget has something to decide.
        Workload(
            "log-normal",
            count=160,
            num_prompt_tokens=1000,
            num_output_tokens=100,
            prompt_sigma=0.8,
            output_sigma=0.6,
            rate=30.0,
            seed=1,
        ),
        DEEP_DIVE.setup.engine,
    ),
    variants=_frontier_variants,
    extra=_frontier_extra,
    verdict=_frontier_verdict,
)

# ---- kv-pressure

WATERMARKS: Final = (0.01, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5)
_PRESSED_LANES: Final = 128
# A request of this workload holds 523 tokens on average while it runs: half of what all lanes want.
_PRESSED_TOKENS: Final = _PRESSED_LANES * 523 // 2


def _kv_pressure_variants(options: EngineOptions) -> list[Variant]:
    host = replace(options, host_kv_tokens=4 * options.kv_tokens)
    return [
        Variant("learned", _with(options, margin="learned")),
        Variant("learned-host", _with(host, margin="learned")),
        *(
            Variant(f"fixed-{share:.0%}", _with(options, margin="watermark", watermark=share))
            for share in WATERMARKS
        ),
        Variant("fixed-1%-host", _with(host, margin="watermark")),
    ]


def _kv_pressure_extra(row: Row) -> dict[str, Any]:
    summary = row.summary
    share = summary["recomputed_tokens"] / max(1, summary["computed_tokens"])
    return {"recomputed_share": round(share, 4)}


def _kv_pressure_verdict(rows: Sequence[Row]) -> dict[str, Any]:
    """best_fixed: the fixed margin, without host tier, with most output tokens per second."""

    def rate(row: Row) -> float:
        return float(row.summary["output_tokens_per_s"])

    learned = next(row for row in rows if row.variant.name == "learned")
    fixed = [row for row in rows if not row.variant.options.host_kv_tokens and row is not learned]
    if not fixed:
        return {"best_fixed": None}
    best = max(fixed, key=rate)
    return {
        "best_fixed": best.variant.name,
        "learned_over_best_fixed": round(rate(learned) / rate(best), 4),
    }


KV_PRESSURE: Final = Preset(
    name="kv-pressure",
    title="a pool of half of what all lanes would hold",
    setup=Setup(
        Workload("sharegpt", count=1000, seed=1),
        EngineOptions(
            step_time=LinearStepTime(4.2, 0.023),
            kv_tokens=_PRESSED_TOKENS,
            max_num_seqs=_PRESSED_LANES,
            max_num_batched_tokens=2048,
            # Clients ask for far more than they get: nobody can count on the limit.
            max_tokens=2048,
        ),
    ),
    variants=_kv_pressure_variants,
    extra=_kv_pressure_extra,
    verdict=_kv_pressure_verdict,
)

PRESETS: Final = {
    each.name: each for each in (DEEP_DIVE, FIVE_REQUESTS, LONG_PROMPT, FRONTIER, KV_PRESSURE)
}
