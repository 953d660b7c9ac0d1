"""Times of the kernels and of whole steps, beside what the machine can do and what torch does.

Invariants: what is compared takes turns in one run; a time is a median, the first run of each left
out; data is larger than the caches where memory is what counts.

Device: runs kernels on random data, and steps of a loaded model.
"""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from gpu_worker.inputs import SamplingBatch, StepInputs
from gpu_worker.runner import ModelRunner
from kernels.attention import varlen_paged_attention
from kernels.embedding import embed
from kernels.greedy import greedy_tokens
from kernels.huge_pages import zeros_in_huge_pages
from kernels.kv_bytes import quantise_heads
from kernels.linear import NativeLinear, make_linear
from kernels.linear_int8 import Int8Linear
from kernels.logprobs import token_logprobs
from kernels.native import NativeKernels
from kernels.native.arguments import MultiplyRegistersArguments, ReadMemoryArguments
from kernels.penalties import apply_penalties
from kernels.quantise import quantise_rows
from kernels.rms_norm import fused_add_rms_norm
from kernels.rope import build_rope_table
from kernels.rope_write_kv import rope_write_kv
from kernels.sampling import sample_tokens
from kernels.silu_mul import silu_mul
from services.models.config import ModelConfig

Run = Callable[[], object]

PAIRS = 7
READ_BYTES = 256 << 20
"""Eight times a large last-level cache."""

PRODUCT_ROUNDS = 2_000_000
KINDS = {"float32": 0, "bfloat16": 1, "int8": 2}
"""What a product multiplies; the numbers of ``library.h``."""

LINEAR_ROWS = (1, 4, 16, 32, 512)
BANDWIDTH_ROWS = 4
"""Up to so many rows a linear waits for memory, beyond it for products."""

PENALISED = 300
"""Distinct tokens of a sequence with penalties."""

NUM_LAYERS = 16
"""Weights of so many layers take turns, so that no cache holds them."""


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What the machine reaches at best with these threads.

    read_gb_s: one pass over memory
    gflop_s:   products in registers by kind, a product and a sum counted as two
    """

    read_gb_s: float
    gflop_s: dict[str, float]


@dataclass(frozen=True, slots=True)
class Figure:
    """One operation on one case.

    share:      of the ceiling that holds it back
    torch_ms:   the same by torch, for linears packed by oneDNN; 0 where it was not run
    """

    operation: str
    case: str
    ms: float
    gb_s: float
    gflop_s: float
    share: float
    torch_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class Work:
    """What one run moves and computes; kind: of the products, empty where memory is the limit."""

    num_bytes: float
    num_flops: float
    kind: str = ""


def alternate(runs: Sequence[Run]) -> list[float]:
    """Median seconds of each; CPU time with one thread, which others disturb least."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    times: list[list[float]] = [[] for _ in runs]
    for turn in range(PAIRS + 1):
        for run, kept in zip(runs, times, strict=True):
            start = clock()
            run()
            if turn:
                kept.append(clock() - start)
    return [statistics.median(kept) for kept in times]


