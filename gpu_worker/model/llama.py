"""The Llama-family decoder over packed tokens and a paged KV cache.

Invariants: every shape comes from ModelConfig; tokens of all sequences are packed with no padding;
the output head sees only the rows whose logits are wanted.

Device: reads weights, writes the KV cache.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gpu_worker.kv_cache import KVCache
from kernels.attention import BatchLayout, plan_attention, varlen_paged_attention
from kernels.linear import Linear
from kernels.native import NativeKernels
from kernels.rms_norm import fused_add_rms_norm, rms_norm
from kernels.rope import build_rope_table
from kernels.rope_write_kv import rope_write_kv
from kernels.silu_mul import silu_mul
from services.models.config import ModelConfig


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    """One decoder layer.

    qkv:     hidden_size -> (num_heads + 2 * num_kv_heads) * head_dim, in that order
    gate_up: hidden_size -> 2 * intermediate_size, gate first
    """

    input_norm: torch.Tensor
    qkv: Linear
    attention_output: Linear
    feed_forward_norm: torch.Tensor
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True, eq=False)
class LlamaWeights:
    """All weights; embedding is (vocab_size, hidden_size), its dtype is the model's."""

    embedding: torch.Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: torch.Tensor
    head: Linear


@dataclass(frozen=True, slots=True, eq=False)
class PackedBatch:
    """The tensors of one step; shapes as in ``gpu_worker.inputs.StepInputs``."""

    input_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    cu_seqlens_q: torch.Tensor
    seqlens_k: torch.Tensor
    block_table: torch.Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    num_decodes: int


class LlamaModel:
    """A decoder ready to run, for positions below ``max_model_len``.

    native: the library that runs everything between two linears; None runs the torch reference
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: LlamaWeights,
        max_model_len: int,
        native: NativeKernels | None = None,
    ) -> None:
        self.config = config
        self._native = native
        self._weights = weights
        self._scale = config.head_dim**-0.5
        self._rope_table = build_rope_table(
            config.head_dim, max_model_len, config.rope_theta, config.rope_factors
        )

    def forward(self, batch: PackedBatch, cache: KVCache) -> torch.Tensor:
        """Final hidden states, normalised: (num_tokens, hidden_size), dtype of the model."""
        epsilon, native = self.config.rms_norm_eps, self._native
        cos_sin = self._rope_table.index_select(0, batch.positions)
        residual = self._weights.embedding.index_select(0, batch.input_ids)
        normed = rms_norm(residual, self._weights.layers[0].input_norm, epsilon, native)
        layout = None
        if native is None:
            layout = plan_attention(
                batch.cu_seqlens_q, batch.seqlens_k, batch.block_table, cache.layer(0)[0]
            )
        next_norms = [layer.input_norm for layer in self._weights.layers[1:]]
        next_norms.append(self._weights.final_norm)
        for index, layer in enumerate(self._weights.layers):
            mixed = self._attention(layer, normed, cos_sin, (batch, layout), cache.layer(index))
            normed, residual = fused_add_rms_norm(
                mixed, residual, layer.feed_forward_norm, epsilon, native
            )
            moved = layer.down(silu_mul(layer.gate_up(normed), native))
            normed, residual = fused_add_rms_norm(
                moved, residual, next_norms[index], epsilon, native
            )
        return normed

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Scores of every token after each row: (rows, vocab_size), dtype of the model."""
        return self._weights.head(hidden)

    def _attention(
        self,
        layer: LayerWeights,
        x: torch.Tensor,
        cos_sin: torch.Tensor,
        step: tuple[PackedBatch, BatchLayout | None],
        caches: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        """Self-attention of one layer: (num_tokens, hidden_size) in and out."""
        config = self.config
        batch, layout = step
        num_tokens, num_heads, num_kv_heads = x.shape[0], config.num_heads, config.num_kv_heads
        qkv = layer.qkv(x).view(num_tokens, num_heads + 2 * num_kv_heads, config.head_dim)
        k_cache, v_cache = caches
        q = rope_write_kv(qkv, cos_sin, k_cache, v_cache, batch.slot_mapping, self._native)
        mixed = varlen_paged_attention(
            q,
            k_cache,
            v_cache,
            batch.cu_seqlens_q,
            batch.seqlens_k,
            batch.block_table,
            max_seqlen_q=batch.max_seqlen_q,
            max_seqlen_k=batch.max_seqlen_k,
            scale=self._scale,
            num_decodes=batch.num_decodes,
            layout=layout,
            native=self._native,
        )
        return layer.attention_output(mixed.view(num_tokens, num_heads * config.head_dim))
