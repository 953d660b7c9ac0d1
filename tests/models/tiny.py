"""A Llama model of a few thousand weights, as a directory and as a GGUF file, and its arithmetic
written down once more: dense, in float64, without a cache.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import save_file

Weights = dict[str, np.ndarray]


@dataclass
class Tiny:
    """Sizes of the model; all odd enough to tell axes apart."""

    vocab_size: int = 96
    hidden_size: int = 64
    intermediate_size: int = 96
    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 8
    max_positions: int = 128
    theta: float = 10000.0
    epsilon: float = 1e-5
    tied: bool = False
    factors: list[float] | None = None
    seed: int = 0
    weights: Weights = field(init=False)

    def __post_init__(self) -> None:
        generator = np.random.default_rng(self.seed)

        def matrix(rows: int, columns: int) -> np.ndarray:
            return (generator.standard_normal((rows, columns)) * 0.15).astype(np.float32)

        def gain() -> np.ndarray:
            return (1 + 0.1 * generator.standard_normal(self.hidden_size)).astype(np.float32)

        hidden, inner = self.hidden_size, self.intermediate_size
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        weights = {
            "model.embed_tokens.weight": matrix(self.vocab_size, hidden),
            "model.norm.weight": gain(),
        }
        if not self.tied:
            weights["lm_head.weight"] = matrix(self.vocab_size, hidden)
        for layer in range(self.num_layers):
            prefix = f"model.layers.{layer}."
            weights |= {
                f"{prefix}input_layernorm.weight": gain(),
                f"{prefix}self_attn.q_proj.weight": matrix(queries, hidden),
                f"{prefix}self_attn.k_proj.weight": matrix(keys, hidden),
                f"{prefix}self_attn.v_proj.weight": matrix(keys, hidden),
                f"{prefix}self_attn.o_proj.weight": matrix(hidden, queries),
                f"{prefix}post_attention_layernorm.weight": gain(),
                f"{prefix}mlp.gate_proj.weight": matrix(inner, hidden),
                f"{prefix}mlp.up_proj.weight": matrix(inner, hidden),
                f"{prefix}mlp.down_proj.weight": matrix(hidden, inner),
            }
        self.weights = weights

    def config(self) -> dict[str, Any]:
        """As config.json has it."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": self.max_positions,
            "rms_norm_eps": self.epsilon,
            "rope_theta": self.theta,
            "tie_word_embeddings": self.tied,
            "hidden_act": "silu",
            "bos_token_id": 1,
            "eos_token_id": [2, 3],
        }


