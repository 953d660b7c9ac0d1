"""Moving large features into the weights changes no product, and makes rounding cheaper."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gpu_worker.model.smoothing import RawLayer, Smoother
from services.models.config import ModelConfig


def config() -> ModelConfig:
    return ModelConfig(
        architecture="llama",
        vocab_size=96,
        hidden_size=48,
        intermediate_size=80,
        num_layers=1,
        num_heads=6,
        num_kv_heads=2,
        head_dim=8,
        max_position_embeddings=64,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        rope_factors=None,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_ids=(),
    )


def raw_layer() -> RawLayer:
    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns) * 0.15

    gain = 1 + 0.1 * torch.randn(48)
    gain[5] = 0
    return RawLayer(
        gain, matrix(48, 48), matrix(16, 48), matrix(16, 48), matrix(48, 48),
        1 + 0.1 * torch.randn(48), matrix(80, 48), matrix(80, 48), matrix(48, 80),
    )  # fmt: skip


def outputs(raw: RawLayer, x: torch.Tensor) -> list[torch.Tensor]:
    """q and k of normalised rows, values through o (every head reads its group's), and the rest."""
    normed, fed = x * raw.input_norm, x * raw.feed_forward_norm
    values = (normed @ raw.v.T).view(-1, 2, 1, 8).expand(-1, 2, 3, 8).reshape(-1, 48)
    active = torch.nn.functional.silu(fed @ raw.gate.T) * (fed @ raw.up.T)
    return [normed @ raw.q.T, normed @ raw.k.T, values @ raw.o.T, active @ raw.down.T]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_stay_what_they_were(dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    embedding = torch.randn(96, 48)
    embedding[:, 7] *= 50
    smoother, raw = Smoother(config(), embedding, dtype), raw_layer()
    smooth = smoother.layer(raw)
    assert torch.equal(smooth.input_norm, smooth.input_norm.to(dtype).float())
    assert not torch.equal(smooth.down, raw.down) and smooth.input_norm[5] == 0
    x = torch.randn(9, 48)
    for got, expected in zip(outputs(smooth, x), outputs(raw, x), strict=True):
        assert torch.allclose(got, expected, rtol=1e-4, atol=1e-4)
    norm, head = torch.ones(48), embedding.clone()
    gain = smoother.head(norm, head)
    assert torch.allclose((x * gain) @ head.T, (x * norm) @ embedding.T, rtol=1e-4, atol=1e-3)


def test_a_large_feature_no_longer_sets_the_step() -> None:
    torch.manual_seed(3)
    embedding = torch.randn(96, 48)
    embedding[:, 7] *= 50
    smooth = Smoother(config(), embedding, torch.float32).layer(raw_layer())
    assert float(smooth.input_norm[7]) < 0.3 * float(smooth.input_norm.median())


def test_weights_of_zero_are_left_alone() -> None:
    raw = raw_layer()
    zeros = RawLayer(*(torch.zeros_like(getattr(raw, name)) for name in RawLayer.__slots__))
    smooth = Smoother(config(), torch.zeros(96, 48), torch.float32).layer(zeros)
    for name in RawLayer.__slots__:
        assert np.count_nonzero(getattr(smooth, name)) == 0
