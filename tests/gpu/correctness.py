"""Every kernel against its reference on the same device: the reference in float32, the kernel in
each type it takes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from report import Report

from gpu_worker.model.operations import Draws, HostOperations, TritonOperations
from kernels.attention import varlen_paged_attention
from kernels.gpu.linear import linear_triton
from kernels.gpu.quantise_fp8 import quantise_rows_triton, rms_norm_fp8_triton
from kernels.kv_bytes import FP8_CACHE, INT8_CACHE, quantise_heads
from kernels.linear_fp8 import Fp8Linear, multiplies_fp8
from kernels.quantise_fp8 import Fp8Rows, quantise_rows_fp8
from kernels.rms_norm import fused_add_rms_norm
from kernels.rope import build_rope_table

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""Relative, of the whole result: research of several projects' tests came to these."""

BYTES_TOLERANCE = 1e-2
BIG_POOL_ELEMENTS = (1 << 31) + (1 << 28)
"""Offsets beyond 32 bits."""


@dataclass(frozen=True)
class Case:
    """lengths: (queries, keys) of each sequence; stored: the cache's dtype, None for that of q;
    extras: with ALiBi and sinks.
    """

    name: str
    lengths: Sequence[tuple[int, int]]
    heads: tuple[int, int, int] = (8, 2, 64)
    num_decodes: int = 0
    block_size: int = 16
    stored: torch.dtype | None = None
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    num_blocks: int = 0
    backend: str = "triton"
    extras: bool = False


MIXED = [(1, 1), (1, 33), (1, 700), (0, 5), (3, 3), (129, 200), (17, 40)]


def cases(is_dry: bool) -> list[Case]:
    if is_dry:
        return [Case("mixed", [(1, 20), (3, 5)], (2, 1, 16), 1)]
    found = [
        Case("mixed", MIXED, num_decodes=3),
        Case("mixed, one kernel", MIXED),
        Case("no keys", [(1, 0), (1, 3), (2, 0)], num_decodes=2),
        Case("long decodes", [(1, 8000), (1, 1), (1, 4097)], (32, 8, 128), 3),
        Case("window", MIXED, num_decodes=3, options={"window": 33}),
        Case("softcap", MIXED, num_decodes=3, options={"softcap": 30.0}),
        Case("ALiBi and sinks", MIXED, num_decodes=3, extras=True),
        Case("flash_attn", MIXED, (32, 8, 128), 3, 256, backend="flash_attn"),
        Case("blocks of 256", MIXED, num_decodes=3, block_size=256),
        Case("int8 KV", MIXED, num_decodes=3, stored=INT8_CACHE),
        Case("fp8 KV", MIXED, num_decodes=3, stored=FP8_CACHE),
    ]
    shapes = [(32, 8, 128), (4, 4, 80), (5, 1, 192), (16, 1, 256), (6, 2, 40)]
    found += [Case(f"heads {shape}", MIXED, shape, 3) for shape in shapes]
    return found


