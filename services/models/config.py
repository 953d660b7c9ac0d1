"""What a decoder looks like: the numbers that a model file states about itself.

Invariants: every size is positive and below its limit; heads divide evenly; rotary factors, if any,
number half a head.

Pure: frozen values and arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MAX_VOCAB_SIZE = 1 << 20
MAX_HIDDEN_SIZE = 1 << 16
MAX_INTERMEDIATE_SIZE = 1 << 20
MAX_NUM_LAYERS = 1 << 10
MAX_NUM_HEADS = 1 << 10
MAX_HEAD_DIM = 1 << 10
MAX_POSITIONS = 1 << 24
"""Above any published model; a file that says more is damaged or hostile."""

SUPPORTED_ROPE_TYPES = ("none", "default", "linear", "llama3")


class ConfigError(ValueError):
    """The numbers of a model contradict each other or ask for something unsupported."""

    def __init__(self, problem: str, supported: str = "") -> None:
        self.problem = problem
        self.supported = supported
        super().__init__(problem)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A Llama-family decoder: pre-norm, rotary positions, grouped-query attention, SwiGLU.

    rope_factors: (head_dim / 2) divisors of the rotary frequencies; None means all 1
    eos_token_ids: every id that ends a text; may be empty
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    rope_factors: tuple[float, ...] | None
    tie_word_embeddings: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        self._check_sizes()
        if self.num_heads % self.num_kv_heads != 0:
            raise ConfigError(
                f"{self.num_heads} attention heads cannot share {self.num_kv_heads} key heads"
            )
        if self.head_dim % 2 != 0:
            raise ConfigError(f"head_dim {self.head_dim} is odd; rotary positions need pairs")
        for name in ("rms_norm_eps", "rope_theta"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0.0):
                raise ConfigError(f"{name} is {value}, not a positive number")
        if self.rope_factors is not None:
            self._check_factors(self.rope_factors)

    def _check_sizes(self) -> None:
        limits = {
            "vocab_size": MAX_VOCAB_SIZE,
            "hidden_size": MAX_HIDDEN_SIZE,
            "intermediate_size": MAX_INTERMEDIATE_SIZE,
            "num_layers": MAX_NUM_LAYERS,
            "num_heads": MAX_NUM_HEADS,
            "num_kv_heads": MAX_NUM_HEADS,
            "head_dim": MAX_HEAD_DIM,
            "max_position_embeddings": MAX_POSITIONS,
        }
        for name, limit in limits.items():
            value = getattr(self, name)
            if not 1 <= value <= limit:
                raise ConfigError(f"{name} is {value}", f"1 to {limit}")

    def _check_factors(self, factors: tuple[float, ...]) -> None:
        if len(factors) != self.head_dim // 2:
            raise ConfigError(f"{len(factors)} rotary factors for {self.head_dim // 2} frequencies")
        if not all(math.isfinite(factor) and factor > 0.0 for factor in factors):
            raise ConfigError("a rotary factor is not a positive number")


def rope_factors(
    scaling: Mapping[str, Any], head_dim: int, theta: float
) -> tuple[float, ...] | None:
    """Divisors of the rotary frequencies from the scaling section of a Hugging Face config.

    scaling: ``rope_type`` (or ``type``) and its parameters
    returns: (head_dim / 2) factors, or None where nothing is scaled
    Raises ConfigError for a scaling that is not supported or lacks a parameter.
    """
    rope_type = str(scaling.get("rope_type", scaling.get("type", "default")))
    if rope_type in ("none", "default"):
        return None
    if not 1 <= head_dim <= MAX_HEAD_DIM:
        raise ConfigError(f"head_dim is {head_dim}", f"1 to {MAX_HEAD_DIM}")
    if rope_type == "linear":
        return (_positive(scaling, "factor"),) * (head_dim // 2)
    if rope_type == "llama3":
        return _llama3_factors(scaling, head_dim, theta)
    raise ConfigError(f"rope scaling {rope_type!r}", ", ".join(SUPPORTED_ROPE_TYPES))


def _llama3_factors(scaling: Mapping[str, Any], head_dim: int, theta: float) -> tuple[float, ...]:
    """Llama 3.1's rule (reference implementation of its authors, ``apply_scaling``).

    Wavelengths shorter than original / high_freq_factor keep their frequency, those longer than
    original / low_freq_factor are divided by ``factor``, and those between are blended.
    """
    factor = _positive(scaling, "factor")
    low = _positive(scaling, "low_freq_factor")
    high = _positive(scaling, "high_freq_factor")
    original = _positive(scaling, "original_max_position_embeddings")
    if not theta > 0.0:
        raise ConfigError(f"rope_theta is {theta}, not a positive number")
    if high <= low:
        raise ConfigError(f"high_freq_factor {high} is not above low_freq_factor {low}")
    factors = []
    for pair in range(head_dim // 2):
        wavelength = 2.0 * math.pi * math.pow(theta, 2.0 * pair / head_dim)
        if wavelength < original / high:
            factors.append(1.0)
        elif wavelength > original / low:
            factors.append(factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            factors.append(1.0 / ((1.0 - smooth) / factor + smooth))
    return tuple(factors)


def _positive(scaling: Mapping[str, Any], name: str) -> float:
    value = as_float(scaling.get(name), f"rope scaling {name}")
    if not (math.isfinite(value) and value > 0):
        raise ConfigError(f"rope scaling {name} is {value}, not a positive number")
    return value


def as_float(value: object, name: str) -> float:
    """A number of a config file as a float; raises ConfigError for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{name} is not a number")
    try:
        return float(value)
    except OverflowError:
        raise ConfigError(f"{name} is out of range") from None
