"""One model and its KV cache: runs the steps it is given, and knows nothing of who asks.

Invariants: a step writes only the slots it names; its result depends on its inputs and on the cache
alone; the runner is driven by one thread at a time.

Device: loads weights, runs the model, writes the KV cache.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from gpu_worker.blank_steps import blank_decodes, blank_step, blank_step_with_all
from gpu_worker.device_steps import DeviceSteps, read_outputs
from gpu_worker.host_pool import HostPool
from gpu_worker.inputs import CopyLists, StepInputs, StepOutputs
from gpu_worker.kv_cache import KVCache
from gpu_worker.memory import raises_memory_error
from gpu_worker.model.llama import LlamaModel
from gpu_worker.model.loader import Progress, WeightSource, load_weights
from gpu_worker.model.operations import HostOperations, Operations, TritonOperations
from gpu_worker.model.warm_start import Precision, WarmStart
from gpu_worker.results import Fetch
from kernels.kv_bytes import FP8_CACHE, INT8_CACHE
from kernels.native import NativeKernels, NativeUnavailable, load_native
from services.models.config import ModelConfig
from services.models.source import open_model

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

QUANTIZATIONS = ("none", "int8", "fp8")
"""int8, on the CPU, and fp8, on a GPU: linears multiply bytes by bytes, with a scale for each row
and for each output feature.
"""

KV_CACHE_DTYPES = {"auto": None, "int8": INT8_CACHE, "fp8": FP8_CACHE}
"""auto: that of the model; the others: bytes with a scale for each head of each token."""

OPERATIONS = ("auto", "torch", "triton")
"""auto: Triton on a GPU, native code and torch on the CPU; torch: the reference, on any device;
triton: on the CPU too, for whom has its interpreter.
"""

WARM_UP_TOKENS = 64


def default_dtype(device: str = "cpu") -> str:
    """bfloat16 on a GPU, and where the processor multiplies it natively; else float32."""
    if resolve_device(device).type == "cuda":
        return "bfloat16"
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


def resolve_device(name: str) -> torch.device:
    """The device of a setting's name: "auto" is a GPU where torch has one, "cpu", "cuda" or
    "cuda:N". Raises ValueError for one that is not there.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto":
        name = "cuda" if count else "cpu"
    kind, _, index = name.partition(":")
    if kind not in ("cpu", "cuda") or (index and (kind == "cpu" or not index.isdecimal())):
        raise ValueError(f"device {name!r} is not auto, cpu, cuda or cuda:N")
    if kind == "cpu":
        return torch.device("cpu")
    if int(index or 0) >= count:
        raise ValueError(f"there is no device {name!r}: torch {torch.__version__} sees {count}")
    return torch.device("cuda", int(index or 0))


class Submitted(NamedTuple):
    """A step on its way; fetch is None where there was nothing to compute."""

    inputs: StepInputs
    fetch: Fetch | None


