"""Requests of the simulation: the generator bit for bit, means, arrivals, traces."""

from __future__ import annotations

import numpy as np
import pytest

from services.simulator.capacity import workload
from services.simulator.capacity.workload import (
    SHAREGPT,
    Lengths,
    Request,
    TraceError,
    closed,
    deep_dive,
    log_normal,
    poisson,
    read_trace,
)


def test_the_deep_dives_generator_is_reproduced_bit_for_bit() -> None:
    lengths = deep_dive(2000)
    assert lengths[:3] == [Lengths(834, 726), Lengths(788, 943), Lengths(344, 116)]
    assert sum(each.num_output_tokens for each in lengths) == 980_512


def test_sharegpt_like_lengths_have_the_stated_means_and_bounds() -> None:
    lengths = log_normal(20_000, SHAREGPT, seed=5)
    prompts = np.array([each.num_prompt_tokens for each in lengths])
    outputs = np.array([each.num_output_tokens for each in lengths])
    assert prompts.mean() == pytest.approx(SHAREGPT.prompt_mean, rel=0.05)
    # The cut at 2,048 takes a little off the long tail of outputs.
    assert outputs.mean() == pytest.approx(SHAREGPT.output_mean, rel=0.05)
    assert prompts.min() >= 4 and outputs.max() <= SHAREGPT.max_tokens
    assert np.percentile(prompts, 99) / np.median(prompts) == pytest.approx(16, rel=0.1)
    assert np.percentile(outputs, 99) / np.median(outputs) == pytest.approx(9, rel=0.1)


def test_no_spread_means_equal_lengths() -> None:
    shape = SHAREGPT._replace(prompt_sigma=0.0, output_sigma=0.0)
    assert set(log_normal(10, shape, seed=1)) == {Lengths(161, 338)}


def test_the_same_seed_gives_the_same_requests_and_another_does_not() -> None:
    lengths = log_normal(50, SHAREGPT, seed=1)
    assert poisson(lengths, 10.0, seed=1) == poisson(lengths, 10.0, seed=1)
    assert poisson(lengths, 10.0, seed=1) != poisson(lengths, 10.0, seed=2)
    assert lengths != log_normal(50, SHAREGPT, seed=2)


def test_poisson_arrivals_come_at_the_rate_and_in_order() -> None:
    requests = poisson(workload.fixed(5000, 8, 8), 20.0, seed=3)
    times = np.array([request.arrival_ns for request in requests])
    assert (np.diff(times) > 0).all()
    assert 5000 / (times[-1] / 1e9) == pytest.approx(20.0, rel=0.05)


def test_closed_means_all_at_the_start() -> None:
    assert closed([Lengths(3, 4)] * 2) == [Request(0, 3, 4)] * 2


def test_a_trace_is_read_in_order_of_arrival() -> None:
    lines = [
        '{"arrival_ms": 12.5, "prompt_tokens": 7, "output_tokens": 2}\n',
        "\n",
        '{"arrival_ms": 0, "prompt_tokens": 5, "output_tokens": 1, "user": "ignored"}\n',
    ]
    assert read_trace(lines) == [Request(0, 5, 1), Request(12_500_000, 7, 2)]


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("{", "line 2"),
        ('{"arrival_ms": 0, "prompt_tokens": 0, "output_tokens": 1}', "prompt_tokens is 0"),
        ('{"arrival_ms": -1, "prompt_tokens": 1, "output_tokens": 1}', "arrival_ms is -1"),
        ('{"arrival_ms": 0, "prompt_tokens": 1, "output_tokens": 0}', "output_tokens is 0"),
        ('{"arrival_ms": 0, "prompt_tokens": 1}', "output_tokens"),
        ('{"arrival_ms": 0, "prompt_tokens": "1", "output_tokens": 1}', "line 2"),
    ],
)
def test_a_bad_trace_line_is_named(line: str, word: str) -> None:
    good = '{"arrival_ms": 0, "prompt_tokens": 1, "output_tokens": 1}'
    with pytest.raises(TraceError, match=word):
        read_trace([good, line])


def test_an_empty_trace_is_refused() -> None:
    with pytest.raises(TraceError, match="no request"):
        read_trace(["", "\n"])
