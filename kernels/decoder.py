"""All layers of a Llama decoder in one native call, where everything that it needs is native.

The reference is the same operations one by one, as ``gpu_worker.model.llama`` runs them where this
cannot be used; the bits are the same.

Invariants: the weights stay where they are as long as the decoder lives; what a call returns is
overwritten by the next one.

Device: writes the KV cache, and memory of its own that grows to the most tokens seen.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch

from kernels.attention.cpu_backend import MAX_HEAD_DIM, takes_caches
from kernels.kv_bytes import head_dim_of, kind_of
from kernels.linear import Linear, NativeLinear
from kernels.linear_int8 import Int8Linear
from kernels.native import NativeKernels
from kernels.native.arguments import DecoderArguments, LayerArguments, MatrixArguments
from kernels.quantise import QuantisedRows, empty_rows

Matrix: TypeAlias = Linear | Int8Linear
"""A product with a fixed matrix, in the dtype of the model or in 8 bits."""

Caches: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""Keys and values of a layer, as ``varlen_paged_attention`` takes them."""

MIN_ROWS = 64
"""Tokens that there is room for at first."""


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    """One decoder layer.

    qkv:     hidden_size -> (num_heads + 2 * num_kv_heads) * head_dim, in that order
    gate_up: hidden_size -> 2 * intermediate_size, gate first
    """

    input_norm: torch.Tensor
    qkv: Matrix
    attention_output: Matrix
    feed_forward_norm: torch.Tensor
    gate_up: Matrix
    down: Matrix

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        """In the order of ``library.h``."""
        return self.qkv, self.attention_output, self.gate_up, self.down


