"""One model and its KV cache: runs the steps it is given, and knows nothing of who asks.

Invariants: a step writes only the slots it names; its result depends on its inputs and on the cache
alone; the runner is driven by one thread at a time.

Device: loads weights, runs the model, writes the KV cache.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from gpu_worker.host_pool import HostPool
from gpu_worker.inputs import (
    PromptLogprobRequest,
    SamplingBatch,
    StepInputs,
    StepOutputs,
    TokenLogprobs,
)
from gpu_worker.kv_cache import KVCache
from gpu_worker.mirror import CopyLists
from gpu_worker.model.llama import LlamaModel, PackedBatch
from gpu_worker.model.loader import Progress, load_weights
from gpu_worker.sampler import sample, score_targets
from kernels.kv_bytes import FP8_CACHE, INT8_CACHE
from kernels.native import NativeKernels, NativeUnavailable, load_native
from services.models.config import ModelConfig
from services.models.source import open_model

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

QUANTIZATIONS = ("none", "int8")
"""int8: linears multiply bytes by bytes, with a scale for each row and for each output feature."""

KV_CACHE_DTYPES = {"auto": None, "int8": INT8_CACHE, "fp8": FP8_CACHE}
"""auto: that of the model; the others: bytes with a scale for each head of each token."""

MAX_PROMPT_LOGPROB_ROWS = 128
"""Logits held at once when scoring prompts: 25 MB of float32 with a vocabulary of 49,152."""

WARM_UP_TOKENS = 64


def default_dtype() -> str:
    """bfloat16 where the processor multiplies it natively, else float32."""
    # torch has no public name for these probes; a version without them says float32.
    probes = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    for name in probes:
        probe = getattr(torch.cpu, name, None)
        if probe is not None and probe():
            return "bfloat16"
    return "float32"


def resolve_dtype(name: str) -> torch.dtype:
    """The torch dtype of a setting's name; raises ValueError naming the known ones."""
    if name not in DTYPES:
        raise ValueError(f"dtype {name!r} is not one of {', '.join(DTYPES)}")
    return DTYPES[name]


