"""Weights prepared for 8 bits: what is large in activations is moved into the weights.

A feature of activations times t, its column of weights divided by t, leaves the product as it was.
The error of rounding both is least where t is the root of the column's norm over the feature's
root mean square: then a few large features no longer set the size of a step for all. t moves into
what makes the feature (a norm's gain, rows of `up` and `v`), so it costs nothing at run time.

How large features are is seen on tokens that a fixed rule draws from the vocabulary, which pass
through each layer as it is loaded: they have a text's large features, and no text is needed.

Invariants: the model computes what it did, but for rounding; factors are of a coarse grid, so that
the order of a sum does not change them but in rare cases.

Device: tensors on the CPU. Source: SmoothQuant, Xiao et al. 2023, arXiv 2211.10438, with the root
mean square in place of the maximum, as the rotation after it spreads single peaks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from kernels.rope import apply_rope, build_rope_table
from services.models.config import ModelConfig

NUM_TOKENS = 128
"""A pass of so many costs half of what converting the weights does."""

TOKEN_STEP = 40_503
"""Tokens are this far apart in the vocabulary: an odd number near 2^16 over the golden ratio."""

STEPS_OF_TWO = 4
"""Factors are powers of the fourth root of two."""

SMALLEST_SHARE = 1e-4
"""Of the largest feature: below it, features are taken to be of this size."""


@dataclass(frozen=True, slots=True, eq=False)
class RawLayer:
    """The weights of one layer, (out_features, in_features) and (features)."""

    input_norm: torch.Tensor
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    o: torch.Tensor
    feed_forward_norm: torch.Tensor
    gate: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor


class Smoother:
    """Takes the layers in order, then the head.

    embedding: (vocab_size, hidden_size) float32
    dtype:     of the gains of norms that come out
    """

    def __init__(self, config: ModelConfig, embedding: torch.Tensor, dtype: torch.dtype) -> None:
        num_tokens = min(NUM_TOKENS, config.max_position_embeddings)
        ids = torch.arange(1, num_tokens + 1) * TOKEN_STEP % config.vocab_size
        self._config = config
        self._dtype = dtype
        self._hidden = embedding[ids].float()
        self._cos_sin = build_rope_table(
            config.head_dim, num_tokens, config.rope_theta, config.rope_factors
        ).to(embedding.device)

    def layer(self, raw: RawLayer) -> RawLayer:
        """The same layer, easier to round; float32 in and out."""
        config = self._config
        normed = self._normed(raw.input_norm)
        mixed = self._attention(normed, raw)
        self._hidden = self._hidden + mixed @ raw.o.T
        fed = self._normed(raw.feed_forward_norm)
        active = torch.nn.functional.silu(fed @ raw.gate.T) * (fed @ raw.up.T)
        self._hidden = self._hidden + active @ raw.down.T
        input_norm, before = self._gain(raw.input_norm, normed, (raw.q, raw.k, raw.v))
        feed_forward_norm, between = self._gain(raw.feed_forward_norm, fed, (raw.gate, raw.up))
        # The heads of a group read the same values, so these share their factors.
        group = config.num_heads // config.num_kv_heads
        by_group = (-1, config.num_kv_heads, group, config.head_dim)
        read, columns = _rms(mixed.view(by_group), (0, 2)), _rms(raw.o.view(by_group), (0, 2))
        values = _factors(read, columns)
        per_head = values[:, None].expand(-1, group, -1).flatten()
        inner = _factors(_rms(active, (0,)), _rms(raw.down, (0,)))
        return replace(
            raw,
            input_norm=input_norm,
            q=raw.q / before,
            k=raw.k / before,
            v=raw.v / before * values.view(-1, 1),
            o=raw.o / per_head,
            feed_forward_norm=feed_forward_norm,
            gate=raw.gate / between,
            up=raw.up / between * inner[:, None],
            down=raw.down / inner,
        )

    def head(self, final_norm: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """The gain of the last norm; weight, the output head, is changed in place."""
        gain, factors = self._gain(final_norm, self._normed(final_norm), (weight,))
        weight /= factors
        return gain

    def _normed(self, gain: torch.Tensor) -> torch.Tensor:
        mean = self._hidden.square().mean(dim=1, keepdim=True)
        return self._hidden * torch.rsqrt(mean + self._config.rms_norm_eps) * gain

    def _attention(self, normed: torch.Tensor, raw: RawLayer) -> torch.Tensor:
        config = self._config

        def heads(weight: torch.Tensor) -> torch.Tensor:
            return (normed @ weight.T).view(normed.shape[0], -1, config.head_dim)

        q, k = (apply_rope(heads(weight), self._cos_sin) for weight in (raw.q, raw.k))
        group = config.num_heads // config.num_kv_heads
        k, v = (x.repeat_interleave(group, dim=1) for x in (k, heads(raw.v)))
        mixed = torch.nn.functional.scaled_dot_product_attention(
            q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), is_causal=True
        )
        return mixed.transpose(0, 1).reshape(normed.shape[0], -1)

    def _gain(
        self, gain: torch.Tensor, normed: torch.Tensor, weights: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(gain times the factors in the dtype that it is kept in, the factors that it then has)"""
        norms = [torch.linalg.vector_norm(weight, dim=0) for weight in weights]
        columns = torch.linalg.vector_norm(torch.stack(norms), dim=0)
        kept = (gain * _factors(_rms(normed, (0,)), columns)).to(self._dtype).float()
        factors = torch.where(kept == 0, 1.0, kept / gain)
        return kept, factors


def _rms(x: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
    return x.square().mean(dim=dims).sqrt()


def _factors(features: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """What each feature is to be multiplied by: 1 in the geometric mean."""
    features = features.clamp(min=float(features.max()) * SMALLEST_SHARE)
    columns = columns.clamp(min=float(columns.max()) * SMALLEST_SHARE)
    exponents = (columns.log2() - features.log2()) / 2
    exponents = torch.nan_to_num(exponents - exponents.mean(), nan=0.0, posinf=0.0, neginf=0.0)
    return torch.exp2(torch.round(exponents * STEPS_OF_TWO) / STEPS_OF_TWO)
