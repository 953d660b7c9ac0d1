"""The Llama-family decoder over packed tokens and a paged KV cache.

Invariants: every shape comes from ModelConfig; tokens of all sequences are packed with no padding;
the output head sees only the rows whose logits are wanted.

Device: reads weights, writes the KV cache.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gpu_worker.kv_cache import KVCache
from gpu_worker.model.operations import Operations, PackedBatch
from kernels.attention import BatchLayout
from kernels.decoder import DecoderShape, LayerWeights, Matrix, NativeDecoder
from kernels.linear_int8 import Int8Linear
from kernels.native import NativeKernels
from kernels.quantise import QuantisedRows, empty_rows
from kernels.rope import build_rope_table
from services.models.config import ModelConfig


@dataclass(frozen=True, slots=True, eq=False)
class LlamaWeights:
    """All weights; embedding is (vocab_size, hidden_size), its dtype is the model's."""

    embedding: torch.Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: torch.Tensor
    head: Matrix


class LlamaModel:
    """A decoder ready to run, for positions below ``max_model_len``.

    operations: what runs between its linears, on the device of the weights
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: LlamaWeights,
        max_model_len: int,
        operations: Operations,
    ) -> None:
        self.config = config
        self._operations = operations
        self._weights = weights
        self._rope_table = build_rope_table(
            config.head_dim, max_model_len, config.rope_theta, config.rope_factors
        ).to(weights.embedding.device)
        self._decoder: NativeDecoder | None = None

    @property
    def is_native(self) -> bool:
        """Whether all layers run in native code, in which a row has the same bits in any batch."""
        return self._decoder is not None

    def attach(self, cache: KVCache, native: NativeKernels) -> None:
        """Run all layers in one native call, on this cache, where the weights allow it."""
        config, weights = self.config, self._weights
        caches = [cache.layer(index) for index in range(config.num_layers)]
        if not NativeDecoder.supports(native, weights.layers, caches):
            return
        shape = DecoderShape(
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            config.intermediate_size,
            config.rms_norm_eps,
            config.head_dim**-0.5,
        )
        self._decoder = NativeDecoder(native, weights.layers, weights.final_norm, caches, shape)

    def forward(self, batch: PackedBatch, cache: KVCache) -> torch.Tensor:
        """Final hidden states, normalised: (num_tokens, hidden_size), dtype of the model.

        Valid until the next call.
        """
        epsilon, operations = self.config.rms_norm_eps, self._operations
        cos_sin = self._rope_table.index_select(0, batch.positions)
        residual = operations.embed(self._weights.embedding, batch.input_ids)
        if self._decoder is not None:
            return self._decoder(residual, cos_sin, batch.slot_mapping, batch.indices)
        first = self._weights.layers[0]
        rows = _rows_for(first.qkv, *residual.shape)
        normed = operations.rms_norm(residual, first.input_norm, epsilon, rows)
        layout = operations.plan(batch, cache.layer(0)[0])
        next_norms = [layer.input_norm for layer in self._weights.layers[1:]]
        next_norms.append(self._weights.final_norm)
        for index, layer in enumerate(self._weights.layers):
            qkv = _multiply(layer.qkv, normed, rows)
            mixed = self._attention(layer, qkv, cos_sin, (batch, layout), cache.layer(index))
            normed, residual = operations.add_rms_norm(
                mixed, residual, layer.feed_forward_norm, epsilon, rows
            )
            moved = self._feed_forward(layer, _multiply(layer.gate_up, normed, rows))
            normed, residual = operations.add_rms_norm(
                moved, residual, next_norms[index], epsilon, rows
            )
        return normed

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Scores of every token after each row: (rows, vocab_size), dtype of the model."""
        return self._weights.head(hidden)

    def _feed_forward(self, layer: LayerWeights, gate_up: torch.Tensor) -> torch.Tensor:
        rows = _rows_for(layer.down, gate_up.shape[0], self.config.intermediate_size)
        return _multiply(layer.down, self._operations.silu_mul(gate_up, rows), rows)

    def _attention(
        self,
        layer: LayerWeights,
        qkv: torch.Tensor,
        cos_sin: torch.Tensor,
        step: tuple[PackedBatch, BatchLayout | None],
        caches: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        """Self-attention of one layer, from its qkv: (num_tokens, hidden_size)."""
        config = self.config
        batch, layout = step
        num_tokens, num_heads, num_kv_heads = qkv.shape[0], config.num_heads, config.num_kv_heads
        heads = qkv.view(num_tokens, num_heads + 2 * num_kv_heads, config.head_dim)
        rows = _rows_for(layer.attention_output, num_tokens, num_heads * config.head_dim)
        q = self._operations.rope_write_kv(heads, cos_sin, caches, batch.slot_mapping)
        mixed = self._operations.attention(q, caches, batch, layout, rows)
        joined = mixed.view(num_tokens, num_heads * config.head_dim)
        return _multiply(layer.attention_output, joined, rows)


def _rows_for(matrix: Matrix, num_rows: int, num_features: int) -> QuantisedRows | None:
    """Room for quantised rows where the matrix wants them."""
    return empty_rows(num_rows, num_features) if isinstance(matrix, Int8Linear) else None


def _multiply(matrix: Matrix, x: torch.Tensor, rows: QuantisedRows | None) -> torch.Tensor:
    """x times the matrix; rows are x quantised, if its producer wrote them."""
    if isinstance(matrix, Int8Linear):
        return matrix(x if rows is None else rows)
    return matrix(x)