class ModelRunner:
    """Executes steps on one model.

    model:         a GGUF file or a Hugging Face directory, or weights that are there already
    dtype:         a name of DTYPES
    num_blocks:    blocks in the pool, the null block included
    block_size:    slots in a block
    max_model_len: positions allowed; None means as many as the model was made for
    progress:      called with (fraction, text) while weights load
    num_threads:   threads inside one operation; None leaves torch's choice
    native:        "auto" builds and loads the native kernels where a compiler is found, "off" runs
                   the torch reference, any other name is an instruction set that must be there
    native_cache:  directory of built native kernels; None is one in the user's cache
    weights_cache: directory of prepared weights, which make a second start fast; None keeps none
    quantization:  one of QUANTIZATIONS
    kv_cache_dtype: one of KV_CACHE_DTYPES
    batch_invariant: run only what gives a row the same bits in any batch; ValueError where this
                   machine has no such code for the dtype
    device:        see ``resolve_device``
    operations:    one of OPERATIONS
    max_num_seqs:  lanes; steps of up to so many decodes are captured where the device has graphs

    Raises ModelFileError for the file, ValueError for a setting that does not fit the model or the
    processor. ``notices`` holds what the caller should log: why there are no native kernels.
    """

    def __init__(  # noqa: PLR0913 - the settings of one process, each by name
        self,
        model: Path | WeightSource,
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
        weights_cache: Path | None = None,
        quantization: str = "none",
        kv_cache_dtype: str = "auto",
        batch_invariant: bool = False,
        device: str = "cpu",
        operations: str = "auto",
        max_num_seqs: int = 64,
    ) -> None:
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        if num_blocks < 2 or block_size < 1:
            raise ValueError(f"{num_blocks} blocks of {block_size} slots hold no sequence")
        source = open_model(model) if isinstance(model, Path) else model
        self.max_model_len = _check_length(max_model_len, source.config.max_position_embeddings)
        self.dtype = resolve_dtype(dtype)
        self.device = resolve_device(device)
        self.copy_block_us = 0
        _check_choice("quantization", quantization, QUANTIZATIONS)
        _check_choice("kv_cache_dtype", kv_cache_dtype, KV_CACHE_DTYPES)
        _check_choice("operations", operations, OPERATIONS)
        on_gpu = self.device.type == "cuda"
        uses_triton = operations == "triton" or (operations == "auto" and on_gpu)
        _check_quantization(quantization, uses_triton, batch_invariant)
        kv_dtype = KV_CACHE_DTYPES[kv_cache_dtype] or self.dtype
        progress(0.0, "preparing native kernels")
        wants_native = native if operations == "auto" and not on_gpu else "off"
        self._native, self.notices = _load_native(wants_native, native_cache)
        progress(0.0, "reading the weights")
        precision = Precision(self.dtype, quantization, batch_invariant)
        table = self._operations(precision, uses_triton)
        with _current(self.device), torch.inference_mode():
            prepare = functools.partial(
                load_weights,
                *(source, self.dtype, progress, table),
                device=self.device,
                quantization=quantization,
            )
            if weights_cache is None or self._native is None or not isinstance(model, Path):
                weights = prepare()
            else:
                kept = WarmStart(weights_cache, model, source.config, self._native, precision)
                weights, notices = kept.weights(prepare)
                self.notices = (*self.notices, *notices)
            self._model = LlamaModel(source.config, weights, self.max_model_len, table)
            self._cache = KVCache(source.config, num_blocks, block_size, kv_dtype, self.device)
            self._attach_native(precision, uses_triton)
            self._host = HostPool(self._cache.tensors, host_blocks)
            self._steps = DeviceSteps(
                self._model, self._cache, table, max_num_seqs, self.max_model_len
            )

    def _operations(self, precision: Precision, uses_triton: bool) -> Operations:
        if uses_triton:
            return TritonOperations(precision.quantization, precision.invariant)
        return HostOperations(self._native, precision.quantization, precision.invariant)

    def _attach_native(self, precision: Precision, uses_triton: bool) -> None:
        """Whole layers in C, where they are; ValueError where only they would be invariant."""
        if self._native is not None:
            self._model.attach(self._cache, self._native)
        if precision.invariant and not (uses_triton or self._model.is_native):
            name = str(precision.dtype).removeprefix("torch.")
            why = "; ".join(self.notices) or f"{name} has no native products here"
            raise ValueError(f"batch_invariant is not possible: {why}")

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

    @property
    def computes_ahead(self) -> bool:
        """Whether a step that is submitted runs while this thread goes on."""
        return self.device.type == "cuda"

    def execute(self, inputs: StepInputs) -> StepOutputs:
        """Run one step; an empty step gives empty results."""
        return self.collect(self.submit(inputs))

    @raises_memory_error
    def submit(self, inputs: StepInputs) -> Submitted:
        """Queue one step on the device, behind those queued before it; on the CPU, run it.

        At most two steps are in flight. A lane's next token may be the one that a step in flight
        samples: see ``StepInputs.input_lanes``.
        """
        if inputs.input_ids.shape[0] == 0:
            assert inputs.logits_rows.shape[0] == 0, "an empty step has no rows to sample"
            return Submitted(inputs, None)
        assert int(inputs.positions.max()) < self.max_model_len, "a position past max_model_len"
        with _current(self.device):
            return Submitted(inputs, self._steps.submit(inputs))

    def wait(self, submitted: Submitted) -> None:
        """Return once a step has ended; from any thread."""
        if submitted.fetch is not None:
            submitted.fetch.wait()

    @raises_memory_error
    def collect(self, submitted: Submitted) -> StepOutputs:
        """Wait for a step and read its results; steps are collected in order, once each."""
        inputs = submitted.inputs
        if submitted.fetch is None:
            nothing = np.zeros(0, dtype=np.int32)
            return StepOutputs(nothing, nothing.astype(np.bool_), [], [])
        return read_outputs(inputs, submitted.fetch.read())

    @raises_memory_error
    @torch.inference_mode()
    def copy_blocks(self, copies: CopyLists) -> None:
        """Copies between the cache and host memory, outs before ins."""
        outs = torch.from_numpy(copies.out_blocks), torch.from_numpy(copies.out_slots)
        with _current(self.device):
            self._host.copy_out(*outs)
            ins = torch.from_numpy(copies.in_slots), torch.from_numpy(copies.in_blocks)
            self._host.copy_in(*ins)

    def warm_up(self) -> None:
        """Run a prompt, a decode, and one with all that can be asked for, which write nothing, so
        that no request pays for first calls; then capture.
        """
        with torch.inference_mode():
            self.copy_block_us = self._host.measure_us()
        for num_tokens in (WARM_UP_TOKENS, 1):
            self.execute(blank_step(min(num_tokens, self.max_model_len)))
        self.execute(blank_step_with_all())
        self.capture()

    def capture(self) -> None:
        """Capture steps in which all decode, where the device has graphs; until then, and where it
        has none, they run operation by operation.
        """
        with _current(self.device):
            self._steps.capture(blank_decodes)


def _current(device: torch.device) -> AbstractContextManager[object]:
    """The device of this thread, while kernels are launched: torch keeps one for each thread."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _check_length(max_model_len: int | None, limit: int) -> int:
    """Positions allowed, of the `limit` that the model was made for."""
    length = limit if max_model_len is None else max_model_len
    if not 1 <= length <= limit:
        raise ValueError(f"max_model_len {max_model_len} is not in 1 to {limit}, the model's")
    return length


def _check_quantization(quantization: str, uses_triton: bool, batch_invariant: bool) -> None:
    if uses_triton and quantization == "int8":
        raise ValueError("quantization int8 is for the CPU; a GPU has fp8")
    if batch_invariant and quantization == "fp8":
        raise ValueError("batch_invariant is not possible with fp8: its products are the library's")


def _check_choice(name: str, value: str, choices: Iterable[str]) -> None:
    if value not in choices:
        raise ValueError(f"{name} {value!r} is not one of {', '.join(choices)}")


def _load_native(native: str, cache: Path | None) -> tuple[NativeKernels | None, tuple[str, ...]]:
    """The native kernels, if wanted and possible, and what the caller should be told."""
    if native == "off":
        return None, ()
    try:
        return load_native(cache, None if native == "auto" else native), ()
    except NativeUnavailable as error:
        return None, (f"native kernels are off, the slower torch kernels run: {error}",)
