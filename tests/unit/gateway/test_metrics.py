from __future__ import annotations

import time
from typing import Any

import pytest

from services.contracts.beats import Beat, ServiceKind
from services.gateway.mesh_view import MeshView
from services.gateway.metrics import Meter, Metrics
from tests.unit.fake_admission import engine_load
from tests.unit.gateway.exposition import samples


def frame(num_tokens: int, reason: str | None = None) -> dict[str, Any]:
    usage = {"prompt_tokens": 5, "completion_tokens": 3, "cached_tokens": 0}
    return {
        "token_ids": [1] * num_tokens,
        "finish_reason": reason,
        "usage": usage if reason else None,
    }


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def test_a_generation_is_measured_on_one_clock(clock: list[float]) -> None:
    metrics = Metrics(MeshView())
    meter = Meter(metrics, "m", started_s=100.0)
    clock[0] = 100.5
    meter.frame(frame(1))
    clock[0] = 101.5
    meter.frame(frame(2))
    clock[0] = 102.0
    meter.frame(frame(0, "stop"))
    meter.end("abort")
    found = samples(metrics.exposition())
    model = 'model_name="m"'
    assert found[f"vllm:time_to_first_token_seconds_sum{{{model}}}"] == 0.5
    assert found[f"vllm:inter_token_latency_seconds_count{{{model}}}"] == 2
    assert found[f"vllm:inter_token_latency_seconds_sum{{{model}}}"] == 1.0
    assert found[f"vllm:e2e_request_latency_seconds_sum{{{model}}}"] == 2.0
    assert found[f"vllm:prompt_tokens_total{{{model}}}"] == 5
    assert found[f"vllm:generation_tokens_total{{{model}}}"] == 3
    assert found[f'vllm:request_success_total{{finished_reason="stop",{model}}}'] == 1
    assert not any('finished_reason="abort"' in name for name in found)


def test_an_aborted_generation_is_counted_once(clock: list[float]) -> None:
    metrics = Metrics(MeshView())
    meter = Meter(metrics, "m", started_s=100.0)
    meter.end("abort")
    meter.end("abort")
    found = samples(metrics.exposition())
    assert found['vllm:request_success_total{finished_reason="abort",model_name="m"}'] == 1
    assert 'vllm:time_to_first_token_seconds_sum{model_name="m"}' not in found


def test_case_51_gauges_are_those_of_the_latest_beat() -> None:
    view = MeshView()
    metrics = Metrics(view)
    labels = '{engine="s",model_name="toy"}'

    def hear(**load: Any) -> dict[str, float]:
        beat = Beat(ServiceKind.SCHEDULER, "s", engine=engine_load(**load))
        view.hear(beat, time.monotonic_ns())
        return samples(metrics.exposition())

    busy = hear(num_running=106, num_waiting=3, num_blocks_held=90, num_preemptions=2)
    assert busy[f"vllm:num_requests_running{labels}"] == 106
    assert busy[f"vllm:num_requests_waiting{labels}"] == 3
    assert busy[f"vllm:kv_cache_usage_perc{labels}"] == 0.9
    assert busy[f"vllm:num_preemptions_total{labels}"] == 2
    idle = hear(num_preemptions=2)
    assert idle[f"vllm:num_requests_running{labels}"] == 0
    assert idle[f"vllm:kv_cache_usage_perc{labels}"] == 0


def test_gauges_of_a_scheduler_that_is_gone_are_gone() -> None:
    view = MeshView()
    view.hear(Beat(ServiceKind.SCHEDULER, "s", engine=engine_load(num_running=5)), 0)
    assert not any("running" in name for name in samples(Metrics(view).exposition()))
