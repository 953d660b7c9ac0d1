"""From a model path to a decoder's weights in memory.

Invariants: every weight has the shape that the config promises and holds finite numbers only, else
ModelFileError; one weight at a time, or, in 8 bits, one layer, is held in float32 beside the
finished ones.

Device: allocates the weights; reads files through the source.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from gpu_worker.model.llama import LlamaWeights
from gpu_worker.model.operations import Operations
from gpu_worker.model.smoothing import RawLayer, Smoother
from kernels.decoder import LayerWeights, Matrix
from services.models.config import ModelConfig
from services.models.errors import ModelFileError

Progress: TypeAlias = Callable[[float, str], None]
"""Called with a fraction in [0, 1] and what is being done."""


class WeightSource(Protocol):
    """Config and weights of one model, by the names of the original checkpoint: a file that
    ``services.models`` opened, or numbers made up on the device.
    """

    @property
    def path(self) -> Path: ...

    @property
    def config(self) -> ModelConfig: ...

    def tensor(self, name: str) -> npt.NDArray[np.float32] | torch.Tensor:
        """One weight as float32; raises ModelFileError if it is not there."""


def load_weights(
    source: WeightSource,
    dtype: torch.dtype,
    progress: Progress,
    operations: Operations,
    *,
    device: torch.device,
    quantization: str = "none",
) -> LlamaWeights:
    """Read, check, convert and pack all weights; raises ModelFileError.

    operations:   whose linears are made of the weights, the output head too
    device:       where the weights go, one at a time
    quantization: of those linears

    Raises ValueError where the model's sizes do not allow that quantization.
    """
    loader = _Loader(source, dtype, operations, device, is_int8=quantization == "int8")
    return loader.load(progress)


def logits_dtype(dtype: torch.dtype, quantization: str) -> torch.dtype:
    """In 8 bits float32: logits of 20 in bfloat16 are off by 0.03, which is a third of what 8 bits
    cost everywhere else.
    """
    return torch.float32 if quantization == "int8" else dtype


class _Loader:
    def __init__(
        self,
        source: WeightSource,
        dtype: torch.dtype,
        operations: Operations,
        device: torch.device,
        *,
        is_int8: bool,
    ) -> None:
        self._operations = operations
        self._is_int8 = is_int8
        self._device = device
        self._source = source
        self._config = source.config
        self._dtype = dtype

    def load(self, progress: Progress) -> LlamaWeights:
        config = self._config
        progress(0.0, "loading the embedding")
        vocabulary = (config.vocab_size, config.hidden_size)
        embedding = self._read("model.embed_tokens.weight", vocabulary).to(self._dtype)
        smoother = Smoother(config, embedding, self._dtype) if self._is_int8 else None
        layers = []
        for index in range(config.num_layers):
            progress((index + 1) / (config.num_layers + 2), f"loading layer {index + 1}")
            layers.append(self._layer(f"model.layers.{index}.", smoother))
        progress((config.num_layers + 1) / (config.num_layers + 2), "loading the output head")
        tied = config.tie_word_embeddings
        head = embedding if tied else self._read("lm_head.weight", vocabulary)
        final_norm = self._read("model.norm.weight", (config.hidden_size,))
        if smoother is not None:
            head = head.to(torch.float32, copy=tied)
            final_norm = smoother.head(final_norm, head)
        logits = logits_dtype(self._dtype, "int8" if self._is_int8 else "none")
        matrix = self._operations.linear(head, logits)
        weights = LlamaWeights(embedding, tuple(layers), final_norm.to(self._dtype), matrix)
        progress(1.0, "weights loaded")
        return weights

    def _layer(self, prefix: str, smoother: Smoother | None) -> LayerWeights:
        config = self._config
        hidden, intermediate = config.hidden_size, config.intermediate_size
        queries = config.num_heads * config.head_dim
        keys = config.num_kv_heads * config.head_dim

        def weight(name: str, *shape: int) -> torch.Tensor:
            read = self._read(f"{prefix}{name}.weight", shape)
            return read if smoother is not None else read.to(self._dtype)

        raw = RawLayer(
            input_norm=weight("input_layernorm", hidden),
            q=weight("self_attn.q_proj", queries, hidden),
            k=weight("self_attn.k_proj", keys, hidden),
            v=weight("self_attn.v_proj", keys, hidden),
            o=weight("self_attn.o_proj", hidden, queries),
            feed_forward_norm=weight("post_attention_layernorm", hidden),
            gate=weight("mlp.gate_proj", intermediate, hidden),
            up=weight("mlp.up_proj", intermediate, hidden),
            down=weight("mlp.down_proj", hidden, intermediate),
        )
        if smoother is not None:
            raw = smoother.layer(raw)
        return LayerWeights(
            input_norm=raw.input_norm.to(self._dtype),
            qkv=self._linear(torch.cat((raw.q, raw.k, raw.v))),
            attention_output=self._linear(raw.o),
            feed_forward_norm=raw.feed_forward_norm.to(self._dtype),
            gate_up=self._linear(torch.cat((raw.gate, raw.up))),
            down=self._linear(raw.down),
        )

    def _linear(self, weight: torch.Tensor) -> Matrix:
        return self._operations.linear(weight, self._dtype)

    def _read(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        values = self._source.tensor(name)
        if tuple(values.shape) != shape:
            raise ModelFileError(
                self._source.path, f"tensor {name!r} has shape {values.shape}, needs {shape}"
            )
        weight = torch.as_tensor(values, device=self._device)
        # The sum of finite float32 weights is finite; one NaN or infinity spoils it.
        if not bool(torch.isfinite(weight.sum(dtype=torch.float64))):
            raise ModelFileError(self._source.path, f"tensor {name!r} holds NaN or infinity")
        return weight
