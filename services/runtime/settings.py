"""Every knob of Streetcar, in one frozen value: file < environment (`STREETCAR_*`) < flag.

Invariants: this is the only module that reads environment names; a name that is not known is
refused and the nearest valid one is named; a value is checked once, here, and never again.

Shell: reads the environment and one TOML file.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self

from services.contracts import limits
from services.runtime.bus_url import without_password
from services.runtime.problem import Problem

ENV_PREFIX: Final = "STREETCAR_"
CONFIG_VARIABLE: Final = "STREETCAR_CONFIG"
HTTP_FD_VARIABLE: Final = "STREETCAR_HTTP_FD"
ADMISSION_ID_VARIABLE: Final = "STREETCAR_ADMISSION_ID"
NATS_URL_VARIABLE: Final = "STREETCAR_NATS_URL"
CONFIG_FILE_NAME: Final = "streetcar.toml"
OTLP_VARIABLE: Final = "OTEL_EXPORTER_OTLP_ENDPOINT"
MAX_CONFIG_BYTES: Final = 1 << 20

_ID: Final = r"[A-Za-z0-9_-]{1,64}"
_PREFIX: Final = rf"{_ID}(\.{_ID}){{0,7}}"
_URL: Final = r"(|nats://[^\s,]+(,nats://[^\s,]+)*)"
_HTTP_URL: Final = r"(|https?://[^\s]{1,255})"
_LOOPBACK: Final = "127.0.0.1"
_SHORT_FLAGS: Final = {"nats_url": "--nats"}
"""Flags that are not called after their setting."""
DEFAULT_MAX_NUM_SEQS: Final = 64

Value = str | int | float


class SettingsError(Problem):
    """A setting is unknown, of the wrong type, out of bounds, or at odds with another one."""

    def __init__(self, cause: str, fix: str = "", *, code: str = "E101") -> None:
        super().__init__(code, "Settings refused", cause=cause, fix=fix)


def _knob(
    default: Value,
    text: str,
    *,
    low: float | None = None,
    high: float | None = None,
    choices: tuple[str, ...] = (),
    pattern: str = "",
) -> Any:
    """A field with its help and its bounds (inclusive); `Any` is what `dataclasses.field` gives."""
    bounds = {"low": low, "high": high, "choices": choices, "pattern": pattern}
    return field(default=default, metadata={"help": text, **bounds})


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """All settings of one cluster. Units are last in the names; 0 or "" means "choose for me".

    Defaults suit a laptop: loopback only; 64 running sequences; steps as long as an inter-token
    time of 100 ms allows; 1,024 blocks of 16 tokens, two full contexts of the embedded model.
    """

    model: str = _knob("smollm2-135m", "model name, GGUF file, or Hugging Face directory")
    served_name: str = _knob("", "name in subjects and /v1/models", pattern=f"(|{_ID})")
    device: str = _knob(
        "auto",
        "where the model runs: cpu, cuda, cuda:N, or auto: a GPU where torch finds one",
        pattern=r"auto|cpu|cuda(:\d{1,2})?",
    )
    dtype: str = _knob("auto", "type of the weights", choices=("auto", "float32", "bfloat16"))
    quantization: str = _knob(
        "none", "8-bit linears: int8 on the CPU, fp8 on a GPU", choices=("none", "int8", "fp8")
    )
    kv_cache_dtype: str = _knob(
        "auto", "of the KV cache: int8, fp8, or auto: the model's", choices=("auto", "int8", "fp8")
    )
    batch_invariant: str = _knob(
        "off", "on: bitwise the same logits in any batch, or no start", choices=("off", "on")
    )
    worker: str = _knob("model", "what executes plans", choices=("model", "stub"))
    step_ms: float = _knob(5.0, "length of a stub worker's step, ms", low=0.0, high=60_000.0)
    threads: int = _knob(0, "threads of the worker's kernels, 0: all cores", low=0, high=1024)

    max_num_seqs: int = _knob(
        DEFAULT_MAX_NUM_SEQS, "sequences that run at once", low=1, high=limits.MAX_LANES
    )
    max_num_batched_tokens: int = _knob(
        0, "most tokens in one step, 0: what the model needs", low=0, high=limits.MAX_MODEL_LEN
    )
    max_model_len: int = _knob(
        0, "tokens of a sequence, 0: the model's", low=0, high=limits.MAX_MODEL_LEN
    )
    max_waiting_seqs: int = _knob(1024, "sequences that wait, then 429", low=1, high=1_000_000)
    block_size: int = _knob(
        16, "tokens in a KV block, a power of two", low=1, high=limits.MAX_BLOCK_SIZE
    )
    num_blocks: int = _knob(
        1024, "KV blocks, the null block included", low=2, high=limits.MAX_BLOCKS
    )
    host_blocks: int = _knob(
        0, "KV blocks in host memory, where evicted ones go", low=0, high=limits.MAX_BLOCKS
    )
    tenant_cache_share: float = _knob(
        1.0, "part of the cached blocks that one tenant may have", low=0.0, high=1.0
    )

    batching: str = _knob(
        "continuous", "when sequences may join", choices=("continuous", "dynamic", "static")
    )
    batch_size: int = _knob(0, "of static and dynamic groups, 0: all lanes", low=0, high=4096)
    max_delay_ms: float = _knob(
        50.0, "wait of a dynamic group that is not full, ms", low=0.0, high=600_000.0
    )
    step_kind: str = _knob("mixed", "what a step may hold", choices=("mixed", "separate"))
    prefill_attempt_interval: int = _knob(
        70, "decode steps between prefills that all want (separate)", low=1, high=100_000
    )
    prefill_any_attempt_interval: int = _knob(
        100, "decode steps between prefills that any wants (separate)", low=1, high=100_000
    )
    cache_watermark: float = _knob(
        0.9, "share of the pool above which no prefill is wanted (separate)", low=0.0, high=1.0
    )
    dp_group: str = _knob("", "data-parallel group that votes on prefills", pattern=f"(|{_ID})")
    dp_size: int = _knob(1, "schedulers in that group", low=1, high=256)
    queue: str = _knob("first-come", "who is next", choices=("first-come", "fit", "fair"))
    margin: str = _knob(
        "learned", "what an admission leaves free", choices=("watermark", "learned")
    )
    watermark: float = _knob(
        0.01, "share of the pool that an admission leaves free at least", low=0.0, high=0.9
    )
    itl_target_ms: float = _knob(
        100.0, "inter-token time that the token budget keeps, ms, 0: fixed", low=0.0, high=60_000.0
    )

    http_host: str = _knob(_LOOPBACK, "address of the HTTP gateway", pattern=r"[^\s]{1,255}")
    http_port: int = _knob(0, "port of the HTTP gateway, 0: a free one", low=0, high=65_535)
    http_drain_s: float = _knob(
        120.0, "longest time that a replaced gateway serves its streams, s", low=0.0, high=86_400
    )
    http_fd: int = _knob(
        -1, "listening socket that the gateway inherits, -1: it opens one", low=-1, high=1 << 20
    )
    api_key_file: str = _knob("", "hashes of the keys that the gateway asks for, empty: none")
    nats_url: str = _knob("", "bus to join, empty: start an embedded server", pattern=_URL)
    nats_host: str = _knob(_LOOPBACK, "address of the embedded server", pattern=r"[^\s]{1,255}")
    nats_port: int = _knob(0, "port of the embedded server, 0: a free one", low=0, high=65_535)
    subject_prefix: str = _knob("streetcar.v1", "first tokens of all subjects", pattern=_PREFIX)

    engine_id: str = _knob("engine-0", "id of the model replica", pattern=_ID)
    scheduler_id: str = _knob("scheduler-0", "id of this scheduler", pattern=_ID)
    worker_id: str = _knob("worker-0", "id of this worker group", pattern=_ID)
    kv_store_id: str = _knob("kv-0", "id of this ledger", pattern=_ID)
    admission_id: str = _knob("admission-0", "id of this admission", pattern=_ID)
    gateway_id: str = _knob("gateway-0", "id of this gateway", pattern=_ID)
    num_admissions: int = _knob(1, "admission processes of a cluster", low=1, high=16)

    cache_dir: str = _knob("", "where models lie, empty: the user's cache")
    run_dir: str = _knob("", "logs and the bus's files, empty: a new temporary directory")
    trace_ratio: float = _knob(
        1.0, "share of new traces that are recorded; a caller's decision is kept", low=0.0, high=1.0
    )
    otlp_endpoint: str = _knob(
        "", f"OTLP/HTTP collector for spans, empty: {OTLP_VARIABLE}", pattern=_HTTP_URL
    )
    log_level: str = _knob(
        "info", "least severe level logged", choices=("debug", "info", "warning", "error")
    )
    fault_injection: str = _knob(
        "off", "lets failpoints be armed, for drills only", choices=("off", "on")
    )
    poison_token: int = _knob(
        -1, "token that kills a stub worker, for drills only, -1: none", low=-1, high=2**31 - 1
    )
    failpoints: str = _knob("", "NAME:ACTION@COUNT, armed at the start of a service")

    origins: Mapping[str, str] = field(
        default_factory=dict, compare=False, repr=False, metadata={"internal": True}
    )

    def __post_init__(self) -> None:
        for knob in knobs():
            _check_bounds(knob, getattr(self, knob.name), self.origin(knob.name))
        _check_together(self)

    def origin(self, name: str) -> str:
        """Where the value of `name` came from: `default`, a file, a variable or a flag."""
        return self.origins.get(name, "default")

    @property
    def embedded_nats(self) -> bool:
        """Whether the cluster starts its own bus."""
        return not self.nats_url

    @property
    def cache_path(self) -> Path:
        """The directory of pulled models."""
        if self.cache_dir:
            return Path(self.cache_dir).expanduser()
        base = os.environ.get("XDG_CACHE_HOME", "")
        return (Path(base) if base else Path.home() / ".cache") / "streetcar"

    @property
    def native_path(self) -> Path:
        """The directory of native code, built for this machine."""
        return self.cache_path / "native"

    @property
    def weights_path(self) -> Path:
        """The directory of weights that are prepared for this machine; 4 GiB at most."""
        return self.cache_path / "weights"

    @property
    def otlp_url(self) -> str:
        """Where spans are exported to, or "": the field's own variable counts where we name none.

        Raises SettingsError where that variable is no URL.
        """
        url = self.otlp_endpoint or os.environ.get(OTLP_VARIABLE, "").strip()
        if not re.fullmatch(_HTTP_URL, url):
            raise SettingsError(f"{OTLP_VARIABLE} = {url!r} is no http URL")
        return url

    def replace(self, origin: str, **changes: Value) -> Self:
        """A copy with `changes`, checked again; `origin` says who made them."""
        origins = {**self.origins, **dict.fromkeys(changes, origin)}
        return dataclasses.replace(self, **changes, origins=origins)  # type: ignore[arg-type]

    def to_env(self) -> dict[str, str]:
        """Environment for a child process: every value, so that no file is read again."""
        return {_variable(knob.name): _to_text(getattr(self, knob.name)) for knob in knobs()}

    def to_dict(self) -> dict[str, Value]:
        """Values by name, for `config show`: without the password that a bus URL may hold."""
        return {knob.name: _shown(getattr(self, knob.name)) for knob in knobs()}


def knobs() -> tuple[dataclasses.Field[Any], ...]:
    """The fields that a person may set, in the order of the declaration."""
    return tuple(f for f in dataclasses.fields(Settings) if not f.metadata.get("internal"))


def load(
    *,
    config: str | None = None,
    environ: Mapping[str, str] | None = None,
    flags: Mapping[str, Value] | None = None,
) -> Settings:
    """Settings from file, environment and flags, later ones winning.

    The file is `config`, else what `STREETCAR_CONFIG` names, else `streetcar.toml` in the working
    directory if there is one. Raises SettingsError that names the value and where it came from.
    """
    environ = os.environ if environ is None else environ
    values: dict[str, Value] = {}
    origins: dict[str, str] = {}
    layers = [_from_file(config, environ), _from_environ(environ), _from_flags(flags or {})]
    for layer in layers:
        for name, (value, origin) in layer.items():
            values[name] = value
            origins[name] = origin
    _follow_budget(values, origins)
    return Settings(**values, origins=origins)  # type: ignore[arg-type]


def _follow_budget(values: dict[str, Value], origins: dict[str, str]) -> None:
    """What a given token budget means for settings that nobody has set.

    It is fixed, not fitted to an inter-token target; and a step decodes every lane, so a small one
    lowers `max_num_seqs`.
    """
    budget = values.get("max_num_batched_tokens")
    if not isinstance(budget, int) or budget < 1:
        return
    if "itl_target_ms" not in values:
        values["itl_target_ms"] = 0.0
        origins["itl_target_ms"] = "default, off where max_num_batched_tokens is given"
    if "max_num_seqs" not in values and budget < DEFAULT_MAX_NUM_SEQS:
        values["max_num_seqs"] = budget
        origins["max_num_seqs"] = "default, lowered to max_num_batched_tokens"


def for_service() -> Settings:
    """Settings of a service process: its environment alone, as the supervisor wrote it."""
    return load()


_Layer = dict[str, tuple[Value, str]]


def _from_file(config: str | None, environ: Mapping[str, str]) -> _Layer:
    named = config or environ.get(CONFIG_VARIABLE)
    path = Path(named or CONFIG_FILE_NAME)
    if not named and not path.is_file():
        return {}
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_CONFIG_BYTES + 1)
        if len(raw) > MAX_CONFIG_BYTES:
            raise SettingsError(f"{path} is longer than {MAX_CONFIG_BYTES} bytes")
        table = tomllib.loads(raw.decode())
    except OSError as error:
        raise SettingsError(f"cannot read {path}: {error.strerror}") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise SettingsError(f"{path} is not TOML: {error}") from error
    layer: _Layer = {}
    for name, value in table.items():
        knob = _find(name, [k.name for k in knobs()], f"{name!r} in {path}")
        layer[knob.name] = (_typed(knob, value, str(path)), str(path))
    return layer


def _from_environ(environ: Mapping[str, str]) -> _Layer:
    variables = [_variable(knob.name) for knob in knobs()]
    layer: _Layer = {}
    for variable, text in environ.items():
        if not variable.startswith(ENV_PREFIX) or variable == CONFIG_VARIABLE:
            continue
        knob = _find(variable, variables, f"environment variable {variable}")
        layer[knob.name] = (_parsed(knob, text, variable), variable)
    return layer


def _from_flags(flags: Mapping[str, Value]) -> _Layer:
    layer: _Layer = {}
    for name, value in flags.items():
        knob = _find(name, [k.name for k in knobs()], f"flag {_flag(name)}")
        layer[knob.name] = (_typed(knob, value, _flag(name)), _flag(name))
    return layer


def _find(name: str, valid: Iterable[str], what: str) -> dataclasses.Field[Any]:
    known = dict(zip(valid, knobs(), strict=True))
    if name in known:
        return known[name]
    nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    fix = f"did you mean {nearest[0]}?" if nearest else "`streetcar config show` lists all settings"
    raise SettingsError(f"unknown setting: {what}", fix, code="E102")


def _typed(knob: dataclasses.Field[Any], value: object, origin: str) -> Value:
    """`value` as the field's type; an int where a float is wanted is fine, nothing else bends."""
    wanted = _value_type(knob)
    if wanted is float and type(value) is int:
        return float(value)
    if not isinstance(value, wanted) or isinstance(value, bool):
        raise SettingsError(
            f"{knob.name} from {origin} must be {_type_name(wanted)}, not {value!r}"
        )
    return value