class DecoderShape(NamedTuple):
    """Sizes of a decoder; scale multiplies q.k, epsilon is that of the norms."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    epsilon: float
    scale: float


class _Workspace:
    """Room for what passes between the operations, for so many rows."""

    def __init__(self, shape: DecoderShape, hidden: int, rows: int, dtype: torch.dtype) -> None:
        heads, inner = shape.num_heads * shape.head_dim, shape.intermediate_size
        qkv = heads + 2 * shape.num_kv_heads * shape.head_dim
        sizes = (hidden, qkv, heads, hidden, 2 * inner, inner)
        self.rows = rows
        self.tensors = [torch.empty(rows, size, dtype=dtype) for size in sizes]
        self.normed = self.tensors[0]

    def quantised(self) -> list[QuantisedRows]:
        """For what enters a product: normed, mixed and activated."""
        return [empty_rows(self.rows, self.tensors[i].shape[1]) for i in (0, 2, 5)]


class NativeDecoder:
    """Runs every layer of a decoder; ``supports`` says for which ones.

    layers, final_norm: the weights
    caches:             of every layer, all of one shape and with the same strides
    """

    def __init__(
        self,
        native: NativeKernels,
        layers: Sequence[LayerWeights],
        final_norm: torch.Tensor,
        caches: Sequence[Caches],
        shape: DecoderShape,
    ) -> None:
        assert NativeDecoder.supports(native, layers, caches), "a decoder that is all native"
        self._native = native
        self._shape = shape
        # Kept because the arguments hold addresses only.
        self._kept = (layers, final_norm, caches)
        self._int8 = isinstance(layers[0].qkv, Int8Linear)
        self._layers = (LayerArguments * len(layers))(*map(_layer_arguments, layers, caches))
        self._workspace: _Workspace | None = None
        self._bytes: list[QuantisedRows] = []
        self._arguments = self._fixed_arguments()

    @staticmethod
    def supports(
        native: NativeKernels, layers: Sequence[LayerWeights], caches: Sequence[Caches]
    ) -> bool:
        """Whether all matrices are native, of one kind, and the caches are what C expects."""
        kinds = {type(matrix) for layer in layers for matrix in layer.matrices}
        head_dim = head_dim_of(caches[0][0])
        alike = {(c.shape, c.stride(), c.dtype) for pair in caches for c in pair}
        return (
            kinds in ({NativeLinear}, {Int8Linear})
            and len(alike) == 1
            and head_dim % 2 == 0
            and head_dim <= MAX_HEAD_DIM
            and takes_caches(native, layers[0].input_norm, *caches[0])
        )

    def __call__(
        self,
        residual: torch.Tensor,
        cos_sin: torch.Tensor,
        slot_mapping: torch.Tensor,
        indices: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        """Final hidden states, normalised, from embeddings: (num_tokens, hidden_size).

        residual:     (num_tokens, hidden_size), contiguous; overwritten
        cos_sin:      (num_tokens, rotary_dim) float32 - see ``apply_rope``
        slot_mapping: (num_tokens) int64 - see ``rope_write_kv``
        indices:      (cu_seqlens_q, seqlens_k, block_table) int32 - see ``varlen_paged_attention``

        Raises ValueError for a slot or block outside the cache.
        """
        num_tokens = residual.shape[0]
        cu_seqlens_q, seqlens_k, block_table = indices
        self._check(residual, cos_sin, slot_mapping, indices)
        normed = self._room(num_tokens)
        a = self._arguments
        a.residual, a.cos_sin = residual.data_ptr(), cos_sin.data_ptr()
        a.slots, a.cu_seqlens_q = slot_mapping.data_ptr(), cu_seqlens_q.data_ptr()
        a.seqlens_k, a.block_table = seqlens_k.data_ptr(), block_table.data_ptr()
        a.num_tokens, a.num_seqs = num_tokens, seqlens_k.shape[0]
        a.table_row, a.table_width = block_table.stride(0), block_table.shape[1]
        a.rotary_dim, a.num_threads = cos_sin.shape[1], torch.get_num_threads()
        self._native.run("decoder", a)
        return normed[:num_tokens]

    def _check(
        self,
        residual: torch.Tensor,
        cos_sin: torch.Tensor,
        slot_mapping: torch.Tensor,
        indices: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    ) -> None:
        assert residual.dtype == self._kept[1].dtype and residual.is_contiguous(), "embeddings"
        assert residual.shape[1] == self._kept[1].shape[0], "embeddings of the model's size"
        assert cos_sin.dtype == torch.float32 and cos_sin.is_contiguous(), "a table's rows"
        assert slot_mapping.dtype == torch.int64 and slot_mapping.is_contiguous(), "int64 slots"
        assert slot_mapping.shape[0] == cos_sin.shape[0] == residual.shape[0], "one for a row"
        for index in indices:
            assert index.dtype == torch.int32 and index.is_contiguous(), "int32 indices"
        assert int(indices[0][-1]) == residual.shape[0], "every token has a sequence"

    def _room(self, rows: int) -> torch.Tensor:
        """Makes room for rows where there is too little; returns where the result will be."""
        if self._workspace is None or self._workspace.rows < rows:
            norm = self._kept[1]
            room = max(rows, MIN_ROWS)
            self._workspace = _Workspace(self._shape, norm.shape[0], room, norm.dtype)
            names = ("normed", "qkv", "mixed", "moved", "gate_up", "activated")
            for name, tensor in zip(names, self._workspace.tensors, strict=True):
                setattr(self._arguments, name, tensor.data_ptr())
            self._bytes = self._workspace.quantised() if self._int8 else []
            for name, quantised in zip(("normed", "mixed", "activated"), self._bytes, strict=False):
                setattr(self._arguments, f"{name}_values", quantised.values.data_ptr())
                setattr(self._arguments, f"{name}_scales", quantised.scales.data_ptr())
        return self._workspace.normed

    def _fixed_arguments(self) -> DecoderArguments:
        layers, final_norm, caches = self._kept
        keys, shape = caches[0][0], self._shape
        arguments = DecoderArguments()
        arguments.layers = ctypes.addressof(self._layers)
        arguments.final_norm = final_norm.data_ptr()
        arguments.num_layers = len(layers)
        arguments.hidden_size = final_norm.shape[0]
        arguments.intermediate_size = shape.intermediate_size
        arguments.num_heads, arguments.num_kv_heads = shape.num_heads, shape.num_kv_heads
        arguments.head_dim = shape.head_dim
        arguments.k_block, arguments.k_slot, arguments.k_head = keys.stride()[:3]
        arguments.v_block, arguments.v_slot, arguments.v_head = keys.stride()[:3]
        arguments.num_blocks, arguments.block_size = keys.shape[:2]
        arguments.is_bf16 = final_norm.dtype == torch.bfloat16
        arguments.kv_bytes = kind_of(keys)
        arguments.epsilon, arguments.scale = shape.epsilon, shape.scale
        return arguments


def _layer_arguments(layer: LayerWeights, caches: Caches) -> LayerArguments:
    norms = (layer.input_norm.data_ptr(), layer.feed_forward_norm.data_ptr())
    keys, values = caches
    return LayerArguments(
        *norms, keys.data_ptr(), values.data_ptr(), *map(_matrix_arguments, layer.matrices)
    )


def _matrix_arguments(matrix: Matrix) -> MatrixArguments:
    assert isinstance(matrix, NativeLinear | Int8Linear), "a native matrix"
    start, scales = None, None
    if isinstance(matrix, Int8Linear):
        start, scales = matrix.start.data_ptr(), matrix.scales.data_ptr()
    panels = matrix.panels.data_ptr()
    return MatrixArguments(panels, start, scales, matrix.in_features, matrix.out_features)