def measure_ceilings(native: NativeKernels) -> Ceilings:
    """By loops that do nothing else."""
    memory = zeros_in_huge_pages((READ_BYTES // 4,), torch.float32).fill_(1.0)
    total, products = ctypes.c_float(), ctypes.c_float()
    threads = torch.get_num_threads()
    reading = ReadMemoryArguments(
        memory.data_ptr(), ctypes.addressof(total), memory.nbytes, threads
    )
    seconds = alternate([lambda: native.run("read_memory", reading)])[0]
    rates = {}
    for name, kind in KINDS.items():
        if name == "bfloat16" and native.isa != "avx512bf16":
            continue
        multiplying = MultiplyRegistersArguments(
            ctypes.addressof(total), ctypes.addressof(products), kind, PRODUCT_ROUNDS, threads
        )

        def multiply(arguments: MultiplyRegistersArguments = multiplying) -> None:
            native.run("multiply_registers", arguments)

        spent = alternate([multiply])[0]
        rates[name] = 2.0 * products.value / spent / 1e9
    return Ceilings(READ_BYTES / seconds / 1e9, rates)


class KernelBench:
    """Every operation of a model's shape, one after the other: `figures` is the result."""

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype, native: NativeKernels, ceilings: Ceilings
    ) -> None:
        self.figures: list[Figure] = []
        self._config = config
        self._dtype = dtype
        self._native = native
        self._ceilings = ceilings
        self._name = str(dtype).removeprefix("torch.")

    def run(self) -> list[Figure]:
        """All of them; takes a minute."""
        for int8 in (False, True):
            for rows in LINEAR_ROWS:
                self._linears(rows, int8)
        for int8 in (False, True):
            self._attention(32, 300, 1, int8)
            self._attention(1, 8192, 1, int8)
            self._attention(1, 1024, 512, int8)
        for rows in (32, 512):
            self._between(rows)
        return self.figures

    def _add(self, operation: str, case: str, work: Work, seconds: Sequence[float]) -> None:
        gb_s, gflop_s = work.num_bytes / seconds[0] / 1e9, work.num_flops / seconds[0] / 1e9
        ceiling = self._ceilings.gflop_s.get(work.kind, 0.0)
        share = gflop_s / ceiling if ceiling else gb_s / self._ceilings.read_gb_s
        torch_ms = seconds[1] * 1e3 if len(seconds) > 1 else 0.0
        self.figures.append(
            Figure(operation, case, seconds[0] * 1e3, gb_s, gflop_s, share, torch_ms)
        )

    def _linears(self, rows: int, int8: bool) -> None:
        """All matrices of NUM_LAYERS layers, beside oneDNN's in the dtype of the model."""
        config = self._config
        hidden, inner = config.hidden_size, config.intermediate_size
        heads = config.num_heads * config.head_dim
        keys = 2 * config.num_kv_heads * config.head_dim
        shapes = [(heads + keys, hidden), (hidden, heads), (2 * inner, hidden), (hidden, inner)]
        weights = [torch.randn(s).to(self._dtype) for s in shapes]
        inputs = [torch.randn(rows, s[1]).to(self._dtype) for s in shapes]
        # Each layer has matrices of its own; the same numbers do.
        theirs = [make_linear(w) for _ in range(NUM_LAYERS) for w in weights]
        size = sum(w.numel() for w in weights) * NUM_LAYERS
        runs: list[Run] = []
        if int8:
            bytes_of = [Int8Linear(w, self._native) for _ in range(NUM_LAYERS) for w in weights]
            quantised = [quantise_rows(x, self._native) for x in inputs]
            runs.append(lambda: [m(quantised[i % 4]) for i, m in enumerate(bytes_of)])
        else:
            ours = [
                make_linear(w, self._native, invariant=True)
                for _ in range(NUM_LAYERS)
                for w in weights
            ]
            runs.append(lambda: [m(inputs[i % 4]) for i, m in enumerate(ours)])
        runs.append(lambda: [m(inputs[i % 4]) for i, m in enumerate(theirs)])
        kind = ("int8" if int8 else self._name) if rows > BANDWIDTH_ROWS else ""
        width = 1 if int8 else self._dtype.itemsize
        work = Work(size * width, 2.0 * rows * size, kind)
        name = "linear_int8" if int8 else "linear"
        self._add(name, f"{rows} rows", work, alternate(runs))

    def _attention(self, num_seqs: int, context: int, seqlen_q: int, int8: bool) -> None:
        config, block_size, layers = self._config, 16, 8
        blocks = -(-context // block_size)
        shape = (num_seqs * blocks + 1, config.num_kv_heads, block_size, config.head_dim)
        pool = torch.randn(shape).to(self._dtype)
        stored = quantise_heads(pool) if int8 else pool
        caches = zeros_in_huge_pages((layers, 2, *stored.shape), stored.dtype)
        caches.copy_(stored)
        views = [layer.permute(0, 1, 3, 2, 4).unbind(0) for layer in caches]
        table = (torch.randperm(num_seqs * blocks) + 1).int().view(num_seqs, blocks)
        tokens = num_seqs * seqlen_q
        q = torch.randn(tokens, config.num_heads, config.head_dim).to(self._dtype)
        bounds = torch.arange(0, tokens + 1, seqlen_q, dtype=torch.int32)
        lengths = torch.full((num_seqs,), context, dtype=torch.int32)

        def run() -> None:
            for k, v in views:
                varlen_paged_attention(
                    q,
                    k,
                    v,
                    bounds,
                    lengths,
                    table,
                    max_seqlen_q=seqlen_q,
                    max_seqlen_k=context,
                    scale=config.head_dim**-0.5,
                    native=self._native,
                )

        visible = seqlen_q * (2 * context - seqlen_q + 1) / 2
        flops = layers * num_seqs * visible * config.num_heads * config.head_dim * 4
        num_bytes = layers * 2 * num_seqs * context * stored[0, :, 0].nbytes
        work = Work(num_bytes, flops, self._name if seqlen_q > 1 else "")
        case = f"{num_seqs} x {seqlen_q} over {context}" + (", KV in bytes" if int8 else "")
        self._add("attention", case, work, alternate([run]))

    def _between(self, rows: int) -> None:
        """What lies between two linears, a layer's worth of each."""
        config, native, dtype = self._config, self._native, self._dtype
        width, case = dtype.itemsize, f"{rows} rows"
        heads = config.num_heads + 2 * config.num_kv_heads
        x, residual = torch.randn(2, rows, config.hidden_size).to(dtype).unbind(0)
        weight = torch.randn(config.hidden_size).to(dtype)
        gate_up = torch.randn(rows, 2 * config.intermediate_size).to(dtype)
        qkv = torch.randn(rows, heads, config.head_dim).to(dtype)
        rope = build_rope_table(config.head_dim, rows, 1e4)
        pool = torch.zeros(2, rows // 16 + 1, 16, config.num_kv_heads, config.head_dim, dtype=dtype)
        slots = torch.arange(rows)
        logits = torch.randn(min(rows, 32), config.vocab_size).to(dtype)
        table = torch.randn(config.vocab_size, config.hidden_size).to(dtype)
        token_ids = torch.randint(0, config.vocab_size, (rows,))
        runs: dict[str, tuple[Run, float]] = {
            "rms_norm": (
                lambda: fused_add_rms_norm(x, residual, weight, 1e-5, native),
                4.0 * x.nbytes,
            ),
            "quantise": (lambda: quantise_rows(x, native), x.numel() * (width + 1.0)),
            "silu_mul": (lambda: silu_mul(gate_up, native), 1.5 * gate_up.nbytes),
            "rope_write_kv": (
                lambda: rope_write_kv(qkv, rope, pool[0], pool[1], slots, native),
                2.0 * qkv.nbytes,
            ),
            "greedy": (lambda: greedy_tokens(logits, native), float(logits.nbytes)),
            **self._sampling(logits.float()),
            "embedding": (lambda: embed(table, token_ids), 2.0 * x.nbytes),
        }
        for name, (run, num_bytes) in runs.items():
            self._add(name, case, Work(num_bytes, 0.0), alternate([run]))

    def _sampling(self, logits: torch.Tensor) -> dict[str, tuple[Run, float]]:
        """What a row may ask for beside the likeliest token; logits (rows, vocab_size) float32."""
        rows, vocab_size = logits.shape
        ones, uniforms = torch.ones(rows), torch.rand(rows)
        top_k = torch.full((rows,), 40, dtype=torch.int32)
        targets = torch.arange(rows)
        held = min(PENALISED, vocab_size)
        entries = targets.repeat_interleave(held)
        factors = torch.tensor([[1.1, 0.5, 0.1]]).repeat(rows, 1)
        token_ids = torch.arange(held).repeat(rows)
        counts = torch.ones(len(entries), dtype=torch.int32)

        def draw() -> object:
            return sample_tokens(logits, 0.8 * ones, top_k, 0.9 * ones, uniforms)

        size = float(logits.nbytes)
        return {
            "sampling": (draw, size),
            "penalties": (
                lambda: apply_penalties(logits, entries, token_ids, counts, factors),
                20.0 * len(entries),
            ),
            "logprobs": (lambda: token_logprobs(logits, targets, 5), size),
        }


def batch_invariant_cost(figures: Sequence[Figure], native: NativeKernels, name: str) -> float:
    """What `batch_invariant` adds to the time of linears over 32 rows; 0 where they are the same.

    name: of the dtype
    """
    chosen = make_linear(torch.zeros(64, 64, dtype=getattr(torch, name)), native)
    if isinstance(chosen, NativeLinear):
        return 0.0
    linear = next(f for f in figures if (f.operation, f.case) == ("linear", "32 rows"))
    return linear.ms / linear.torch_ms - 1.0


def between_share(figures: Sequence[Figure], step_ms: float, num_layers: int) -> float:
    """The share of a step of 32 lanes that is spent between linears, attention apart."""
    times = {f.operation: f.ms for f in figures if f.case == "32 rows"}
    layer_ms = 2 * times["rms_norm"] + times["silu_mul"] + times["rope_write_kv"]
    return (num_layers * layer_ms + times["greedy"]) / step_ms


def measure_steps(runner: ModelRunner, lanes: int, context: int) -> float:
    """Median seconds of a step in which every lane decodes one token, greedily.

    Raises ValueError where the pool does not hold so many tokens.
    """
    blocks = -(-context // runner.block_size)
    if lanes * blocks >= runner.num_blocks or context > runner.max_model_len:
        raise ValueError(f"{lanes} sequences of {context} tokens do not fit the KV pool")
    inputs = _decode_step(runner, lanes, context, blocks)
    return alternate([lambda: runner.execute(inputs)])[0]


def _decode_step(runner: ModelRunner, lanes: int, context: int, blocks: int) -> StepInputs:
    generator = np.random.default_rng(0)
    order = generator.permutation(runner.num_blocks - 1)[: lanes * blocks] + 1
    table = order.astype(np.int32).reshape(lanes, blocks)
    last, size = context - 1, runner.block_size
    sampling = SamplingBatch(
        temperature=np.zeros(lanes, dtype=np.float32),
        top_p=np.ones(lanes, dtype=np.float32),
        top_k=np.zeros(lanes, dtype=np.int32),
        min_p=np.zeros(lanes, dtype=np.float32),
        seed=np.zeros(lanes, dtype=np.uint64),
        position=np.full(lanes, context, dtype=np.int64),
        num_logprobs=np.full(lanes, -1, dtype=np.int32),
    )
    return StepInputs(
        input_ids=generator.integers(0, runner.config.vocab_size, lanes).astype(np.int32),
        positions=np.full(lanes, last, dtype=np.int32),
        slot_mapping=table[:, last // size].astype(np.int64) * size + last % size,
        cu_seqlens_q=np.arange(lanes + 1, dtype=np.int32),
        seqlens_k=np.full(lanes, context, dtype=np.int32),
        block_table=table,
        num_decodes=lanes,
        logits_rows=np.arange(lanes, dtype=np.int32),
        sampling=sampling,
    )
