"""What can be measured at the edge, under the names that vLLM uses.

Invariants: every interval is between two readings of one monotonic clock in this process; gauges
are read from the latest beats when somebody asks, so none can keep an old value; each generation is
counted once in `request_success`, also one that was aborted.

Shell: reads the clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from services.client import Frame
from services.contracts.beats import EngineLoad
from services.gateway.mesh_view import MeshView

_LATENCIES_S: Final = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0),
)
_TOKENS: Final = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))
_CHOICES: Final = (1.0, 2.0, 5.0, 10.0, 16.0)
_ENGINE_LABELS: Final = ("model_name", "engine")

_GAUGES: Final[dict[str, tuple[str, Callable[[EngineLoad], float]]]] = {
    "vllm:num_requests_running": ("Sequences that run.", lambda load: load.num_running),
    "vllm:num_requests_waiting": ("Sequences that wait.", lambda load: load.num_waiting),
    "vllm:kv_cache_usage_perc": (
        "Share of KV blocks held by sequences; cached ones that nobody holds are free. 1 is all.",
        lambda load: load.num_blocks_held / max(load.num_blocks_total, 1),
    ),
}
_TOTALS: Final[dict[str, tuple[str, Callable[[EngineLoad], float]]]] = {
    "vllm:num_preemptions": ("Preemptions.", lambda load: load.num_preemptions),
    "vllm:prefix_cache_queries": (
        "Prompt tokens looked up in the prefix cache.",
        lambda load: load.num_prefix_queries,
    ),
    "vllm:prefix_cache_hits": (
        "Prompt tokens found in the prefix cache.",
        lambda load: load.num_prefix_hits,
    ),
    "streetcar:steps": ("Steps.", lambda load: load.num_steps),
    "streetcar:step_seqs": ("Sequences, summed over steps.", lambda load: load.num_step_seqs),
}


class _EngineCollector(Collector):
    """The engines' own figures, from their latest beats."""

    def __init__(self, view: MeshView) -> None:
        self._view = view

    def collect(self) -> Iterable[Metric]:
        engines = self._view.engines(time.monotonic_ns())
        for name, (text, value) in _GAUGES.items():
            gauge = GaugeMetricFamily(name, text, labels=_ENGINE_LABELS)
            for engine, load in engines.items():
                gauge.add_metric((load.model, engine), value(load))
            yield gauge
        for name, (text, value) in _TOTALS.items():
            total = CounterMetricFamily(name, text, labels=_ENGINE_LABELS)
            for engine, load in engines.items():
                total.add_metric((load.model, engine), value(load))
            yield total

    def describe(self) -> Iterator[Metric]:
        return iter(())


class Metrics:
    """All metrics of one gateway, in a registry of its own."""

    def __init__(self, view: MeshView) -> None:
        registry = self._registry = CollectorRegistry()
        registry.register(_EngineCollector(view))

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(name, text, ("model_name", *labels), registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, text, ("model_name",), registry=registry, buckets=buckets)

        self.prompt_tokens = counter("vllm:prompt_tokens", "Prompt tokens of ended generations.")
        self.generation_tokens = counter("vllm:generation_tokens", "Tokens received.")
        self.request_success = counter(
            "vllm:request_success", "Generations that ended, aborted ones too.", "finished_reason"
        )
        self.rejections = counter(
            "vllm:admission_rejections", "Generations that ended with an error.", "reason"
        )
        self.first_token_s = histogram(
            "vllm:time_to_first_token_seconds", "From arrival to the first token.", _LATENCIES_S
        )
        self.between_tokens_s = histogram(
            "vllm:inter_token_latency_seconds", "Between tokens.", _LATENCIES_S
        )
        self.whole_s = histogram(
            "vllm:e2e_request_latency_seconds", "From arrival to the end.", _LATENCIES_S
        )
        self.prompt_size = histogram("vllm:request_prompt_tokens", "Prompt tokens.", _TOKENS)
        self.answer_size = histogram("vllm:request_generation_tokens", "Output tokens.", _TOKENS)
        self.params_n = histogram("vllm:request_params_n", "Choices asked for.", _CHOICES)
        self.params_max_tokens = histogram(
            "vllm:request_params_max_tokens", "Output tokens asked for.", _TOKENS
        )

    def exposition(self) -> bytes:
        """All metrics in the Prometheus text format."""
        return generate_latest(self._registry)


class Meter:
    """Follows one generation: `frame` for each frame, then `end` once."""

    __slots__ = ("_last_s", "_metrics", "_model", "_num_tokens", "_started_s", "ended")

    def __init__(self, metrics: Metrics, model: str, started_s: float) -> None:
        """`started_s`: when the HTTP request arrived, as `time.monotonic` says."""
        self._metrics = metrics
        self._model = model
        self._started_s = self._last_s = started_s
        self._num_tokens = 0
        self.ended = False

    def frame(self, frame: Frame) -> None:
        num_tokens = len(frame["token_ids"])
        now_s = time.monotonic()
        if num_tokens:
            self._tokens(num_tokens, now_s)
        if frame["finish_reason"] is None:
            return
        usage = frame["usage"] or {"prompt_tokens": 0}
        self._metrics.prompt_tokens.labels(self._model).inc(usage["prompt_tokens"])
        self._metrics.prompt_size.labels(self._model).observe(usage["prompt_tokens"])
        self.end(frame["finish_reason"])

    def end(self, reason: str) -> None:
        """Idempotent: the first end counts."""
        if self.ended:
            return
        self.ended = True
        metrics, model = self._metrics, self._model
        metrics.request_success.labels(model, reason).inc()
        metrics.whole_s.labels(model).observe(time.monotonic() - self._started_s)
        metrics.answer_size.labels(model).observe(self._num_tokens)

    def fail(self, code: str) -> None:
        """The mesh ended the generation with an error."""
        self._metrics.rejections.labels(self._model, code).inc()
        self.end("error")

    def _tokens(self, num_tokens: int, now_s: float) -> None:
        metrics, model = self._metrics, self._model
        gap_s = now_s - self._last_s
        num_gaps = num_tokens
        if self._num_tokens == 0:
            metrics.first_token_s.labels(model).observe(now_s - self._started_s)
            # Tokens that come together with the first one have no gap of their own.
            num_gaps = 0
        between = metrics.between_tokens_s.labels(model)
        for _ in range(num_gaps):
            between.observe(gap_s / num_tokens)
        metrics.generation_tokens.labels(model).inc(num_tokens)
        self._num_tokens += num_tokens
        self._last_s = now_s
