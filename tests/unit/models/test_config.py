from __future__ import annotations

import dataclasses
import math

import pytest

from services.models.config import ConfigError, ModelConfig, as_float, rope_factors

CONFIG = ModelConfig(
    architecture="llama",
    vocab_size=96,
    hidden_size=64,
    intermediate_size=96,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_position_embeddings=128,
    rms_norm_eps=1e-5,
    rope_theta=1e4,
    rope_factors=None,
    tie_word_embeddings=True,
    bos_token_id=None,
    eos_token_ids=(),
)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"num_kv_heads": 3}, "cannot share"),
        ({"head_dim": 7}, "odd"),
        ({"num_layers": 0}, "num_layers"),
        ({"vocab_size": -1}, "vocab_size"),
        ({"hidden_size": 1 << 40}, "hidden_size"),
        ({"rms_norm_eps": math.nan}, "rms_norm_eps"),
        ({"rope_theta": 0.0}, "rope_theta"),
        ({"rope_factors": (1.0,)}, "factors"),
        ({"rope_factors": (1.0, 1.0, 0.0, 1.0)}, "factor"),
    ],
)
def test_contradictions_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(CONFIG, **changes)  # type: ignore[arg-type]


def test_llama3_factors_of_the_published_model() -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    factors = rope_factors(scaling, 128, 500000.0)
    assert factors is not None and len(factors) == 64
    # Wavelengths below 2,048 are kept, those above 8,192 are divided by 8.
    for pair, factor in enumerate(factors):
        wavelength = 2 * math.pi * 500000.0 ** (2 * pair / 128)
        if wavelength < 2048:
            assert factor == 1.0
        elif wavelength > 8192:
            assert factor == 8.0
        else:
            assert 1.0 < factor < 8.0
    assert list(factors) == sorted(factors)


@pytest.mark.parametrize("scaling", [{}, {"rope_type": "default"}, {"type": "none"}])
def test_no_scaling(scaling: dict[str, object]) -> None:
    assert rope_factors(scaling, 64, 1e4) is None


def test_linear_scaling() -> None:
    assert rope_factors({"type": "linear", "factor": 2}, 8, 1e4) == (2.0,) * 4


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "yarn", "factor": 2.0},
        {"rope_type": "linear"},
        {"rope_type": "linear", "factor": -1},
        {"rope_type": "linear", "factor": 10**400},
        {"rope_type": "linear", "factor": "2"},
        {"rope_type": "llama3", "factor": 8.0},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 4.0,
            "high_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
        },
    ],
)
def test_bad_scaling_is_refused(scaling: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        rope_factors(scaling, 64, 1e4)


@pytest.mark.parametrize("head_dim, theta", [(1 << 40, 1e4), (0, 1e4), (64, -1.0)])
def test_bad_sizes_are_refused_before_use(head_dim: int, theta: float) -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    with pytest.raises(ConfigError):
        rope_factors(scaling, head_dim, theta)


def test_numbers() -> None:
    assert as_float(3, "x") == 3.0
    for bad in (True, "3", None, [3]):
        with pytest.raises(ConfigError, match="x is not a number"):
            as_float(bad, "x")
