"""How long a step takes, by what it computes: a line, or a roofline of a machine and a model.

Pure: numbers only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

_MS: Final = 1e3
_BF16_BYTES: Final = 2


class StepLoad(NamedTuple):
    """What one step computes. num_kv_tokens: read by its attention, summed over its lanes."""

    num_seqs: int
    num_decode_tokens: int
    num_prefill_tokens: int
    num_kv_tokens: int

    @property
    def num_tokens(self) -> int:
        return self.num_decode_tokens + self.num_prefill_tokens


class StepTime(Protocol):
    """A step-time model."""

    def ms(self, load: StepLoad) -> float:
        """Milliseconds of one forward pass."""

    @property
    def text(self) -> str:
        """The model in one line, for reports."""


@dataclass(frozen=True, slots=True)
class LinearStepTime:
    """t = base + token · tokens + prompt_token · prefill tokens + kv_token · KV tokens, in ms."""

    base_ms: float
    token_ms: float = 0.0
    prompt_token_ms: float = 0.0
    kv_token_ms: float = 0.0

    def ms(self, load: StepLoad) -> float:
        return (
            self.base_ms
            + self.token_ms * load.num_tokens
            + self.prompt_token_ms * load.num_prefill_tokens
            + self.kv_token_ms * load.num_kv_tokens
        )

    @property
    def text(self) -> str:
        parts = [f"{self.base_ms:g}"]
        for factor, name in (
            (self.token_ms, "tokens"),
            (self.prompt_token_ms, "prompt tokens"),
            (self.kv_token_ms, "KV tokens"),
        ):
            if factor:
                parts.append(f"{factor:.4g} · {name}")
        return f"t = {' + '.join(parts)} ms"


@dataclass(frozen=True, slots=True)
class Gpu:
    """bandwidth: bytes per second; flops: dense BF16 per second; memory_bytes: of the device."""

    name: str
    bandwidth: float
    flops: float
    memory_bytes: float


# From the vendor's data sheets of the SXM boards: bandwidth, dense BF16 peak, memory.
GPUS: Final = {
    "a100": Gpu("A100 80 GB", 2.039e12, 312e12, 80e9),
    "h100": Gpu("H100", 3.35e12, 989e12, 80e9),
    "h200": Gpu("H200", 4.8e12, 989e12, 141e9),
}


@dataclass(frozen=True, slots=True)
class ModelSize:
    """num_params: of a dense model, in BF16. kv_token_bytes: keys and values of one token."""

    name: str
    num_params: float
    kv_token_bytes: int

    @property
    def weight_bytes(self) -> float:
        return self.num_params * _BF16_BYTES


def _kv_token_bytes(layers: int, kv_heads: int, head_dim: int) -> int:
    """Keys and values, BF16. 32 layers, 8 heads of 128: 131,072 bytes."""
    return 2 * layers * kv_heads * head_dim * _BF16_BYTES


# 7B: the deep dive's example (14 GB of weights, 128 KB a token, so with grouped heads); 8B and 70B
# have the published shapes of Llama 3.
MODELS: Final = {
    "7b": ModelSize("7B", 7e9, _kv_token_bytes(32, 8, 128)),
    "8b": ModelSize("8B", 8e9, _kv_token_bytes(32, 8, 128)),
    "70b": ModelSize("70B", 70e9, _kv_token_bytes(80, 8, 128)),
}

USABLE_MEMORY: Final = 0.90
"""Share of the device's memory for weights and KV; the rest is for activations and graphs."""


@dataclass(frozen=True, slots=True)
class RooflineStepTime:
    """max(weight bytes / bandwidth, 2 · params · tokens / FLOPs) + KV bytes / bandwidth.

    num_gpus: tensor parallel, without its cost. efficiency: achieved share of peak FLOPs. base_ms:
    per step, for launches and sampling.
    """

    gpu: Gpu
    model: ModelSize
    num_gpus: int = 1
    efficiency: float = 1.0
    base_ms: float = 0.0

    @property
    def weights_ms(self) -> float:
        return self.model.weight_bytes / (self.gpu.bandwidth * self.num_gpus) * _MS

    @property
    def token_ms(self) -> float:
        flops = self.gpu.flops * self.efficiency * self.num_gpus
        return 2 * self.model.num_params / flops * _MS

    @property
    def kv_token_ms(self) -> float:
        return self.model.kv_token_bytes / (self.gpu.bandwidth * self.num_gpus) * _MS

    @property
    def ridge_tokens(self) -> float:
        """Tokens of a step at which its arithmetic takes as long as reading the weights."""
        return self.weights_ms / self.token_ms

    @property
    def max_kv_tokens(self) -> int:
        """What fits beside the weights; 0 or less where the weights alone do not fit."""
        memory = self.gpu.memory_bytes * self.num_gpus * USABLE_MEMORY
        return int((memory - self.model.weight_bytes) // self.model.kv_token_bytes)

    def ms(self, load: StepLoad) -> float:
        dense = max(self.weights_ms, self.token_ms * load.num_tokens)
        return self.base_ms + dense + self.kv_token_ms * load.num_kv_tokens

    @property
    def text(self) -> str:
        gpus = f"{self.num_gpus} × " if self.num_gpus > 1 else ""
        dense = f"max({self.weights_ms:.3g}, {self.token_ms:.3g} · tokens)"
        line = f"{dense} + {self.kv_token_ms:.3g} · KV tokens ms"
        return f"{self.model.name} on {gpus}{self.gpu.name}: t = {line}"
