"""From a model path to a decoder's weights in memory.

Invariants: every weight has the shape that the config promises and holds finite numbers only, else
ModelFileError; one weight at a time is held in float32 beside the finished ones.

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
from kernels.decoder import LayerWeights
from kernels.linear_int8 import fits_int8
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
    config = source.config
    sizes = (config.hidden_size, config.num_heads * config.head_dim, config.intermediate_size)
    if quantization == "int8" and not all(map(fits_int8, sizes)):
        raise ValueError(f"quantization int8 does not take products over {sizes} features")
    return _Loader(source, dtype, operations, device).load(progress)


class _Loader:
    def __init__(
        self,
        source: WeightSource,
        dtype: torch.dtype,
        operations: Operations,
        device: torch.device,
    ) -> None:
        self._linear = operations.linear
        self._device = device
        self._source = source
        self._config = source.config
        self._dtype = dtype

    def load(self, progress: Progress) -> LlamaWeights:
        config = self._config
        progress(0.0, "loading the embedding")
        vocabulary = (config.vocab_size, config.hidden_size)
        embedding = self._weight("model.embed_tokens.weight", vocabulary)
        layers = []
        for index in range(config.num_layers):
            progress((index + 1) / (config.num_layers + 2), f"loading layer {index + 1}")
            layers.append(self._layer(f"model.layers.{index}."))
        progress((config.num_layers + 1) / (config.num_layers + 2), "loading the output head")
        tied = config.tie_word_embeddings
        head = embedding if tied else self._weight("lm_head.weight", vocabulary)
        final_norm = self._weight("model.norm.weight", (config.hidden_size,))
        weights = LlamaWeights(embedding, tuple(layers), final_norm, self._linear(head))
        progress(1.0, "weights loaded")
        return weights

    def _layer(self, prefix: str) -> LayerWeights:
        config = self._config
        hidden, intermediate = config.hidden_size, config.intermediate_size
        queries = config.num_heads * config.head_dim
        keys = config.num_kv_heads * config.head_dim

        def weight(name: str, *shape: int) -> torch.Tensor:
            return self._weight(f"{prefix}{name}.weight", shape)

        q = weight("self_attn.q_proj", queries, hidden)
        k = weight("self_attn.k_proj", keys, hidden)
        v = weight("self_attn.v_proj", keys, hidden)
        gate = weight("mlp.gate_proj", intermediate, hidden)
        up = weight("mlp.up_proj", intermediate, hidden)
        return LayerWeights(
            input_norm=weight("input_layernorm", hidden),
            qkv=self._linear(torch.cat((q, k, v))),
            attention_output=self._linear(weight("self_attn.o_proj", hidden, queries)),
            feed_forward_norm=weight("post_attention_layernorm", hidden),
            gate_up=self._linear(torch.cat((gate, up))),
            down=self._linear(weight("mlp.down_proj", hidden, intermediate)),
        )

    def _weight(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        values = self._source.tensor(name)
        if tuple(values.shape) != shape:
            raise ModelFileError(
                self._source.path, f"tensor {name!r} has shape {values.shape}, needs {shape}"
            )
        weight = torch.as_tensor(values, device=self._device)
        # The sum of finite float32 weights is finite; one NaN or infinity spoils it.
        if not bool(torch.isfinite(weight.sum(dtype=torch.float64))):
            raise ModelFileError(self._source.path, f"tensor {name!r} holds NaN or infinity")
        return weight.to(self._dtype)
