"""GGUF model files of the Llama architecture: config, tokenizer metadata and weights.

Invariants: the header is checked before anything is read through it; weights come out as float32 in
the row order of the original checkpoint (GGUF stores q and k permuted for interleaved rotation);
every failure is a ModelFileError.

Shell: reads one file.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from services.models.config import ConfigError, ModelConfig, rope_factors
from services.models.errors import ModelFileError
from services.models.gguf_header import GgufHeader, TensorInfo, Value, read_header

SUPPORTED_ARCHITECTURES = ("llama",)
DEFAULT_ROPE_THETA = 10000.0
ROPE_FACTORS_TENSOR = "rope_freqs.weight"

LAYER_TENSORS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
TOP_TENSORS = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


@dataclass(frozen=True, slots=True, eq=False)
class TokenizerMetadata:
    """What a GGUF file says about its tokenizer; nothing is guessed where it says nothing.

    model:       "gpt2" (byte-level BPE), "llama" (SentencePiece) ...
    pre:         name of the pre-tokenizer's rule, e.g. "smollm"; None if missing
    tokens:      text of each id, in the model's own alphabet
    merges:      BPE merges, best first, "left right"
    token_types: (vocab_size) int32: 1 normal, 2 unknown, 3 control, 4 user, 5 unused, 6 byte
    scores:      (vocab_size) float32 of SentencePiece models, else None
    """

    model: str
    pre: str | None
    tokens: list[str]
    merges: list[str]
    token_types: npt.NDArray[np.int32]
    scores: npt.NDArray[np.float32] | None
    bos_token_id: int | None
    eos_token_id: int | None
    unknown_token_id: int | None
    padding_token_id: int | None
    add_bos_token: bool | None
    add_eos_token: bool | None
    add_space_prefix: bool | None
    chat_template: str | None


def read_metadata(path: Path) -> TokenizerMetadata:
    """The tokenizer's part of the header; reads no weights."""
    fields = _Fields(path, read_header(path))
    tokens = fields.strings("tokenizer.ggml.tokens")
    if not tokens:
        raise ModelFileError(path, "has no tokenizer.ggml.tokens")
    types = fields.numbers("tokenizer.ggml.token_type")
    scores = fields.numbers("tokenizer.ggml.scores")
    for name, values in (("token_type", types), ("scores", scores)):
        if values is not None and len(values) != len(tokens):
            raise ModelFileError(path, f"{len(values)} {name} entries for {len(tokens)} tokens")
    normal = np.ones(len(tokens), dtype=np.int32)
    return TokenizerMetadata(
        model=fields.text("tokenizer.ggml.model") or "",
        pre=fields.text("tokenizer.ggml.pre"),
        tokens=tokens,
        merges=fields.strings("tokenizer.ggml.merges"),
        token_types=normal if types is None else types.astype(np.int32),
        scores=None if scores is None else scores.astype(np.float32),
        bos_token_id=fields.optional_integer("tokenizer.ggml.bos_token_id"),
        eos_token_id=fields.optional_integer("tokenizer.ggml.eos_token_id"),
        unknown_token_id=fields.optional_integer("tokenizer.ggml.unknown_token_id"),
        padding_token_id=fields.optional_integer("tokenizer.ggml.padding_token_id"),
        add_bos_token=fields.flag("tokenizer.ggml.add_bos_token"),
        add_eos_token=fields.flag("tokenizer.ggml.add_eos_token"),
        add_space_prefix=fields.flag("tokenizer.ggml.add_space_prefix"),
        chat_template=fields.text("tokenizer.chat_template"),
    )


