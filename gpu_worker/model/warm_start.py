"""A decoder's weights out of the cache of prepared ones, or into it.

Invariants: what comes out of the cache is what was made for it, bit for bit; only weights that the
native code reads are kept, as other layouts are not ours; a cache that cannot be used costs a
notice and no more.

Device: allocates the weights; reads and writes files through ``prepared``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

import gpu_worker.model.loader
import gpu_worker.model.prepared
import gpu_worker.model.smoothing
import kernels.linear
import kernels.linear_int8
import kernels.quantise
import services.models.gguf_file
import services.models.hf_dir
from gpu_worker.model.llama import LlamaWeights
from gpu_worker.model.loader import logits_dtype
from gpu_worker.model.prepared import DamagedFileError, PreparedWeights, key_of
from kernels.decoder import LayerWeights, Matrix
from kernels.huge_pages import return_freed_memory
from kernels.linear import NativeLinear
from kernels.linear_int8 import Int8Linear, Int8Parts
from kernels.native import NativeKernels
from services.models.config import ModelConfig

MAKERS = (
    gpu_worker.model.loader,
    gpu_worker.model.prepared,
    gpu_worker.model.smoothing,
    kernels.linear,
    kernels.linear_int8,
    kernels.quantise,
    services.models.gguf_file,
    services.models.hf_dir,
)
"""Modules that have a say in what prepared weights are."""


@dataclass(frozen=True, slots=True)
class Precision:
    """What weights are prepared for: dtype of the model, "none" or "int8", and whether native
    products are taken even where others are faster.
    """

    dtype: torch.dtype
    quantization: str
    invariant: bool


MATRICES = ("qkv", "attention_output", "gate_up", "down")
NORMS = ("input_norm", "feed_forward_norm")


class WarmStart:
    """Prepared weights of one model, for one library and precision."""

    def __init__(
        self,
        directory: Path,
        model: Path,
        config: ModelConfig,
        native: NativeKernels,
        precision: Precision,
    ) -> None:
        makers = [Path(__file__), *(Path(str(module.__file__)) for module in MAKERS)]
        self._files = PreparedWeights(directory)
        self._key = key_of(model, makers, native.isa, precision)
        self._config = config
        self._native = native
        self._precision = precision

    def weights(self, prepare: Callable[[], LlamaWeights]) -> tuple[LlamaWeights, tuple[str, ...]]:
        """What was kept, else what `prepare` makes, which is then kept; and notices.

        What was made is read back, so that the first start has the memory of all others: in large
        pages, and with nothing left over from the making.
        """
        notices: list[str] = []
        found = self._read(notices)
        if found is not None:
            return found, ()
        made = prepare()
        if not self._write(made, notices):
            return made, tuple(notices)
        del made
        return_freed_memory()
        found = self._read(notices)
        return prepare() if found is None else found, tuple(notices)

    def _read(self, notices: list[str]) -> LlamaWeights | None:
        try:
            kept = self._files.load(self._key)
        except (DamagedFileError, OSError) as error:
            notices.append(f"prepared weights are not used, they are made anew: {error}")
            return None
        return None if kept is None else self._restore(kept)

    def _write(self, made: LlamaWeights, notices: list[str]) -> bool:
        tensors = dict(_tensors_of(made))
        try:
            return bool(tensors) and self._files.save(self._key, tensors)
        except (DamagedFileError, OSError) as error:
            notices.append(f"prepared weights are not kept: {error}")
            return False

    def _restore(self, kept: dict[str, torch.Tensor]) -> LlamaWeights:
        config = self._config
        hidden, dtype = config.hidden_size, self._precision.dtype
        queries = config.num_heads * config.head_dim
        qkv = queries + 2 * config.num_kv_heads * config.head_dim
        inner = config.intermediate_size

        def layer(name: str) -> LayerWeights:
            return LayerWeights(
                input_norm=kept[f"{name}.input_norm"],
                qkv=self._matrix(kept, f"{name}.qkv", (qkv, hidden), dtype),
                attention_output=self._matrix(
                    kept, f"{name}.attention_output", (hidden, queries), dtype
                ),
                feed_forward_norm=kept[f"{name}.feed_forward_norm"],
                gate_up=self._matrix(kept, f"{name}.gate_up", (2 * inner, hidden), dtype),
                down=self._matrix(kept, f"{name}.down", (hidden, inner), dtype),
            )

        layers = tuple(layer(str(index)) for index in range(config.num_layers))
        vocabulary = (config.vocab_size, hidden)
        logits = logits_dtype(dtype, self._precision.quantization)
        head = self._matrix(kept, "head", vocabulary, logits)
        return LlamaWeights(kept["embedding"], layers, kept["final_norm"], head)

    def _matrix(
        self,
        kept: dict[str, torch.Tensor],
        name: str,
        shape: tuple[int, int],
        dtype: torch.dtype,
    ) -> Matrix:
        if self._precision.quantization == "int8":
            parts = Int8Parts(*(kept[f"{name}.{part}"] for part in Int8Parts._fields))
            return Int8Linear.of_parts(parts, shape, dtype, self._native)
        return NativeLinear(self._native, kept[f"{name}.panels"], shape)


def _tensors_of(weights: LlamaWeights) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor by name; none where a matrix is in a layout that is not ours."""
    matrices = {"head": weights.head}
    for index, layer in enumerate(weights.layers):
        matrices |= {f"{index}.{name}": getattr(layer, name) for name in MATRICES}
    if not all(isinstance(matrix, NativeLinear | Int8Linear) for matrix in matrices.values()):
        return
    yield "embedding", weights.embedding
    yield "final_norm", weights.final_norm
    for index, layer in enumerate(weights.layers):
        for name in NORMS:
            yield f"{index}.{name}", getattr(layer, name)
    for name, matrix in matrices.items():
        if isinstance(matrix, Int8Linear):
            for part, tensor in matrix.parts._asdict().items():
                yield f"{name}.{part}", tensor
        elif isinstance(matrix, NativeLinear):
            yield f"{name}.panels", matrix.panels