def write_directory(
    path: Path, tiny: Tiny, weights: Weights | None = None, **changes: object
) -> Path:
    """A Hugging Face directory; `changes` go into config.json."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(tiny.config() | changes), encoding="utf-8")
    save_file(tiny.weights if weights is None else weights, path / "model.safetensors")
    return path


GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
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


def gguf_tensors(tiny: Tiny) -> Weights:
    """Renamed, and with q and k permuted as the conversion to GGUF does."""
    tensors: Weights = {}
    for name, values in tiny.weights.items():
        stem = name.removesuffix(".weight")
        if name.startswith("model.layers."):
            _, _, layer, rest = stem.split(".", 3)
            renamed = f"blk.{layer}.{GGUF_NAMES[rest]}.weight"
        else:
            renamed = f"{GGUF_NAMES[stem]}.weight"
        heads = {"q_proj": tiny.num_heads, "k_proj": tiny.num_kv_heads}.get(stem[-6:])
        if heads is not None:
            split = values.reshape(heads, 2, tiny.head_dim // 2, tiny.hidden_size)
            values = np.ascontiguousarray(split.swapaxes(1, 2)).reshape(values.shape)
        tensors[renamed] = values
    if tiny.factors is not None:
        tensors["rope_freqs.weight"] = np.array(tiny.factors, dtype=np.float32)
    return tensors


def write_gguf(
    path: Path,
    tiny: Tiny,
    quantisation: gguf.GGMLQuantizationType | None = None,
    architecture: str = "llama",
) -> Path:
    """A GGUF file; matrices are quantised if asked, all else stays float32."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(tiny.num_layers)
    writer.add_context_length(tiny.max_positions)
    writer.add_embedding_length(tiny.hidden_size)
    writer.add_feed_forward_length(tiny.intermediate_size)
    writer.add_head_count(tiny.num_heads)
    writer.add_head_count_kv(tiny.num_kv_heads)
    writer.add_key_length(tiny.head_dim)
    writer.add_value_length(tiny.head_dim)
    writer.add_rope_dimension_count(tiny.head_dim)
    writer.add_rope_freq_base(tiny.theta)
    writer.add_layer_norm_rms_eps(tiny.epsilon)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([f"t{index}" for index in range(tiny.vocab_size)])
    writer.add_token_types([3, *[1] * (tiny.vocab_size - 1)])
    writer.add_token_merges(["t 1", "t 2"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template("{{ messages }}")
    for name, values in gguf_tensors(tiny).items():
        if quantisation is not None and values.ndim == 2:
            stored = gguf.quants.quantize(values, quantisation)
            writer.add_tensor(name, stored, raw_dtype=quantisation)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def reference_logits(tiny: Tiny, token_ids: list[int]) -> np.ndarray:
    """Logits after every token: (num_tokens, vocab_size) float64."""
    w = {name: values.astype(np.float64) for name, values in tiny.weights.items()}
    x = w["model.embed_tokens.weight"][token_ids]
    for layer in range(tiny.num_layers):
        prefix = f"model.layers.{layer}."
        part = {name.removeprefix(prefix): values for name, values in w.items()}
        normed = _norm(x, part["input_layernorm.weight"], tiny.epsilon)
        x = x + _attention(tiny, part, normed)
        normed = _norm(x, part["post_attention_layernorm.weight"], tiny.epsilon)
        gate = normed @ part["mlp.gate_proj.weight"].T
        up = normed @ part["mlp.up_proj.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ part["mlp.down_proj.weight"].T
    head = w["model.embed_tokens.weight" if tiny.tied else "lm_head.weight"]
    logits: np.ndarray = _norm(x, w["model.norm.weight"], tiny.epsilon) @ head.T
    return logits


def _norm(x: np.ndarray, gain: np.ndarray, epsilon: float) -> np.ndarray:
    normed: np.ndarray = x / np.sqrt((x**2).mean(-1, keepdims=True) + epsilon) * gain
    return normed


def _attention(tiny: Tiny, part: Weights, x: np.ndarray) -> np.ndarray:
    length, dim = len(x), tiny.head_dim
    q = (x @ part["self_attn.q_proj.weight"].T).reshape(length, tiny.num_heads, dim)
    k = (x @ part["self_attn.k_proj.weight"].T).reshape(length, tiny.num_kv_heads, dim)
    v = (x @ part["self_attn.v_proj.weight"].T).reshape(length, tiny.num_kv_heads, dim)
    q, k = _rotate(tiny, q), _rotate(tiny, k)
    out = np.zeros_like(q)
    for head in range(tiny.num_heads):
        shared = head // (tiny.num_heads // tiny.num_kv_heads)
        scores = q[:, head] @ k[:, shared].T / np.sqrt(dim)
        scores[np.triu_indices(length, 1)] = -np.inf
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        out[:, head] = weights / weights.sum(-1, keepdims=True) @ v[:, shared]
    mixed: np.ndarray = out.reshape(length, -1) @ part["self_attn.o_proj.weight"].T
    return mixed


def _rotate(tiny: Tiny, x: np.ndarray) -> np.ndarray:
    half = tiny.head_dim // 2
    frequencies = tiny.theta ** (-np.arange(half) / half)
    if tiny.factors is not None:
        frequencies = frequencies / np.array(tiny.factors)
    angles = np.arange(len(x))[:, None, None] * frequencies
    a, b = x[..., :half], x[..., half:]
    rotated: np.ndarray = np.concatenate(
        (a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)), -1
    )
    return rotated
