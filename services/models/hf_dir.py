"""Hugging Face model directories: config.json and safetensors, single or sharded.

Invariants: no file outside the directory is opened; only safetensors are read, never pickles;
weights come out as float32; every failure is a ModelFileError.

Shell: reads files of one directory.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from services.models.config import ConfigError, ModelConfig, as_float, rope_factors
from services.models.errors import ModelFileError

SUPPORTED_ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM")
MAX_JSON_BYTES = 1 << 26
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
DEFAULT_ROPE_THETA = 10000.0
DTYPES: dict[str, np.dtype[Any]] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
}


@dataclass(frozen=True, slots=True)
class _Extent:
    """A tensor's place in a shard: bytes [start, end) of the file."""

    shard: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


class HfDirectory:
    """An open model directory: ``config``, and weights by their checkpoint names."""

    def __init__(self, path: Path) -> None:
        if not path.is_dir():
            raise ModelFileError(path, "the directory does not exist")
        self.path = path
        self.config = _model_config(path / "config.json", _read_json(path, "config.json"))
        self._extents = _find_tensors(path)

    def tensor(self, name: str) -> npt.NDArray[np.float32]:
        """One weight, e.g. ``model.layers.0.self_attn.q_proj.weight``: (out, in) float32."""
        extent = self._extents.get(name)
        if extent is None:
            raise ModelFileError(self.path, f"lacks the tensor {name!r}")
        stored = DTYPES.get(extent.dtype)
        if stored is None:
            raise ModelFileError(
                extent.shard, f"tensor {name!r} has dtype {extent.dtype}", ", ".join(DTYPES)
            )
        file = np.memmap(extent.shard, dtype=np.uint8, mode="r")
        raw: npt.NDArray[np.uint8] = np.array(file[extent.start : extent.end])
        values: npt.NDArray[Any] = np.frombuffer(raw, dtype=stored).reshape(extent.shape)
        if extent.dtype == "BF16":
            # A bfloat16 is the upper half of a float32.
            return (values.astype(np.uint32) << np.uint32(16)).view(np.float32)
        floats: npt.NDArray[np.float32] = values.astype(np.float32, copy=False)
        return floats


def _inside(directory: Path, name: str) -> Path:
    """A regular file of the directory, symbolic links resolved."""
    path = directory / name
    resolved = path.resolve()
    if not resolved.is_relative_to(directory.resolve()):
        raise ModelFileError(path, "points outside the model directory")
    if not resolved.is_file():
        raise ModelFileError(path, "the file does not exist")
    return resolved


def _read_json(directory: Path, name: str) -> dict[str, Any]:
    path = _inside(directory, name)
    try:
        size = path.stat().st_size
        if size > MAX_JSON_BYTES:
            raise ModelFileError(path, f"is {size} bytes long", f"at most {MAX_JSON_BYTES}")
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelFileError(path, f"is not readable JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelFileError(path, "is not a JSON object")
    return content


def _find_tensors(directory: Path) -> dict[str, _Extent]:
    if (directory / INDEX_FILE).exists():
        weight_map = _read_json(directory, INDEX_FILE).get("weight_map")
        if not isinstance(weight_map, dict) or not all(
            isinstance(name, str) for name in weight_map.values()
        ):
            raise ModelFileError(directory / INDEX_FILE, "has no weight_map of file names")
        names = sorted(set(weight_map.values()))
    elif (directory / WEIGHTS_FILE).exists():
        names = [WEIGHTS_FILE]
    else:
        raise ModelFileError(
            directory, "has no weights", f"{WEIGHTS_FILE}, or shards with {INDEX_FILE}"
        )
    extents: dict[str, _Extent] = {}
    for name in names:
        if not name.endswith(".safetensors"):
            raise ModelFileError(directory / name, "is not a safetensors file", "safetensors")
        extents.update(_shard_extents(_inside(directory, name)))
    return extents


def _shard_extents(shard: Path) -> dict[str, _Extent]:
    try:
        # The library checks the header: lengths, overlaps, holes and the end of the file.
        with safe_open(shard, framework="numpy"):
            pass
        with shard.open("rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(header_bytes))
    except (SafetensorError, OSError, ValueError) as error:
        raise ModelFileError(shard, f"is not a sound safetensors file: {error}") from error
    base = 8 + header_bytes
    extents = {}
    for name, entry in header.items():
        if name != "__metadata__":
            start, end = entry["data_offsets"]
            shape = tuple(entry["shape"])
            extents[name] = _Extent(shard, entry["dtype"], shape, base + start, base + end)
    return extents


def _model_config(path: Path, raw: Mapping[str, Any]) -> ModelConfig:
    names = raw.get("architectures")
    architecture = names[0] if isinstance(names, list) and names else "missing"
    if architecture not in SUPPORTED_ARCHITECTURES:
        supported = ", ".join(SUPPORTED_ARCHITECTURES)
        raise ModelFileError(path, f"architecture {architecture!r}", supported)
    try:
        _refuse_unsupported(raw)
        return _build_config(str(architecture), raw)
    except ConfigError as error:
        raise ModelFileError(path, error.problem, error.supported) from error


def _refuse_unsupported(raw: Mapping[str, Any]) -> None:
    """Options that change the arithmetic."""
    if raw.get("hidden_act", "silu") != "silu":
        raise ConfigError(f"activation {raw['hidden_act']!r}", "silu")
    for name in ("attention_bias", "mlp_bias", "quantization_config", "sliding_window"):
        if raw.get(name):
            raise ConfigError(f"config has {name}", f"models without {name}")


def _build_config(architecture: str, raw: Mapping[str, Any]) -> ModelConfig:
    hidden_size, num_heads = _integer(raw, "hidden_size"), _integer(raw, "num_attention_heads")
    head_dim = _optional_integer(raw, "head_dim")
    if head_dim is None:
        head_dim = hidden_size // max(1, num_heads)
    # Newer configs keep theta and scaling together in rope_parameters.
    parameters = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(parameters, dict):
        raise ConfigError("the rope scaling is not an object")
    theta = _number({**raw, **parameters}, "rope_theta", DEFAULT_ROPE_THETA)
    num_kv_heads = _optional_integer(raw, "num_key_value_heads")
    return ModelConfig(
        architecture=architecture,
        vocab_size=_integer(raw, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_integer(raw, "intermediate_size"),
        num_layers=_integer(raw, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_heads if num_kv_heads is None else num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=_integer(raw, "max_position_embeddings"),
        rms_norm_eps=_number(raw, "rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_factors=rope_factors(parameters, head_dim, theta),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        bos_token_id=_optional_integer(raw, "bos_token_id"),
        eos_token_ids=_token_ids(raw.get("eos_token_id")),
    )


def _optional_integer(raw: Mapping[str, Any], name: str) -> int | None:
    value = raw.get(name)
    if value is None or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    raise ConfigError(f"{name} is not an integer")


def _integer(raw: Mapping[str, Any], name: str) -> int:
    value = _optional_integer(raw, name)
    if value is None:
        raise ConfigError(f"config lacks {name}")
    return value


def _number(raw: Mapping[str, Any], name: str, default: float) -> float:
    return as_float(raw.get(name, default), name)


def _token_ids(value: object) -> tuple[int, ...]:
    listed = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in listed):
        raise ConfigError("eos_token_id is not an integer or a list of integers")
    return tuple(listed)