def _parsed(knob: dataclasses.Field[Any], text: str, origin: str) -> Value:
    wanted = _value_type(knob)
    try:
        return text if wanted is str else wanted(text.strip())
    except ValueError:
        cause = f"{knob.name} from {origin} must be {_type_name(wanted)}, not {text!r}"
        raise SettingsError(cause) from None


def _value_type(knob: dataclasses.Field[Any]) -> type[str] | type[int] | type[float]:
    return type(knob.default)  # type: ignore[return-value]


def _check_bounds(knob: dataclasses.Field[Any], value: Value, origin: str) -> None:
    low, high = knob.metadata["low"], knob.metadata["high"]
    choices, pattern = knob.metadata["choices"], knob.metadata["pattern"]
    where = f"{knob.name} = {_shown(value)!r} (from {origin})"
    if low is not None and not (math.isfinite(float(value)) and low <= float(value) <= high):
        raise SettingsError(f"{where} is outside [{low:,}, {high:,}]")
    if choices and value not in choices:
        nearest = difflib.get_close_matches(str(value), choices, n=1)
        raise SettingsError(
            f"{where} is not one of {', '.join(choices)}",
            f"did you mean {nearest[0]}?" if nearest else "",
        )
    if pattern and not re.fullmatch(pattern, str(value)):
        raise SettingsError(f"{where} does not match {pattern}")