def check_attention(report: Report, device: torch.device, case: Case, dtype: torch.dtype) -> None:
    """The pool holds NaN but for what the sequences hold, and blocks lie in random order."""
    torch.manual_seed(0)
    num_heads, num_kv_heads, head_dim = case.heads
    size = case.block_size
    counts = [-(-keys // size) for _, keys in case.lengths]
    needed = sum(counts) + 1
    num_blocks = max(needed, case.num_blocks)
    order = (num_blocks - 1 - torch.randperm(needed - 1)).tolist()
    shape = (num_blocks, num_kv_heads, size, head_dim)
    stored = case.stored or dtype
    if case.stored is not None:
        shape = (*shape[:3], head_dim + 4)
    pools = [torch.zeros(shape, dtype=stored, device=device) for _ in range(2)]
    if case.stored is None:
        for pool in pools:
            pool.fill_(float("nan"))
    width = max(1, *counts)
    table = torch.zeros(len(counts), width, dtype=torch.int32)
    for row, ((_, keys), count) in enumerate(zip(case.lengths, counts, strict=True)):
        blocks = [order.pop() for _ in range(count)]
        table[row, :count] = torch.tensor(blocks, dtype=torch.int32)
        for at, block in enumerate(blocks):
            held = min(size, keys - at * size)
            for pool in pools:
                fresh = torch.randn(num_kv_heads, held, head_dim, device=device).to(dtype)
                if case.stored is not None:
                    fresh = quantise_heads(fresh, case.stored)
                pool[block, :, :held] = fresh
    k, v = (pool.permute(0, 2, 1, 3) for pool in pools)
    tokens = sum(queries for queries, _ in case.lengths)
    q = torch.randn(tokens, num_heads, head_dim, device=device).to(dtype)
    bounds = torch.tensor([0, *(n for n, _ in case.lengths)]).cumsum(0).int().to(device)
    lengths = torch.tensor([keys for _, keys in case.lengths], dtype=torch.int32, device=device)
    options = {
        "max_seqlen_q": max(n for n, _ in case.lengths),
        "max_seqlen_k": max(n for _, n in case.lengths),
        "scale": head_dim**-0.5,
        **case.options,
    }
    if case.extras:
        options["alibi_slopes"] = torch.linspace(0.01, 0.5, num_heads, device=device)
        options["sinks"] = torch.linspace(-3.0, 10.0, num_heads, device=device)
    indices = (bounds, lengths, table.to(device))
    try:
        got = varlen_paged_attention(
            q, k, v, *indices, backend=case.backend, num_decodes=case.num_decodes, **options
        )
    except ValueError as error:
        report.add("skipped", part=f"attention, {case.name}", reason=str(error))
        return
    if case.num_blocks:
        # Converting such a pool is not worth its memory: the same blocks, renumbered.
        kept = table.to(device).long().flatten().unique()
        renumbered = torch.searchsorted(kept, table.to(device).long()).int()
        k, v, indices = k[kept], v[kept], (bounds, lengths, renumbered)
    if case.stored is None:
        k, v = k.float(), v.float()
    expected = varlen_paged_attention(q.float(), k, v, *indices, backend="torch", **options)
    bound = TOLERANCE[dtype] if case.stored is None else BYTES_TOLERANCE
    add(report, f"attention, {case.name}", dtype, got, expected, bound)


def add(
    report: Report,
    name: str,
    dtype: torch.dtype,
    got: torch.Tensor,
    expected: torch.Tensor,
    bound: float | None = None,
) -> None:
    """The relative error of `got`; one NaN fails it."""
    limit = TOLERANCE[dtype] if bound is None else bound
    reference = expected.double()
    error = float((got.double() - reference).norm() / reference.norm().clamp(min=1e-30))
    kind = str(dtype).removeprefix("torch.")
    report.add("checks", name=name, dtype=kind, error=error, bound=limit, ok=error <= limit)


def check_layer(report: Report, device: torch.device, dtype: torch.dtype, is_dry: bool) -> None:
    """What lies between two linears, by both tables of operations."""
    torch.manual_seed(0)
    triton, torch_ops = TritonOperations(), HostOperations()
    rows, hidden, inner, heads = (
        (3, 40, 24, (2, 1, 16)) if is_dry else (67, 4096, 14336, (32, 8, 128))
    )

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device).to(dtype)

    x, residual, weight = random(rows, hidden), random(rows, hidden), random(hidden)
    wide = (x.float(), residual.float(), weight.float())
    got, total = triton.add_rms_norm(x, residual, weight, 1e-5, None)
    expected, expected_total = torch_ops.add_rms_norm(*wide, 1e-5, None)
    add(report, "rms_norm", dtype, got, expected)
    add(report, "rms_norm, residual", dtype, total, expected_total)
    gate_up = random(rows, 2 * inner)
    expected = torch_ops.silu_mul(gate_up.float(), None)
    add(report, "silu_mul", dtype, triton.silu_mul(gate_up, None), expected)
    num_heads, num_kv_heads, head_dim = heads
    qkv = random(rows, num_heads + 2 * num_kv_heads, head_dim)
    table = build_rope_table(head_dim, rows, 1e4).to(device)
    slots = torch.randperm(rows + 16)[:rows].to(device) + 16
    slots[1] = -1
    shape = (rows // 16 + 4, 16, num_kv_heads, head_dim)
    caches = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(2)]
    wide_caches = [cache.float() for cache in caches]
    expected = torch_ops.rope_write_kv(qkv.float(), table, tuple(wide_caches), slots)
    got = triton.rope_write_kv(qkv, table, tuple(caches), slots)
    add(report, "rope_write_kv, queries", dtype, got, expected)
    add(report, "rope_write_kv, keys", dtype, caches[0], wide_caches[0])
    add(report, "rope_write_kv, values", dtype, caches[1], wide_caches[1])
    matrix = random(inner, hidden) * hidden**-0.5
    add(report, "linear", dtype, linear_triton(x, matrix), x.float() @ matrix.float().T)


def check_fp8(report: Report, device: torch.device) -> None:
    """Rows as e4m3, and their product by torch's operator."""
    x = torch.randn(67, 4096, device=device).bfloat16()
    weight = torch.randn(1024, 4096, device=device).bfloat16()
    got, expected = quantise_rows_triton(x), quantise_rows_fp8(x)
    add(report, "quantise_fp8", x.dtype, got.values.float(), expected.values.float())
    add(report, "quantise_fp8, scales", torch.float32, got.scales, expected.scales)
    residual, norm = torch.randn_like(x), torch.randn_like(x[0])
    fused, total = rms_norm_fp8_triton(x, residual, norm, 1e-5)
    normed, expected_total = fused_add_rms_norm(x, residual, norm, 1e-5)
    separate = quantise_rows_fp8(normed)
    for name, part, whole in (
        ("residual", total, expected_total),
        ("rows", restored(fused), restored(separate)),
    ):
        add(report, f"rms_norm_fp8, {name}", x.dtype, part, whole)
    matrix = Fp8Linear(weight)
    name = "linear_fp8, torch's operator" if multiplies_fp8(device) else "linear_fp8, reference"
    exact = restored(expected) @ restored(Fp8Rows(matrix.values, matrix.scales)).T
    add(report, name, x.dtype, matrix(got), exact)


def restored(rows: Fp8Rows) -> torch.Tensor:
    return rows.values.float() * rows.scales[:, None]


def check_sampling(report: Report, device: torch.device, is_dry: bool) -> None:
    """The same tokens as the sorted reference, but where a uniform number falls on an edge."""
    torch.manual_seed(0)
    rows, size = (3, 50) if is_dry else (64, 128_256)
    logits = torch.randn(rows, size, device=device) * 3
    logits[-1, 7] = float("nan")
    column = torch.arange(rows, device=device)
    draws = Draws(
        temperature=torch.where(column % 4 == 0, 0.0, 0.8),
        top_k=torch.where(column % 3 == 1, 40, 0).int(),
        top_p=torch.where(column % 2 == 1, 0.9, 1.0),
        uniforms=torch.rand(rows, device=device).clamp(1e-6, 1 - 1e-6),
        min_p=torch.where(column % 5 == 2, 0.05, 0.0),
    )
    got, finite = TritonOperations().sample(logits, draws)
    expected, expected_finite = HostOperations().sample(logits, draws)
    wrong = int((got != expected).sum())
    same = torch.equal(finite, expected_finite) and not bool(finite[-1]) and int(got[-1]) == 0
    # Sums in float32 and float64 part at one uniform number in tens of thousands.
    ok = same and wrong <= 1
    report.add("checks", name="sampling", dtype="float32", error=wrong, bound=1, ok=ok)
    ids = torch.stack([torch.randperm(size, device=device)[: size // 2] for _ in range(rows)])
    entries = (
        column.repeat_interleave(size // 2).int(),
        ids.flatten().int(),
        torch.randint(0, 4, (ids.numel(),), device=device).int(),
        torch.tensor([[1.3, 0.5, 0.25]], device=device).repeat(rows, 1),
    )
    scores = torch.randn(rows, size, device=device)
    expected = scores.clone()
    HostOperations().penalise(expected, *entries)
    TritonOperations().penalise(scores, *entries)
    add(report, "penalties", torch.float32, scores, expected)
    targets = ids[:, 0]
    found = TritonOperations().logprobs(scores, targets, 5)
    for part, got, expected in zip(
        ("chosen", "ids", "values"),
        found,
        HostOperations().logprobs(scores, targets, 5),
        strict=True,
    ):
        add(report, f"logprobs, {part}", torch.float32, got, expected)
    table = torch.randn(size, 72, device=device)
    add(
        report, "embedding", torch.float32, TritonOperations().embed(table, targets), table[targets]
    )


def check_invariance(report: Report, device: torch.device, is_dry: bool) -> None:
    """A row of the product with fixed tiles has the same bits in any company."""
    rows, inner, hidden = (5, 20, 30) if is_dry else (129, 1024, 4096)
    dtype = torch.float32 if is_dry else torch.bfloat16
    x = torch.randn(rows, hidden, device=device).to(dtype)
    matrix = torch.randn(inner, hidden, device=device).to(dtype)
    together = linear_triton(x, matrix)
    wrong = sum(
        not torch.equal(
            linear_triton(x[first : first + count], matrix), together[first : first + count]
        )
        for first, count in ((0, 1), (1, 2), (3, 2), (rows - 1, 1))
    )
    kind = str(dtype).removeprefix("torch.")
    name = "linear, the same bits in any company"
    report.add("checks", name=name, dtype=kind, error=wrong, bound=0, ok=wrong == 0)


def run(report: Report, device: torch.device, is_dry: bool) -> None:
    dtypes = [torch.float32] if is_dry else [torch.bfloat16, torch.float16, torch.float32]

    def part(name: str, needed_s: float, check: Callable[[], None]) -> None:
        report.attempt(name, needed_s, check)

    for dtype in dtypes:
        part(f"layer {dtype}", 10, lambda d=dtype: check_layer(report, device, d, is_dry))
    part("sampling", 10, lambda: check_sampling(report, device, is_dry))
    if not is_dry:
        part("fp8", 10, lambda: check_fp8(report, device))
    part("invariance", 10, lambda: check_invariance(report, device, is_dry))
    for case in cases(is_dry):
        chosen = dtypes if case.name == "mixed" else dtypes[:1]
        for dtype in chosen:
            name = f"attention {case.name} {dtype}"
            part(name, 10, lambda c=case, d=dtype: check_attention(report, device, c, d))
    if not is_dry:
        blocks = BIG_POOL_ELEMENTS // (8 * 16 * 128)
        big = Case("pool beyond 32 bits", [(1, 100), (5, 40)], (32, 8, 128), 1, num_blocks=blocks)
        if torch.cuda.mem_get_info(device)[0] > 16 << 30:
            part(big.name, 15, lambda: check_attention(report, device, big, torch.bfloat16))
        else:
            report.add("skipped", part=big.name, reason="less than 16 GiB of memory are free")
