"""Native kernels beside the torch reference, alternating in one run: medians and rates.

Run by hand: ``python -m tests.bench.bench_kernels [threads]``. With one thread the times are CPU
times, which other processes on the machine disturb least; with more they are times on the clock.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from kernels.attention import plan_attention, varlen_paged_attention
from kernels.huge_pages import zeros_in_huge_pages
from kernels.linear import make_linear
from kernels.native import NativeKernels, load_native

PAIRS = 5
NUM_LAYERS = 8
"""Each call runs this many layers' data, so that the caches do not hold all of it."""


@dataclass(frozen=True)
class AttentionCase:
    num_seqs: int
    context: int
    seqlen_q: int
    num_kv_heads: int = 3
    group: int = 3
    head_dim: int = 64
    block_size: int = 16
    dtype: torch.dtype = torch.bfloat16


ATTENTION_CASES = (
    AttentionCase(12, 300, 1),
    AttentionCase(32, 300, 1),
    AttentionCase(1, 512, 512),
    AttentionCase(1, 1536, 512),
    AttentionCase(4, 4096, 1, num_kv_heads=8, group=4, head_dim=128),
    AttentionCase(32, 300, 1, dtype=torch.float32),
)
LINEAR_SHAPES = ((960, 576), (576, 576), (3072, 576), (576, 1536))
LINEAR_ROWS = (1, 4, 12, 32, 64, 512)


def alternate(old: Callable[[], None], new: Callable[[], None]) -> tuple[float, float]:
    """Median seconds of each, after one run of each that is not counted."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    old()
    new()
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(PAIRS):
        for run, kept in zip((old, new), times, strict=True):
            start = clock()
            run()
            kept.append(clock() - start)
    return statistics.median(times[0]), statistics.median(times[1])


def report(name: str, seconds: tuple[float, float], num_bytes: float, num_flops: float) -> None:
    old, new = seconds
    print(  # noqa: T201 - a tool run by hand
        f"{name:44} torch {old * 1e3:8.2f} ms   native {new * 1e3:8.2f} ms   x{old / new:5.2f}"
        f"   {num_bytes / new / 1e9:6.1f} GB/s   {num_flops / new / 1e9:6.0f} GFLOP/s",
        flush=True,
    )


def bench_attention(case: AttentionCase, native: NativeKernels) -> None:
    blocks = -(-case.context // case.block_size)
    num_blocks = case.num_seqs * blocks + 1
    shape = (NUM_LAYERS, 2, num_blocks, case.num_kv_heads, case.block_size, case.head_dim)
    pool = zeros_in_huge_pages(shape, case.dtype)
    pool.copy_(torch.randn(shape[2:]))
    table = (torch.randperm(num_blocks - 1) + 1).to(torch.int32).view(case.num_seqs, blocks)
    num_tokens = case.num_seqs * case.seqlen_q
    q = torch.randn(num_tokens, case.num_kv_heads * case.group, case.head_dim).to(case.dtype)
    boundaries = torch.arange(0, num_tokens + 1, case.seqlen_q, dtype=torch.int32)
    lengths = torch.full((case.num_seqs,), case.context, dtype=torch.int32)
    layers = [layer.permute(0, 1, 3, 2, 4).unbind(0) for layer in pool]
    layout = plan_attention(boundaries, lengths, table, layers[0][0])

    def run(backend: str) -> None:
        for k, v in layers:
            varlen_paged_attention(
                q,
                k,
                v,
                boundaries,
                lengths,
                table,
                max_seqlen_q=case.seqlen_q,
                max_seqlen_k=case.context,
                scale=case.head_dim**-0.5,
                layout=layout,
                native=native,
                backend=backend,
            )

    keys = case.num_seqs * case.context * case.num_kv_heads * case.head_dim
    num_bytes = NUM_LAYERS * keys * 2 * case.dtype.itemsize
    first = case.context - case.seqlen_q + 1
    visible = case.seqlen_q * (first + case.context) / 2
    flops = NUM_LAYERS * case.num_seqs * visible * q.shape[1] * case.head_dim * 4
    shape_text = f"{case.num_seqs} x {case.seqlen_q} over {case.context}, {case.head_dim}"
    seconds = alternate(lambda: run("torch"), lambda: run("cpu"))
    name = f"attention {shape_text}, {case.dtype}".replace("torch.", "")
    report(name, seconds, num_bytes, flops)


def bench_linear(rows: int, dtype: torch.dtype, native: NativeKernels) -> None:
    weights = [torch.randn(shape).to(dtype) for _ in range(NUM_LAYERS) for shape in LINEAR_SHAPES]
    inputs = [torch.randn(rows, weight.shape[1]).to(dtype) for weight in weights]
    old = [make_linear(weight) for weight in weights]
    new = [make_linear(weight, native) for weight in weights]

    def run(linears: list[Callable[[torch.Tensor], torch.Tensor]]) -> None:
        for linear, x in zip(linears, inputs, strict=True):
            linear(x)

    size = sum(weight.numel() for weight in weights)
    seconds = alternate(lambda: run(old), lambda: run(new))
    name = f"linear {rows} rows, {dtype}".replace("torch.", "")
    report(name, seconds, size * dtype.itemsize, 2.0 * rows * size)


def main() -> None:
    torch.set_num_threads(int(sys.argv[1]) if len(sys.argv) > 1 else 1)
    native = load_native()
    with torch.inference_mode():
        for case in ATTENTION_CASES:
            bench_attention(case, native)
        for dtype in (torch.bfloat16, torch.float32):
            for rows in LINEAR_ROWS:
                bench_linear(rows, dtype, native)


if __name__ == "__main__":
    main()