class ModelRunner:
    """Executes steps on one model.

    model_path:    a GGUF file or a Hugging Face directory
    dtype:         a name of DTYPES
    num_blocks:    blocks in the pool, the null block included
    block_size:    slots in a block
    max_model_len: positions allowed; None means as many as the model was made for
    progress:      called with (fraction, text) while weights load
    num_threads:   threads inside one operation; None leaves torch's choice
    native:        "auto" builds and loads the native kernels where a compiler is found, "off" runs
                   the torch reference, any other name is an instruction set that must be there
    native_cache:  directory of built native kernels; None is one in the user's cache
    quantization:  one of QUANTIZATIONS
    kv_cache_dtype: one of KV_CACHE_DTYPES
    batch_invariant: run only what gives a row the same bits in any batch; ValueError where this
                   machine has no such code for the dtype

    Raises ModelFileError for the file, ValueError for a setting that does not fit the model or the
    processor. ``notices`` holds what the caller should log: why there are no native kernels.
    """

    def __init__(  # noqa: PLR0913 - the settings of one process, each by name
        self,
        model_path: Path,
        dtype: str,
        *,
        num_blocks: int,
        block_size: int,
        max_model_len: int | None,
        progress: Progress,
        num_threads: int | None = None,
        host_blocks: int = 0,
        native: str = "auto",
        native_cache: Path | None = None,
        quantization: str = "none",
        kv_cache_dtype: str = "auto",
        batch_invariant: bool = False,
    ) -> None:
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        if num_blocks < 2 or block_size < 1:
            raise ValueError(f"{num_blocks} blocks of {block_size} slots hold no sequence")
        source = open_model(model_path)
        config = source.config
        limit = config.max_position_embeddings
        self.max_model_len = limit if max_model_len is None else max_model_len
        if not 1 <= self.max_model_len <= limit:
            raise ValueError(f"max_model_len {max_model_len} is not in 1 to {limit}, the model's")
        self.dtype = resolve_dtype(dtype)
        if quantization not in QUANTIZATIONS:
            raise ValueError(f"quantization {quantization!r} is not one of {QUANTIZATIONS}")
        known = ", ".join(KV_CACHE_DTYPES)
        if kv_cache_dtype not in KV_CACHE_DTYPES:
            raise ValueError(f"kv_cache_dtype {kv_cache_dtype!r} is not one of {known}")
        kv_dtype = KV_CACHE_DTYPES[kv_cache_dtype] or self.dtype
        progress(0.0, "preparing native kernels")
        self._native, self.notices = _load_native(native, native_cache)
        with torch.inference_mode():
            weights = load_weights(
                source, self.dtype, progress, self._native, quantization, batch_invariant
            )
            self._model = LlamaModel(config, weights, self.max_model_len, self._native)
            self._cache = KVCache(config, num_blocks, block_size, kv_dtype)
            self._model.attach(self._cache)
            if batch_invariant and not self._model.is_native:
                why = "; ".join(self.notices) or f"{dtype} has no native products here"
                raise ValueError(f"batch_invariant is not possible: {why}")
            self._host = HostPool(self._cache.tensors, host_blocks)
        self.copy_block_us = 0

    @property
    def config(self) -> ModelConfig:
        """The model's own numbers."""
        return self._model.config

    @property
    def instruction_set(self) -> str:
        """Of the native kernels; empty where the torch reference runs."""
        return "" if self._native is None else self._native.isa

    @property
    def native(self) -> NativeKernels | None:
        """The native kernels, for measuring them one by one."""
        return self._native

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool, the null block included."""
        return self._cache.num_blocks

    @property
    def block_size(self) -> int:
        """Slots in a block."""
        return self._cache.block_size

    @torch.inference_mode()
    def execute(self, inputs: StepInputs) -> StepOutputs:
        """Run one step; an empty step gives empty results."""
        num_tokens = inputs.input_ids.shape[0]
        if num_tokens == 0:
            assert inputs.logits_rows.shape[0] == 0, "an empty step has no rows to sample"
            nothing = np.zeros(0, dtype=np.int32)
            return StepOutputs(nothing, nothing.astype(np.bool_), [], [])
        assert int(inputs.positions.max()) < self.max_model_len, "a position past max_model_len"
        hidden = self._model.forward(_packed(inputs), self._cache)
        rows = torch.from_numpy(inputs.logits_rows)
        logits = self._model.logits(hidden.index_select(0, rows))
        token_ids, finite, logprobs = sample(logits, inputs.sampling, self._native)
        prompt_logprobs = [self._score(hidden, request) for request in inputs.prompt_logprobs]
        return StepOutputs(token_ids, finite, logprobs, prompt_logprobs)

    @torch.inference_mode()
    def copy_blocks(self, copies: CopyLists) -> None:
        """Copies between the cache and host memory, outs before ins."""
        self._host.copy_out(torch.from_numpy(copies.out_blocks), torch.from_numpy(copies.out_slots))
        self._host.copy_in(torch.from_numpy(copies.in_slots), torch.from_numpy(copies.in_blocks))

    def warm_up(self) -> None:
        """Run a prompt and a decode that write nothing, so that no request pays for first calls."""
        with torch.inference_mode():
            self.copy_block_us = self._host.measure_us()
        for num_tokens in (WARM_UP_TOKENS, 1):
            self.execute(_blank_step(min(num_tokens, self.max_model_len)))

    def _score(
        self, hidden: torch.Tensor, request: PromptLogprobRequest
    ) -> list[TokenLogprobs | None]:
        scored: list[TokenLogprobs | None] = []
        for first in range(0, request.num_rows, MAX_PROMPT_LOGPROB_ROWS):
            rows = min(MAX_PROMPT_LOGPROB_ROWS, request.num_rows - first)
            start = request.first_row + first
            logits = self._model.logits(hidden[start : start + rows])
            scored.extend(score_targets(logits, request, first))
        return scored


def _load_native(native: str, cache: Path | None) -> tuple[NativeKernels | None, tuple[str, ...]]:
    """The native kernels, if wanted and possible, and what the caller should be told."""
    if native == "off":
        return None, ()
    try:
        return load_native(cache, None if native == "auto" else native), ()
    except NativeUnavailable as error:
        return None, (f"native kernels are off, the slower torch kernels run: {error}",)


def _packed(inputs: StepInputs) -> PackedBatch:
    """The arrays as tensors over the same memory; nothing is copied."""
    seqlens_q = np.diff(inputs.cu_seqlens_q)
    assert int(inputs.cu_seqlens_q[-1]) == inputs.input_ids.shape[0], "every token has a sequence"
    return PackedBatch(
        input_ids=torch.from_numpy(inputs.input_ids),
        positions=torch.from_numpy(inputs.positions),
        slot_mapping=torch.from_numpy(inputs.slot_mapping),
        cu_seqlens_q=torch.from_numpy(inputs.cu_seqlens_q),
        seqlens_k=torch.from_numpy(inputs.seqlens_k),
        block_table=torch.from_numpy(inputs.block_table),
        max_seqlen_q=int(seqlens_q.max()),
        max_seqlen_k=int(inputs.seqlens_k.max()),
        num_decodes=inputs.num_decodes,
    )


def _blank_step(num_tokens: int) -> StepInputs:
    """Tokens that read the null block and write nowhere; the last row is sampled."""
    one = np.ones(1, dtype=np.int32)
    sampling = SamplingBatch(
        temperature=one.astype(np.float32),
        top_p=np.full(1, 0.9, dtype=np.float32),
        top_k=np.full(1, 50, dtype=np.int32),
        seed=one.astype(np.uint64),
        position=np.full(1, num_tokens, dtype=np.int64),
        num_logprobs=one - 2,
    )
    return StepInputs(
        input_ids=np.zeros(num_tokens, dtype=np.int32),
        positions=np.arange(num_tokens, dtype=np.int32),
        slot_mapping=np.full(num_tokens, -1, dtype=np.int64),
        cu_seqlens_q=np.array([0, num_tokens], dtype=np.int32),
        seqlens_k=np.full(1, num_tokens, dtype=np.int32),
        block_table=np.zeros((1, num_tokens), dtype=np.int32),
        num_decodes=int(num_tokens == 1),
        logits_rows=np.full(1, num_tokens - 1, dtype=np.int32),
        sampling=sampling,
    )
