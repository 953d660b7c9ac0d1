"""The presets against the numbers that the literature and the arithmetic give."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from scheduler_svc.policies import Policies
from services.simulator.capacity.engine import EngineOptions, run
from services.simulator.capacity.padded import run_padded
from services.simulator.capacity.presets import (
    DEEP_DIVE,
    FIVE_REQUESTS,
    FRONTIER,
    KV_PRESSURE,
    LONG_PROMPT,
    Preset,
    pareto,
)
from services.simulator.capacity.record import Record
from services.simulator.capacity.scenario import Row, compare
from services.simulator.capacity.step_time import LinearStepTime
from services.simulator.capacity.summary import summarize
from services.simulator.capacity.workload import (
    SHAREGPT,
    Request,
    closed,
    fixed,
    log_normal,
    poisson,
)

SMALL = EngineOptions(
    step_time=LinearStepTime(10.0),
    kv_tokens=4096,
    max_num_seqs=8,
    max_num_batched_tokens=64,
)


def _rows(preset: Preset, only: tuple[str, ...] = ()) -> dict[str, Row]:
    variants = [v for v in preset.variants(preset.setup.engine) if not only or v.name in only]
    rows = compare(variants, preset.setup.workload.requests(), preset.extra)
    return {row.variant.name: row for row in rows}


def _check_complete(record: Record) -> None:
    """Each request has all its tokens, in order, and none before it arrived."""
    wanted = [request.num_output_tokens for request in record.requests]
    assert record.num_tokens.tolist() == wanted
    arrivals = np.array([request.arrival_ns for request in record.requests])
    assert (record.first_ns > arrivals).all()
    assert sum(len(gaps.requests) for gaps in record.gaps) == sum(wanted) - len(wanted)
    assert all((gaps.gaps_ns > 0).all() for gaps in record.gaps)


# ---- the presets


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_deep_dive_static_as_charged_and_continuous() -> None:
    rows = _rows(DEEP_DIVE, ("static", "continuous"))
    static, continuous = rows["static"].summary, rows["continuous"].summary
    assert static["output_tokens_per_s"] == pytest.approx(9_124, rel=0.01)
    assert static["padding_waste"] > 0.5
    assert continuous["output_tokens_per_s"] >= 14_997 * 0.99
    assert continuous["output_tokens"] == static["output_tokens"] == 980_512
    assert continuous["preemptions"] == continuous["recomputed_tokens"] == 0
    _check_complete(rows["continuous"].record)


def test_five_requests_take_12_steps_static_and_8_continuous() -> None:
    rows = _rows(FIVE_REQUESTS)
    assert {name: row.summary["steps"] for name, row in rows.items()} == {
        "static": 12,
        "dynamic": 12,
        "continuous": 8,
    }
    for row in rows.values():
        _check_complete(row.record)
    # D sits where A sat, from the step after A's last token on.
    seats = {
        (index, owner): lane
        for index, step in enumerate(rows["continuous"].record.steps)
        for lane, owner in zip(step.lanes.tolist(), step.owners.tolist(), strict=True)
    }
    assert seats[(2, 0)] == seats[(3, 3)] == seats[(7, 3)]


def test_dynamic_starts_early_where_requests_trickle_in() -> None:
    setup = FIVE_REQUESTS.setup
    requests = dataclasses.replace(setup.workload, period_ms=400.0).requests()
    variants = FIVE_REQUESTS.variants(setup.engine)
    waits = {
        row.variant.name: row.summary["ttft_ms"]["max"]
        for row in compare(variants, requests, FIVE_REQUESTS.extra)
    }
    assert waits["continuous"] < waits["dynamic"] < waits["static"]


def test_a_long_prompt_stalls_the_others_unless_the_budget_adapts() -> None:
    rows = _rows(LONG_PROMPT)
    assert rows["unchunked"].summary["stall_itl_ms"]["max"] == pytest.approx(400, rel=0.01)
    assert rows["unchunked"].summary["itl_ms"]["p99"] == pytest.approx(400, rel=0.01)
    adaptive = rows["adaptive"].summary
    assert adaptive["stall_itl_ms"]["p99"] < 33
    assert adaptive["itl_ms"]["p99"] < 33
    verdict = LONG_PROMPT.verdict(list(rows.values()))
    assert verdict["best_fixed"] == "fixed-242"
    assert verdict["adaptive_over_best_fixed"] <= 1.25


def test_the_best_fixed_budget_is_what_the_arithmetic_says() -> None:
    """20 + 0.0475 · (242 - 32) = 29.975 ms: 39 steps for 8,000 tokens, after what is left of one.

    The verdict would be worth nothing if the sweep missed the best one.
    """
    row = _rows(LONG_PROMPT, ("fixed-242",))["fixed-242"]
    assert row.summary["stall_itl_ms"]["p99"] == pytest.approx(29.975, abs=0.001)
    chunks = [step.load.num_prefill_tokens for step in row.record.steps]
    assert sum(chunk == 210 for chunk in chunks) >= 38
    assert row.summary["newcomer_ttft_ms"] < 40 * 30


def _frontier_row(rate: float, ttft: float, name: str) -> Row:
    variant = FRONTIER.variants(FRONTIER.setup.engine)[0]._replace(name=name)
    summary: dict[str, Any] = {"output_tokens_per_s": rate, "ttft_ms": {"p99": ttft}}
    return Row(variant, Record.empty([]), summary)


def test_the_frontier_keeps_what_nothing_beats() -> None:
    rows = [
        _frontier_row(100, 10, "slow and soon"),
        _frontier_row(200, 50, "fast and late"),
        _frontier_row(150, 60, "beaten"),
        _frontier_row(200, 70, "beaten too"),
    ]
    assert [row.variant.name for row in pareto(rows, "ttft_ms.p99")] == [
        "slow and soon",
        "fast and late",
    ]


def test_the_frontier_sweeps_both_knobs() -> None:
    variants = FRONTIER.variants(FRONTIER.setup.engine)
    knobs = {(v.options.max_num_seqs, v.options.max_num_batched_tokens) for v in variants}
    assert len(knobs) == len(variants) >= 20
    assert len({seqs for seqs, _ in knobs}) >= 4 and len({budget for _, budget in knobs}) >= 4


# ---- the engine


def test_a_prompt_of_10_000_under_a_budget_of_4_096_takes_three_chunks() -> None:
    options = dataclasses.replace(SMALL, kv_tokens=16_384, max_num_batched_tokens=4096)
    record = run(options, [Request(0, 10_000, 1)])
    assert [step.load.num_prefill_tokens for step in record.steps] == [4096, 4096, 1808]


def test_the_same_requests_give_the_same_record() -> None:
    requests = [Request(index * 3_000_000, 20 + index, 5 + index % 7) for index in range(30)]
    first, second = run(SMALL, requests), run(SMALL, requests)
    assert first.first_ns.tolist() == second.first_ns.tolist()
    assert [step.load for step in first.steps] == [step.load for step in second.steps]
    _check_complete(first)


def test_a_request_that_can_never_fit_is_refused_and_the_rest_goes_on() -> None:
    record = run(SMALL, [Request(0, 5000, 1), Request(0, 8, 3)])
    assert list(record.refused) == [0] and "KV pool" in record.refused[0]
    assert record.num_tokens.tolist() == [0, 3]
    assert summarize(record)["refused"] == 1


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_a_pool_that_is_too_small_preempts_and_everyone_ends(prefix_caching: bool) -> None:
    options = dataclasses.replace(
        SMALL,
        kv_tokens=512,
        prefix_caching=prefix_caching,
        policies=Policies(margin="watermark"),
    )
    record = run(options, closed(fixed(12, 40, 80)))
    _check_complete(record)
    row = summarize(record)
    assert row["preemptions"] > 0
    assert row["recomputed_tokens"] > 0
    assert row["computed_tokens"] == 12 * (40 + 80 - 1) + row["recomputed_tokens"]


def test_a_stop_that_nobody_foresees_costs_at_most_one_token_per_answer() -> None:
    requests = [Request(index * 7_000_000, 20, 5 + index) for index in range(20)]
    options = dataclasses.replace(SMALL, max_tokens=200)
    record = run(options, requests)
    _check_complete(record)
    assert 0 < record.num_discarded_tokens <= len(requests)
    assert record.num_recomputed_tokens == 0
    assert run(SMALL, requests).num_discarded_tokens == 0


def test_the_learned_margin_recomputes_less_than_the_watermark() -> None:
    """Half of what all would hold at their end; clients ask for far more than they get."""
    lengths = log_normal(120, SHAREGPT._replace(max_tokens=400), seed=4)
    requests = poisson(lengths, 40.0, seed=4)
    rows = {}
    for margin in ("watermark", "learned"):
        options = EngineOptions(
            LinearStepTime(4.2, 0.023),
            kv_tokens=4_000,
            max_num_seqs=64,
            max_num_batched_tokens=512,
            policies=Policies(margin=margin),  # type: ignore[arg-type]
            max_tokens=2000,
        )
        rows[margin] = summarize(run(options, requests))
    learned, watermark = rows["learned"], rows["watermark"]
    assert learned["recomputed_tokens"] < 0.05 * learned["computed_tokens"]
    assert learned["preemptions"] < watermark["preemptions"]


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_under_kv_pressure_the_learned_margin_is_near_the_best_fixed_one() -> None:
    setup = KV_PRESSURE.setup
    requests = dataclasses.replace(setup.workload, count=400).requests()
    wanted = ("learned", "learned-host", "fixed-5%", "fixed-10%")
    variants = [v for v in KV_PRESSURE.variants(setup.engine) if v.name in wanted]
    rows = list(compare(variants, requests, KV_PRESSURE.extra))
    assert rows[0].variant.name == "learned" and rows[0].summary["recomputed_share"] < 0.05
    assert KV_PRESSURE.verdict(rows)["learned_over_best_fixed"] > 0.95
    share = {row.variant.name: row.summary["recomputed_share"] for row in rows}
    assert share["learned-host"] < share["learned"]


def test_bus_latency_delays_the_first_token_and_hides_behind_the_steps() -> None:
    requests = closed(fixed(4, 8, 200))
    ideal = summarize(run(SMALL, requests))
    slow = summarize(run(dataclasses.replace(SMALL, bus_ms=0.5), requests))
    assert slow["ttft_ms"]["p50"] > ideal["ttft_ms"]["p50"] + 1
    assert slow["duration_s"] == pytest.approx(ideal["duration_s"], rel=0.03)


def test_separate_steps_never_mix() -> None:
    options = dataclasses.replace(
        SMALL, policies=Policies(step_kind="separate", prefill_attempt_interval=5)
    )
    record = run(options, [Request(index * 15_000_000, 30, 20) for index in range(10)])
    _check_complete(record)
    loads = [step.load for step in record.steps]
    assert not any(load.num_decode_tokens and load.num_prefill_tokens for load in loads)


# ---- the padded formula


def test_padded_rows_by_hand() -> None:
    """Two groups of two: prefill 3 + 5, then max(1, 3) steps of width 2; prefill 2, then 2 of 1."""
    requests = [Request(0, 3, 1), Request(0, 5, 3), Request(0, 2, 2)]
    record = run_padded(LinearStepTime(1.0, token_ms=0.5), 2, requests)
    durations = [(step.end_ns - step.start_ns) / 1e6 for step in record.steps]
    assert durations == [5.0, 2.0, 2.0, 2.0, 2.0, 1.5, 1.5]
    assert (record.first_ns / 1e6).tolist() == [7.0, 7.0, 14.5]
    assert (record.last_ns / 1e6).tolist() == [7.0, 11.0, 16.0]
    assert summarize(record)["padding_waste"] == pytest.approx(1 - 6 / 8)


def test_a_padded_group_waits_for_its_last_member() -> None:
    requests = [Request(0, 1, 1), Request(50_000_000, 1, 1)]
    record = run_padded(LinearStepTime(1.0), 2, requests)
    assert record.steps[0].start_ns == 50_000_000