class GgufFile:
    """An open GGUF model: ``config``, and weights by the names of the original checkpoint."""

    def __init__(self, path: Path) -> None:
        self.path = path
        header = read_header(path)
        fields = _Fields(path, header)
        self._tensors = header.tensors
        self._bytes = np.memmap(path, dtype=np.uint8, mode="r")
        factors = self._tensors.get(ROPE_FACTORS_TENSOR)
        divisors = None if factors is None else self._dequantised(factors)
        self.config = _model_config(path, fields, divisors, self._tensors)

    def tensor(self, name: str) -> npt.NDArray[np.float32]:
        """One weight, e.g. ``model.layers.0.self_attn.q_proj.weight``: (out, in) float32."""
        info = self._tensors.get(_gguf_name(name))
        if info is None:
            raise ModelFileError(self.path, f"lacks the tensor {_gguf_name(name)!r}")
        values = self._dequantised(info)
        if name.endswith("q_proj.weight"):
            return self._unpermuted(values, self.config.num_heads, name)
        if name.endswith("k_proj.weight"):
            return self._unpermuted(values, self.config.num_kv_heads, name)
        return values

    def _dequantised(self, info: TensorInfo) -> npt.NDArray[np.float32]:
        # Imported here: the package is slow to import, and tokenizer metadata does not need it.
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize

        raw = self._bytes[info.offset : info.offset + info.num_bytes]
        kind = GGMLQuantizationType(info.type_id)
        # Bytes keep the rows apart, so that each row's last axis is whole blocks.
        rows = raw.reshape(*info.shape[:-1], -1)
        values: npt.NDArray[np.float32] = dequantize(rows, kind)
        # A copy: what comes back may be a view of the read-only file.
        return np.array(values, dtype=np.float32, order="C").reshape(info.shape)

    def _unpermuted(
        self, values: npt.NDArray[np.float32], num_heads: int, name: str
    ) -> npt.NDArray[np.float32]:
        """Undo the order of interleaved rotation: rows (2i, 2i + 1) become (i, i + dim / 2)."""
        rows = values.shape[0]
        if values.ndim != 2 or rows != num_heads * self.config.head_dim:
            raise ModelFileError(
                self.path, f"tensor {name!r} has shape {values.shape} for {num_heads} heads"
            )
        columns = values.shape[1]
        pairs = values.reshape(num_heads, self.config.head_dim // 2, 2, columns)
        return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows, columns)


def _gguf_name(name: str) -> str:
    if name in TOP_TENSORS:
        return TOP_TENSORS[name]
    _, _, layer, rest = name.split(".", 3)
    stem, _, suffix = rest.rpartition(".")
    return f"blk.{layer}.{LAYER_TENSORS[stem]}.{suffix}"


def _model_config(
    path: Path,
    fields: _Fields,
    factors: npt.NDArray[np.float32] | None,
    tensors: dict[str, TensorInfo],
) -> ModelConfig:
    architecture = fields.text("general.architecture") or "missing"
    if architecture not in SUPPORTED_ARCHITECTURES:
        supported = ", ".join(SUPPORTED_ARCHITECTURES)
        raise ModelFileError(path, f"architecture {architecture!r}", supported)
    prefix = architecture
    _refuse_unsupported(path, fields, prefix, tensors)
    hidden_size = fields.integer(f"{prefix}.embedding_length")
    num_heads = fields.integer(f"{prefix}.attention.head_count")
    head_dim = fields.optional_integer(f"{prefix}.attention.key_length")
    if head_dim is None:
        head_dim = hidden_size // max(1, num_heads)
    embedding = tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelFileError(path, "lacks the tensor 'token_embd.weight'")
    num_kv_heads = fields.optional_integer(f"{prefix}.attention.head_count_kv")
    theta = fields.optional_number(f"{prefix}.rope.freq_base")
    eos = fields.optional_integer("tokenizer.ggml.eos_token_id")
    try:
        if factors is None:
            divisors = _linear_factors(path, fields, prefix, head_dim)
        else:
            divisors = tuple(float(factor) for factor in factors.ravel())
        return ModelConfig(
            architecture=architecture,
            vocab_size=embedding.shape[0],
            hidden_size=hidden_size,
            intermediate_size=fields.integer(f"{prefix}.feed_forward_length"),
            num_layers=fields.integer(f"{prefix}.block_count"),
            num_heads=num_heads,
            num_kv_heads=num_heads if num_kv_heads is None else num_kv_heads,
            head_dim=head_dim,
            max_position_embeddings=fields.integer(f"{prefix}.context_length"),
            rms_norm_eps=fields.number(f"{prefix}.attention.layer_norm_rms_epsilon"),
            rope_theta=DEFAULT_ROPE_THETA if theta is None else theta,
            rope_factors=divisors,
            tie_word_embeddings="output.weight" not in tensors,
            bos_token_id=fields.optional_integer("tokenizer.ggml.bos_token_id"),
            eos_token_ids=() if eos is None else (eos,),
        )
    except ConfigError as error:
        raise ModelFileError(path, error.problem, error.supported) from error


