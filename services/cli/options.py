"""The flags that every command which starts or joins a cluster shares.

Invariant: a flag that was not given is None, so that file and environment keep their say; names,
help and defaults come from the settings, which also check the values.

Pure: data.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Annotated

from cyclopts import Parameter

from services.runtime.settings import Settings, knobs, load


def _knob(name: str, *, flag: str | None = None, show: bool = True) -> Parameter:
    """A flag whose help and default are those of the setting `name`."""
    knob = next(knob for knob in knobs() if knob.name == name)
    default = "" if knob.default == "" else f" [default: {knob.default}]"
    text = str(knob.metadata["help"])
    choices = f": {' | '.join(knob.metadata['choices'])}" if knob.metadata["choices"] else ""
    return Parameter(name=flag, help=text + choices + default, negative=(), show=show)


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterOptions:
    """Settings as flags; None where the flag was not given."""

    model: Annotated[str | None, _knob("model")] = None
    served_name: Annotated[str | None, _knob("served_name")] = None
    device: Annotated[str | None, _knob("device")] = None
    dtype: Annotated[str | None, _knob("dtype")] = None
    num_admissions: Annotated[int | None, _knob("num_admissions")] = None
    quantization: Annotated[str | None, _knob("quantization")] = None
    kv_cache_dtype: Annotated[str | None, _knob("kv_cache_dtype")] = None
    batch_invariant: Annotated[str | None, _knob("batch_invariant")] = None
    http_host: Annotated[str | None, _knob("http_host")] = None
    http_port: Annotated[int | None, _knob("http_port")] = None
    http_drain_s: Annotated[float | None, _knob("http_drain_s")] = None
    api_key_file: Annotated[str | None, _knob("api_key_file")] = None
    nats_url: Annotated[str | None, _knob("nats_url", flag="--nats")] = None
    nats_port: Annotated[int | None, _knob("nats_port")] = None
    max_num_seqs: Annotated[int | None, _knob("max_num_seqs")] = None
    max_num_batched_tokens: Annotated[int | None, _knob("max_num_batched_tokens")] = None
    max_model_len: Annotated[int | None, _knob("max_model_len")] = None
    max_waiting_seqs: Annotated[int | None, _knob("max_waiting_seqs")] = None
    block_size: Annotated[int | None, _knob("block_size")] = None
    num_blocks: Annotated[int | None, _knob("num_blocks")] = None
    host_blocks: Annotated[int | None, _knob("host_blocks")] = None
    tenant_cache_share: Annotated[float | None, _knob("tenant_cache_share")] = None
    batching: Annotated[str | None, _knob("batching")] = None
    batch_size: Annotated[int | None, _knob("batch_size")] = None
    max_delay_ms: Annotated[float | None, _knob("max_delay_ms")] = None
    step_kind: Annotated[str | None, _knob("step_kind")] = None
    prefill_attempt_interval: Annotated[int | None, _knob("prefill_attempt_interval")] = None
    prefill_any_attempt_interval: Annotated[int | None, _knob("prefill_any_attempt_interval")] = (
        None
    )
    cache_watermark: Annotated[float | None, _knob("cache_watermark")] = None
    queue: Annotated[str | None, _knob("queue")] = None
    margin: Annotated[str | None, _knob("margin")] = None
    watermark: Annotated[float | None, _knob("watermark")] = None
    itl_target_ms: Annotated[float | None, _knob("itl_target_ms")] = None
    worker: Annotated[str | None, _knob("worker")] = None
    step_ms: Annotated[float | None, _knob("step_ms")] = None
    threads: Annotated[int | None, _knob("threads")] = None
    cache_dir: Annotated[str | None, _knob("cache_dir")] = None
    run_dir: Annotated[str | None, _knob("run_dir")] = None
    trace_ratio: Annotated[float | None, _knob("trace_ratio")] = None
    otlp_endpoint: Annotated[str | None, _knob("otlp_endpoint")] = None
    log_level: Annotated[str | None, _knob("log_level")] = None
    config: Annotated[str | None, Parameter(help="TOML file of settings")] = None

    def settings(self) -> Settings:
        """File < environment < these flags. Raises SettingsError."""
        given = {
            field.name: value
            for field in dataclasses.fields(self)
            if field.name != "config" and (value := getattr(self, field.name)) is not None
        }
        return load(config=self.config, flags=given)
