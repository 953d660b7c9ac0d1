"""A Llama model of any size without a file: random numbers, made on the device."""

from __future__ import annotations

from pathlib import Path

import torch

from services.models.config import ModelConfig

STANDARD_DEVIATION = 0.02


def llama(
    hidden: int, intermediate: int, layers: int, heads: tuple[int, int, int], vocab: int, tied: bool
) -> ModelConfig:
    """heads: (num_heads, num_kv_heads, head_dim)."""
    num_heads, num_kv_heads, head_dim = heads
    return ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_layers=layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_theta=500000.0,
        rope_factors=None,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_ids=(),
    )


# The shapes of Llama 3.2 1B and Llama 3.1 8B, without their rotary scaling.
CONFIGS = {
    "1B": llama(2048, 8192, 16, (32, 8, 64), 128_256, tied=True),
    "8B": llama(4096, 14336, 32, (32, 8, 128), 128_256, tied=False),
    "small": llama(512, 1024, 4, (8, 2, 64), 4096, tied=False),
    "tiny": llama(32, 64, 1, (2, 1, 16), 64, tied=True),
}


def num_parameters(config: ModelConfig) -> int:
    """Of all matrices that a step reads; the embedding counts as the head."""
    queries = config.num_heads * config.head_dim
    keys = config.num_kv_heads * config.head_dim
    layer = config.hidden_size * (2 * queries + 2 * keys + 3 * config.intermediate_size)
    return config.num_layers * layer + config.vocab_size * config.hidden_size


class RandomWeights:
    """What ``gpu_worker.model.loader.WeightSource`` asks for; the same numbers for a name and seed
    on one device.
    """

    def __init__(self, config: ModelConfig, device: torch.device, seed: int = 0) -> None:
        self.path = Path("random")
        self.config = config
        self._device = device
        self._generator = torch.Generator(device).manual_seed(seed)

    def tensor(self, name: str) -> torch.Tensor:
        if "norm" in name:
            return torch.ones(self.config.hidden_size, device=self._device)
        shape = self._shape(name)
        values = torch.empty(shape, dtype=torch.float32, device=self._device)
        return values.normal_(0.0, STANDARD_DEVIATION, generator=self._generator)

    def _shape(self, name: str) -> tuple[int, int]:
        config = self.config
        hidden, inner = config.hidden_size, config.intermediate_size
        queries = config.num_heads * config.head_dim
        keys = config.num_kv_heads * config.head_dim
        shapes = {
            "embed_tokens": (config.vocab_size, hidden),
            "lm_head": (config.vocab_size, hidden),
            "q_proj": (queries, hidden),
            "k_proj": (keys, hidden),
            "v_proj": (keys, hidden),
            "o_proj": (hidden, queries),
            "gate_proj": (inner, hidden),
            "up_proj": (inner, hidden),
            "down_proj": (hidden, inner),
        }
        return shapes[name.removesuffix(".weight").rsplit(".", 1)[-1]]