def _refuse_unsupported(
    path: Path, fields: _Fields, prefix: str, tensors: dict[str, TensorInfo]
) -> None:
    """Things that share the architecture's name but not its arithmetic."""
    if fields.optional_integer(f"{prefix}.expert_count"):
        raise ModelFileError(path, "a mixture of experts", "dense Llama models")
    biased = [name for name in tensors if name.startswith("blk.") and name.endswith(".bias")]
    if biased:
        raise ModelFileError(path, f"has the bias tensor {biased[0]!r}", "models without biases")
    rotary = fields.optional_integer(f"{prefix}.rope.dimension_count")
    head_dim = fields.optional_integer(f"{prefix}.attention.key_length")
    if head_dim is not None and rotary is not None and rotary != head_dim:
        raise ModelFileError(
            path, f"rotates {rotary} of {head_dim} dimensions", "rotation of whole heads"
        )


def _linear_factors(
    path: Path, fields: _Fields, prefix: str, head_dim: int
) -> tuple[float, ...] | None:
    kind = fields.text(f"{prefix}.rope.scaling.type") or "none"
    if kind not in ("none", "linear"):
        raise ModelFileError(path, f"rope scaling {kind!r}", "none, linear, rope_freqs.weight")
    scaling = {"rope_type": kind, "factor": fields.optional_number(f"{prefix}.rope.scaling.factor")}
    return rope_factors(scaling, head_dim, DEFAULT_ROPE_THETA)


class _Fields:
    """Typed access to metadata; a value of another type than asked for is the file's fault."""

    def __init__(self, path: Path, header: GgufHeader) -> None:
        self._path = path
        self._fields = header.fields

    def _wrong(self, key: str, value: Value, wanted: str) -> ModelFileError:
        return ModelFileError(
            self._path, f"metadata {key!r} is {type(value).__name__}, not {wanted}"
        )

    def text(self, key: str) -> str | None:
        value = self._fields.get(key)
        if value is None or isinstance(value, str):
            return value
        raise self._wrong(key, value, "a string")

    def flag(self, key: str) -> bool | None:
        value = self._fields.get(key)
        if value is None or isinstance(value, bool):
            return value
        raise self._wrong(key, value, "a boolean")

    def optional_integer(self, key: str) -> int | None:
        value = self._fields.get(key)
        if value is None or (isinstance(value, int) and not isinstance(value, bool)):
            return value
        raise self._wrong(key, value, "an integer")

    def optional_number(self, key: str) -> float | None:
        value = self._fields.get(key)
        if value is None:
            return None
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        raise self._wrong(key, value, "a number")

    def integer(self, key: str) -> int:
        value = self.optional_integer(key)
        if value is None:
            raise ModelFileError(self._path, f"lacks the metadata {key!r}")
        return value

    def number(self, key: str) -> float:
        value = self.optional_number(key)
        if value is None:
            raise ModelFileError(self._path, f"lacks the metadata {key!r}")
        return value

    def strings(self, key: str) -> list[str]:
        value = self._fields.get(key, [])
        if isinstance(value, list):
            return value
        raise self._wrong(key, value, "a list of strings")

    def numbers(self, key: str) -> npt.NDArray[Any] | None:
        value = self._fields.get(key)
        if value is None or isinstance(value, np.ndarray):
            return value
        raise self._wrong(key, value, "an array of numbers")
