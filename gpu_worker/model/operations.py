"""What a decoder does between its linears, and how it multiplies and samples, as one table that is
chosen once: native C or torch on the CPU, Triton on a GPU.

Invariant: all tables have one meaning; the reference of each operation is in ``kernels``.

Device: runs kernels.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch

from gpu_worker.inputs import Float32s, SamplingBatch
from kernels.attention import BatchLayout, plan_attention, varlen_paged_attention
from kernels.decoder import Caches, Matrix
from kernels.embedding import embed
from kernels.greedy import greedy_tokens
from kernels.kv_bytes import is_byte_cache
from kernels.linear import make_linear
from kernels.linear_fp8 import Fp8Linear
from kernels.linear_int8 import Int8Linear
from kernels.logprobs import token_logprobs
from kernels.native import NativeKernels
from kernels.penalties import apply_penalties
from kernels.quantise import QuantisedRows
from kernels.rms_norm import fused_add_rms_norm, rms_norm
from kernels.rope_write_kv import rope_write_kv
from kernels.sampling import MIN_TEMPERATURE, sample_tokens
from kernels.silu_mul import silu_mul
from kernels.uniform import uniform


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

    @property
    def indices(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.cu_seqlens_q, self.seqlens_k, self.block_table

    def with_input_ids(self, input_ids: torch.Tensor) -> PackedBatch:
        return dataclasses.replace(self, input_ids=input_ids)


class Draws(NamedTuple):
    """How each sampled row is drawn: (S) each, as in ``gpu_worker.inputs.SamplingBatch``.

    uniforms: float32 in (0, 1); where no row has a temperature they are not looked at
    """

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    uniforms: torch.Tensor
    min_p: torch.Tensor


class Operations(Protocol):
    """Shapes and meanings are those of the functions of the same names in ``kernels``.

    into:        where given, the result is written there again, quantised
    can_capture: whether a step reads nothing back from the device, and so can be a graph
    """

    @property
    def can_capture(self) -> bool: ...

    def linear(self, weight: torch.Tensor, dtype: torch.dtype) -> Matrix:
        """x -> x @ weight.T in dtype, packed as the table likes it; weight is on its device, in
        that dtype or, to be rounded once, in float32.
        """

    def embed(self, table: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor: ...

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, epsilon: float, into: QuantisedRows | None
    ) -> torch.Tensor: ...

    def add_rms_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        epsilon: float,
        into: QuantisedRows | None,
    ) -> tuple[torch.Tensor, torch.Tensor]: ...

    def silu_mul(self, gate_up: torch.Tensor, into: QuantisedRows | None) -> torch.Tensor: ...

    def rope_write_kv(
        self,
        heads: torch.Tensor,
        cos_sin: torch.Tensor,
        caches: Caches,
        slot_mapping: torch.Tensor,
    ) -> torch.Tensor: ...

    def plan(self, batch: PackedBatch, keys: torch.Tensor) -> BatchLayout | None:
        """What all layers of a step share; keys: of any layer."""

    def attention(
        self,
        q: torch.Tensor,
        caches: Caches,
        batch: PackedBatch,
        layout: BatchLayout | None,
        into: QuantisedRows | None,
    ) -> torch.Tensor:
        """Causal self-attention: (num_tokens, num_heads, head_dim)."""

    def penalise(self, logits: torch.Tensor, *entries: torch.Tensor) -> None:
        """Lower the logits of tokens that are there already, in place; entries: see
        ``gpu_worker.inputs.PenaltyBatch``.
        """

    def sample(self, logits: torch.Tensor, draws: Draws) -> tuple[torch.Tensor, torch.Tensor]:
        """(S) int64 tokens, 0 where a logit is NaN or infinite, and (S) bool, whether none is."""

    def logprobs(
        self, logits: torch.Tensor, targets: torch.Tensor, num_top: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]: ...


def draw_uniforms(sampling: SamplingBatch) -> Float32s:
    """One number for each row, zeros where no row is drawn: (S) float32."""
    if not sampling.temperature.any():
        return np.zeros(sampling.temperature.shape, dtype=np.float32)
    return uniform(sampling.seed, sampling.position.astype(np.uint64))


class HostOperations:
    """Native C where the library is given and takes the tensors, else the torch reference, which
    runs on any device.

    quantization: "none"; "int8": products in 8 bits; "fp8": their reference, in floats
    invariant:    see ``make_linear``
    """

    can_capture = False

    def __init__(
        self,
        native: NativeKernels | None = None,
        quantization: str = "none",
        invariant: bool = False,
    ) -> None:
        self._native = native
        self._quantization = quantization
        self._invariant = invariant

    def linear(self, weight: torch.Tensor, dtype: torch.dtype) -> Matrix:
        if self._quantization == "int8":
            return Int8Linear(weight, self._native, dtype)
        if self._quantization == "fp8":
            return Fp8Linear(weight)
        return make_linear(weight.to(dtype), self._native, self._invariant)

    def embed(self, table: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        return embed(table, token_ids)

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, epsilon: float, into: QuantisedRows | None
    ) -> torch.Tensor:
        return rms_norm(x, weight, epsilon, self._native, into)

    def add_rms_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        epsilon: float,
        into: QuantisedRows | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return fused_add_rms_norm(x, residual, weight, epsilon, self._native, into)

    def silu_mul(self, gate_up: torch.Tensor, into: QuantisedRows | None) -> torch.Tensor:
        return silu_mul(gate_up, self._native, into)

    def rope_write_kv(
        self,
        heads: torch.Tensor,
        cos_sin: torch.Tensor,
        caches: Caches,
        slot_mapping: torch.Tensor,
    ) -> torch.Tensor:
        return rope_write_kv(heads, cos_sin, *caches, slot_mapping, self._native)

    def plan(self, batch: PackedBatch, keys: torch.Tensor) -> BatchLayout | None:
        if self._native is not None or is_byte_cache(keys):
            return None
        return plan_attention(batch.cu_seqlens_q, batch.seqlens_k, batch.block_table, keys)

    def attention(
        self,
        q: torch.Tensor,
        caches: Caches,
        batch: PackedBatch,
        layout: BatchLayout | None,
        into: QuantisedRows | None,
    ) -> torch.Tensor:
        backend = "auto" if q.is_cpu else "torch"
        return varlen_paged_attention(
            q,
            *caches,
            *batch.indices,
            max_seqlen_q=batch.max_seqlen_q,
            max_seqlen_k=batch.max_seqlen_k,
            scale=q.shape[-1] ** -0.5,
            num_decodes=batch.num_decodes,
            layout=layout,
            backend=backend,
            native=self._native,
            into=into,
        )

    def penalise(self, logits: torch.Tensor, *entries: torch.Tensor) -> None:
        apply_penalties(logits, *entries)

    def sample(self, logits: torch.Tensor, draws: Draws) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, finite = greedy_tokens(logits, self._native)
        drawn = torch.nonzero(draws.temperature).squeeze(1)
        if len(drawn):
            sound = finite[drawn]
            chosen = torch.where(sound.unsqueeze(1), logits[drawn].float(), 0.0)
            picked = sample_tokens(chosen, *(column[drawn] for column in draws))
            tokens[drawn] = torch.where(sound, picked, 0)
        return tokens, finite

    def logprobs(
        self, logits: torch.Tensor, targets: torch.Tensor, num_top: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return token_logprobs(logits, targets, num_top)


class TritonOperations:
    """Triton kernels and torch's products. Nothing is read back from the device, so that a step can
    be captured.

    quantization: "none", or "fp8"
    invariant: products with fixed tiles in place of torch's, and one attention kernel for every
               row, so that a token computed again in a chunk gives what it gave as a decode; all
               else is invariant by itself
    """

    can_capture = True

    def __init__(self, quantization: str = "none", invariant: bool = False) -> None:
        # Imported here: triton is there only where a GPU is, or the tests are.
        from kernels.gpu import (
            embedding,
            linear,
            logprobs,
            penalties,
            quantise_fp8,
            rms_norm,
            rope_write_kv,
            sampling,
            silu_mul,
        )

        self._is_fp8 = quantization == "fp8"
        self._quantise = quantise_fp8.quantise_rows_triton
        self._invariant = invariant
        self._fixed = linear.TritonLinear if invariant else None
        self._norm = rms_norm.rms_norm_triton
        self._embed = embedding.embed_triton
        self._logprobs = logprobs.token_logprobs_triton
        self._penalise = penalties.apply_penalties_triton
        self._rope = rope_write_kv.rope_write_kv_triton
        self._sample = sampling.sample_tokens_triton
        self._silu = silu_mul.silu_mul_triton

    def linear(self, weight: torch.Tensor, dtype: torch.dtype) -> Matrix:
        weight = weight.to(dtype)
        if self._is_fp8:
            matrix = Fp8Linear(weight)
            return lambda x: matrix(self._quantise(x))
        return make_linear(weight) if self._fixed is None else self._fixed(weight)

    def embed(self, table: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        return self._embed(table, token_ids)

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, epsilon: float, into: QuantisedRows | None
    ) -> torch.Tensor:
        assert into is None, "rows in bytes are the CPU's"
        return self._norm(x, None, weight, epsilon)[0]

    def add_rms_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        epsilon: float,
        into: QuantisedRows | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert into is None, "rows in bytes are the CPU's"
        return self._norm(x, residual, weight, epsilon)

    def silu_mul(self, gate_up: torch.Tensor, into: QuantisedRows | None) -> torch.Tensor:
        assert into is None, "rows in bytes are the CPU's"
        return self._silu(gate_up)

    def rope_write_kv(
        self,
        heads: torch.Tensor,
        cos_sin: torch.Tensor,
        caches: Caches,
        slot_mapping: torch.Tensor,
    ) -> torch.Tensor:
        return self._rope(heads, cos_sin, *caches, slot_mapping)

    def plan(self, batch: PackedBatch, keys: torch.Tensor) -> BatchLayout | None:
        return None

    def attention(
        self,
        q: torch.Tensor,
        caches: Caches,
        batch: PackedBatch,
        layout: BatchLayout | None,
        into: QuantisedRows | None,
    ) -> torch.Tensor:
        assert into is None, "rows in bytes are the CPU's"
        # Every row is a sequence's, so none needs to be zero beforehand.
        return varlen_paged_attention(
            q,
            *caches,
            *batch.indices,
            max_seqlen_q=batch.max_seqlen_q,
            max_seqlen_k=batch.max_seqlen_k,
            scale=q.shape[-1] ** -0.5,
            num_decodes=0 if self._invariant else batch.num_decodes,
            backend="triton",
            out=torch.empty(q.shape, dtype=q.dtype, device=q.device),
        )

    def penalise(self, logits: torch.Tensor, *entries: torch.Tensor) -> None:
        self._penalise(logits, *entries)

    def sample(self, logits: torch.Tensor, draws: Draws) -> tuple[torch.Tensor, torch.Tensor]:
        finite = torch.isfinite(logits).all(dim=-1)
        tokens = self._sample(logits, *draws, MIN_TEMPERATURE)
        return torch.where(finite, tokens, 0), finite

    def logprobs(
        self, logits: torch.Tensor, targets: torch.Tensor, num_top: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self._logprobs(logits, targets, num_top)