def _check_together(settings: Settings) -> None:
    """Rules between settings: each refusal names both, with their numbers."""
    if 0 < settings.max_num_batched_tokens < settings.max_num_seqs:
        raise SettingsError(
            f"max_num_batched_tokens = {settings.max_num_batched_tokens} is less than "
            f"max_num_seqs = {settings.max_num_seqs}: a step could not decode every sequence",
            f"--max-num-batched-tokens {settings.max_num_seqs}   or   "
            f"--max-num-seqs {settings.max_num_batched_tokens}",
        )
    if settings.block_size & (settings.block_size - 1):
        raise SettingsError(f"block_size = {settings.block_size} is not a power of two")
    capacity = (settings.num_blocks - 1) * settings.block_size
    if settings.max_model_len > capacity:
        blocks = -(-settings.max_model_len // settings.block_size) + 1
        raise SettingsError(
            f"max_model_len = {settings.max_model_len} does not fit num_blocks = "
            f"{settings.num_blocks} of block_size = {settings.block_size}: {capacity} tokens",
            f"--num-blocks {blocks}   or   --max-model-len {capacity}",
            code="E104",
        )
    if settings.nats_url and settings.nats_port:
        raise SettingsError(
            f"nats_url = {_shown(settings.nats_url)!r} joins a running bus, but nats_port = "
            f"{settings.nats_port} asks for an embedded one",
            "give one of --nats and --nats-port",
        )
    for name, harmless in (("failpoints", ""), ("poison_token", -1)):
        value = getattr(settings, name)
        if value != harmless and settings.fault_injection != "on":
            raise SettingsError(
                f"{name} = {value!r} would break services on purpose, and fault_injection is off",
                f"unset {_variable(name)}, or set STREETCAR_FAULT_INJECTION=on in a drill",
            )


def _shown(value: Value) -> Value:
    """`value` without the name and password of a bus URL; other text has no `://` before an `@`."""
    return without_password(value) if isinstance(value, str) and "://" in value else value


def _variable(name: str) -> str:
    return ENV_PREFIX + name.upper()


def _flag(name: str) -> str:
    return _SHORT_FLAGS.get(name) or "--" + name.replace("_", "-")


def _to_text(value: Value) -> str:
    return repr(value) if isinstance(value, float) else str(value)


def _type_name(wanted: type) -> str:
    return {int: "an integer", float: "a number", str: "text"}[wanted]
