"""The flags of `streetcar sim`, and what they make of a preset.

Invariant: a flag that was not given leaves the preset's own value.

Shell: reads a recorded trace.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from cyclopts import Group, Parameter

from services.runtime.problem import Problem

if TYPE_CHECKING:
    from services.simulator.capacity.engine import EngineOptions
    from services.simulator.capacity.scenario import Setup, Workload
    from services.simulator.capacity.step_time import RooflineStepTime, StepTime

_WORKLOAD: Final = Group("Workload")
_ENGINE: Final = Group("Engine")
_POLICIES: Final = Group("Policies")
_STEP_TIME: Final = Group("Step time")

_DEFAULT_GPU: Final = "h100"
_DEFAULT_SIZE: Final = "8b"


def _flag(group: Group, text: str, name: str | None = None) -> Parameter:
    return Parameter(name=name, group=group, help=text, show_default=False)


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class SimOptions:
    """None where a flag was not given."""

    workload: Annotated[
        Literal["deep-dive", "sharegpt", "log-normal", "fixed"] | None,
        _flag(_WORKLOAD, "lengths: the deep dive's generator, ShareGPT-like, log-normal or fixed"),
    ] = None
    requests: Annotated[int | None, _flag(_WORKLOAD, "how many")] = None
    prompt_tokens: Annotated[int | None, _flag(_WORKLOAD, "fixed, or the log-normal mean")] = None
    output_tokens: Annotated[int | None, _flag(_WORKLOAD, "fixed, or the log-normal mean")] = None
    rate: Annotated[
        float | None, _flag(_WORKLOAD, "Poisson arrivals per second; 0: all at the start")
    ] = None
    seed: Annotated[int | None, _flag(_WORKLOAD, "of lengths and arrivals")] = None
    max_tokens: Annotated[
        int | None,
        _flag(_WORKLOAD, "what clients ask for; answers end at their length by a stop token"),
    ] = None
    trace: Annotated[
        Path | None,
        _flag(_WORKLOAD, "JSON lines of arrival_ms, prompt_tokens, output_tokens"),
    ] = None

    max_num_seqs: Annotated[int | None, _flag(_ENGINE, "lanes")] = None
    max_num_batched_tokens: Annotated[int | None, _flag(_ENGINE, "tokens of a step")] = None
    kv_tokens: Annotated[int | None, _flag(_ENGINE, "tokens that the KV pool holds")] = None
    host_kv_tokens: Annotated[
        int | None, _flag(_ENGINE, "tokens that host memory below the pool holds")
    ] = None
    block_size: Annotated[int | None, _flag(_ENGINE, "tokens of a KV block")] = None
    prefix_caching: Annotated[
        bool | None,
        Parameter(
            negative="--no-prefix-caching", group=_ENGINE, help="look prompts up in the ledger"
        ),
    ] = None
    bus_ms: Annotated[float | None, _flag(_ENGINE, "latency of every message")] = None

    only: Annotated[list[str] | None, _flag(_POLICIES, "run only these rows (may be repeated)")] = (
        None
    )
    step_kind: Annotated[Literal["mixed", "separate"] | None, _flag(_POLICIES, "of a step")] = None
    queue: Annotated[
        Literal["first-come", "fit", "fair"] | None, _flag(_POLICIES, "who is next")
    ] = None
    margin: Annotated[
        Literal["watermark", "learned"] | None, _flag(_POLICIES, "of KV that an admission leaves")
    ] = None
    watermark: Annotated[
        float | None, _flag(_POLICIES, "share of the pool that an admission leaves at least")
    ] = None
    itl_target_ms: Annotated[
        float | None, _flag(_POLICIES, "fit the token budget to it; 0: fixed budget")
    ] = None

    base_ms: Annotated[float | None, _flag(_STEP_TIME, "ms of an empty step")] = None
    token_ms: Annotated[float | None, _flag(_STEP_TIME, "ms for each token")] = None
    prompt_token_ms: Annotated[float | None, _flag(_STEP_TIME, "more for prompt tokens")] = None
    kv_token_ms: Annotated[float | None, _flag(_STEP_TIME, "ms for each KV token read")] = None
    gpu: Annotated[
        Literal["a100", "h100", "h200"] | None,
        _flag(_STEP_TIME, "roofline of this machine [with --size: h100]"),
    ] = None
    size: Annotated[
        Literal["7b", "8b", "70b"] | None,
        _flag(_STEP_TIME, "roofline of this model [with --gpu: 8b]"),
    ] = None
    num_gpus: Annotated[int, _flag(_STEP_TIME, "tensor parallel, for the roofline")] = 1
    efficiency: Annotated[float, _flag(_STEP_TIME, "achieved share of peak FLOPs")] = 1.0
    fit: Annotated[str | None, _flag(_STEP_TIME, "NATS URL: fit to a live engine's steps")] = None
    fit_seconds: Annotated[float, _flag(_STEP_TIME, "how long to listen")] = 10.0

    def apply(self, setup: Setup, fitted: StepTime | None = None) -> Setup:
        """The preset's setup with these flags. Raises Problem on values that make no sense."""
        self._check_positive()
        engine = self._engine(setup.engine, fitted or self._step_time(setup.engine.step_time))
        if engine.max_num_batched_tokens < engine.max_num_seqs:
            raise _refused(
                f"max_num_batched_tokens is {engine.max_num_batched_tokens}, less than "
                f"max_num_seqs, {engine.max_num_seqs}: not every sequence could decode"
            )
        return setup._replace(workload=self._workload(setup.workload), engine=engine)

    def _check_positive(self) -> None:
        may_be_zero = {"rate", "seed", "bus_ms", "itl_target_ms", "base_ms", "max_tokens"}
        may_be_zero |= {"watermark", "host_kv_tokens"}
        may_be_zero |= {"token_ms", "prompt_token_ms", "kv_token_ms"}
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, int | float) or isinstance(value, bool):
                continue
            if value < 0 or (value == 0 and field.name not in may_be_zero):
                raise _refused(f"--{field.name.replace('_', '-')} is {value}")

    def _given(self, **names: str) -> dict[str, Any]:
        """Field of the target -> value, for flags that were given."""
        found = {target: getattr(self, flag) for target, flag in names.items()}
        return {target: value for target, value in found.items() if value is not None}

    def _workload(self, workload: Workload) -> Workload:
        if self.trace is not None:
            return replace(workload, kind="trace", trace=_read_trace(self.trace))
        given = self._given(
            kind="workload",
            count="requests",
            num_prompt_tokens="prompt_tokens",
            num_output_tokens="output_tokens",
            rate="rate",
            seed="seed",
        )
        changed = replace(workload, **given)
        if changed.kind in ("preset", "trace") and given.keys() - {"rate"}:
            raise _refused("this preset names its requests; choose others with --workload")
        return changed

    def _engine(self, engine: EngineOptions, step_time: StepTime) -> EngineOptions:
        same = ("max_num_seqs", "max_num_batched_tokens", "kv_tokens", "block_size")
        more = ("prefix_caching", "bus_ms", "max_tokens", "host_kv_tokens")
        given = self._given(**{name: name for name in (*same, *more)})
        policies = self._given(
            **{
                name: name
                for name in ("step_kind", "queue", "margin", "watermark", "itl_target_ms")
            }
        )
        if "kv_tokens" not in given and (self.gpu or self.size):
            given["kv_tokens"] = self._roofline_kv_tokens()
        return replace(
            engine,
            step_time=step_time,
            policies=replace(engine.policies, **policies),
            **given,
        )

    # ---- step time

    def _step_time(self, preset: StepTime) -> StepTime:
        from services.simulator.capacity.step_time import LinearStepTime

        given = self._given(
            base_ms="base_ms",
            token_ms="token_ms",
            prompt_token_ms="prompt_token_ms",
            kv_token_ms="kv_token_ms",
        )
        if self.gpu or self.size:
            return replace(self._roofline(), **_only_base(given))
        if not given:
            return preset
        if isinstance(preset, LinearStepTime):
            return replace(preset, **given)
        return LinearStepTime(**{"base_ms": 0.0, **given})

    def _roofline(self) -> RooflineStepTime:
        from services.simulator.capacity.step_time import GPUS, MODELS, RooflineStepTime

        gpu, model = GPUS[self.gpu or _DEFAULT_GPU], MODELS[self.size or _DEFAULT_SIZE]
        return RooflineStepTime(gpu, model, num_gpus=self.num_gpus, efficiency=self.efficiency)

    def _roofline_kv_tokens(self) -> int:
        roofline = self._roofline()
        if roofline.max_kv_tokens <= 0:
            raise _refused(
                f"{roofline.model.weight_bytes / 1e9:.0f} GB of weights do not fit into "
                f"{self.num_gpus} × {roofline.gpu.memory_bytes / 1e9:.0f} GB; more --num-gpus"
            )
        return int(roofline.max_kv_tokens)


def _only_base(given: dict[str, Any]) -> dict[str, Any]:
    if given.keys() - {"base_ms"}:
        raise _refused("--gpu and --size name a roofline; only --base-ms can be added to it")
    return given


def _read_trace(path: Path) -> Any:
    from services.simulator.capacity.workload import TraceError, read_trace

    try:
        with path.open(encoding="utf-8") as lines:
            return tuple(read_trace(lines))
    except (OSError, UnicodeDecodeError, TraceError) as error:
        fix = 'one {"arrival_ms": 0, "prompt_tokens": 1, "output_tokens": 1} a line'
        raise Problem("E108", "Trace cannot be read", cause=f"{path}: {error}", fix=fix) from error


def _refused(cause: str) -> Problem:
    return Problem("E109", "Nothing to simulate", cause=cause)
