"""How fast each kernel is, as a share of what the same device reached in the same run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from report import Report

from gpu_worker.model.operations import Draws, TritonOperations
from kernels.attention import varlen_paged_attention
from kernels.gpu.linear import linear_triton
from kernels.gpu.quantise_fp8 import quantise_rows_triton, rms_norm_fp8_triton
from kernels.kv_bytes import FP8_CACHE, INT8_CACHE, SCALE_BYTES
from kernels.linear_fp8 import Fp8Linear, multiplies_fp8
from kernels.rope import build_rope_table

REPEATS = 9
COPY_BYTES = 2 << 30
MATRIX = 8192


@dataclass(frozen=True)
class Ceilings:
    """copy_gb_s: bytes read and written; gflop_s: of a large product in bfloat16 by torch."""

    copy_gb_s: float
    gflop_s: float


def seconds(device: torch.device, run: Callable[[], object], repeats: int = REPEATS) -> float:
    """Median of `repeats`, the first two runs left out; on the CPU, of the only one."""
    times: list[float] = []
    for turn in range(repeats + 2):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            end.record()
            end.synchronize()
            elapsed = start.elapsed_time(end) / 1e3
        else:
            began = time.perf_counter()
            run()
            return time.perf_counter() - began
        if turn > 1:
            times.append(elapsed)
    return statistics.median(times)


def measure_ceilings(device: torch.device, is_dry: bool) -> Ceilings:
    size, side = (1 << 20, 64) if is_dry else (COPY_BYTES, MATRIX)
    source = torch.ones(size // 4, device=device)
    target = torch.empty_like(source)
    spent = seconds(device, lambda: target.copy_(source))
    dtype = torch.float32 if is_dry else torch.bfloat16
    a, b = torch.randn(2, side, side, device=device).to(dtype).unbind(0)
    multiplied = seconds(device, lambda: a @ b)
    return Ceilings(2 * size / spent / 1e9, 2 * side**3 / multiplied / 1e9)


class Bench:
    """Adds a line for each measurement to the report."""

    def __init__(
        self, report: Report, device: torch.device, ceilings: Ceilings, is_dry: bool
    ) -> None:
        self._report = report
        self._device = device
        self._ceilings = ceilings
        self._is_dry = is_dry
        self._dtype = torch.float32 if is_dry else torch.bfloat16

    def run(self) -> None:
        if self._is_dry:
            self._report.attempt("decode", 1, lambda: self.attention(2, 20, 1, (2, 1, 16)))
            self._report.attempt("linear", 1, lambda: self.linear(2, 16, 16))
            return
        parts: list[tuple[str, Callable[[], None]]] = [
            ("decode 64 x 4096", lambda: self.attention(64, 4096, 1)),
            ("decode 8 x 32768", lambda: self.attention(8, 32768, 1)),
            ("decode 1 x 8192", lambda: self.attention(1, 8192, 1)),
            ("decode fp8", lambda: self.attention(64, 4096, 1, stored=FP8_CACHE)),
            ("decode int8", lambda: self.attention(64, 4096, 1, stored=INT8_CACHE)),
            ("prefill 1 x 8192", lambda: self.attention(1, 8192, 8192)),
            ("prefill 4 x 2048", lambda: self.attention(4, 2048, 2048)),
            ("prefill 512 over 8192", lambda: self.attention(1, 8192, 512)),
            ("linears", lambda: [self.linear(rows, 14336, 4096) for rows in (1, 64, 2048)]),
            ("layer", lambda: [self.layer(rows) for rows in (64, 2048)]),
            ("sampling", self.sampling),
            ("flash_attn", self.flash_attention),
        ]
        for name, part in parts:
            self._report.attempt(name, 10, part)

    def _add(
        self, name: str, case: str, spent: float, num_bytes: float = 0.0, flops: float = 0.0
    ) -> None:
        entry = {"name": name, "case": case, "ms": spent * 1e3}
        if num_bytes:
            entry["gb_s"] = num_bytes / spent / 1e9
            entry["share_of_copy"] = entry["gb_s"] / self._ceilings.copy_gb_s
        if flops:
            entry["gflop_s"] = flops / spent / 1e9
            entry["share_of_product"] = entry["gflop_s"] / self._ceilings.gflop_s
        self._report.add("speed", **entry)

    def attention(
        self,
        num_seqs: int,
        context: int,
        queries: int,
        heads: tuple[int, int, int] = (32, 8, 128),
        stored: torch.dtype | None = None,
        backend: str = "triton",
    ) -> None:
        """Blocks of 16 in random order, so that what is read is not one run of memory."""
        num_heads, num_kv_heads, head_dim = heads
        device, size = self._device, 256 if backend == "flash_attn" else 16
        per_seq = -(-context // size)
        count = num_seqs * per_seq + 1
        width = head_dim + (SCALE_BYTES if stored is not None else 0)
        pools = torch.zeros(
            (2, count, num_kv_heads, size, width), dtype=stored or self._dtype, device=device
        )
        if stored is None:
            pools.normal_()
        k, v = pools.permute(0, 1, 3, 2, 4).unbind(0)
        table = (torch.randperm(count - 1, device=device) + 1).int().view(num_seqs, per_seq)
        q = torch.randn(num_seqs * queries, num_heads, head_dim, device=device).to(self._dtype)
        bounds = torch.arange(0, num_seqs * queries + 1, queries, dtype=torch.int32, device=device)
        lengths = torch.full((num_seqs,), context, dtype=torch.int32, device=device)
        out = torch.empty_like(q)

        def run() -> None:
            varlen_paged_attention(
                q,
                k,
                v,
                bounds,
                lengths,
                table,
                max_seqlen_q=queries,
                max_seqlen_k=context,
                scale=head_dim**-0.5,
                num_decodes=num_seqs if queries == 1 else 0,
                out=out,
                backend=backend,
            )

        spent = seconds(device, run)
        kind = "" if stored is None else f", KV {str(stored).removeprefix('torch.')}"
        case = f"{num_seqs} x {queries} over {context}{kind}"
        name = "attention" if backend == "triton" else backend
        if queries == 1:
            num_bytes = 2 * num_seqs * context * num_kv_heads * width * k.element_size()
            self._add(name, case, spent, num_bytes=num_bytes)
        else:
            visible = queries * (2 * context - queries + 1) / 2
            self._add(name, case, spent, flops=4 * num_seqs * visible * num_heads * head_dim)

    def flash_attention(self) -> None:
        """The same cases by flash-attn, where it is installed and takes them."""
        for case in ((64, 4096, 1), (1, 8192, 8192)):
            try:
                self.attention(*case, backend="flash_attn")
            except ValueError as error:
                self._report.add("skipped", part=f"flash_attn {case}", reason=str(error))

    def linear(self, rows: int, out_features: int, in_features: int) -> None:
        """torch's product, that in fp8, and the one of `batch_invariant`."""
        x = torch.randn(rows, in_features, device=self._device).to(self._dtype)
        weight = torch.randn(out_features, in_features, device=self._device).to(self._dtype)
        fp8 = Fp8Linear(weight)
        flops = 2.0 * rows * out_features * in_features
        case = f"{rows} x {in_features} -> {out_features}"
        runs: dict[str, tuple[Callable[[], object], float]] = {
            "linear, torch": (lambda: torch.nn.functional.linear(x, weight), weight.nbytes),
            "linear, fp8": (lambda: fp8(x), weight.nbytes / weight.element_size()),
            "linear, batch_invariant": (lambda: linear_triton(x, weight), weight.nbytes),
        }
        for name, (run, num_bytes) in runs.items():
            self._add(name, case, seconds(self._device, run), num_bytes=num_bytes, flops=flops)

    def layer(self, rows: int) -> None:
        """What lies between two linears of an 8B model."""
        operations, dtype, device = TritonOperations(), self._dtype, self._device
        x, residual = torch.randn(2, rows, 4096, device=device).to(dtype).unbind(0)
        weight = torch.randn(4096, device=device).to(dtype)
        gate_up = torch.randn(rows, 2 * 14336, device=device).to(dtype)
        qkv = torch.randn(rows, 48, 128, device=device).to(dtype)
        rope = build_rope_table(128, rows, 1e4).to(device)
        pool = torch.zeros(2, rows // 16 + 2, 16, 8, 128, dtype=dtype, device=device)
        slots = torch.arange(rows, device=device)
        runs: dict[str, tuple[Callable[[], object], float]] = {
            "rms_norm": (
                lambda: operations.add_rms_norm(x, residual, weight, 1e-5, None),
                4.0 * x.nbytes,
            ),
            "silu_mul": (lambda: operations.silu_mul(gate_up, None), 1.5 * gate_up.nbytes),
            "embedding": (lambda: operations.embed(gate_up, slots % rows), 2.0 * gate_up.nbytes),
            "rope_write_kv": (
                lambda: operations.rope_write_kv(qkv, rope, (pool[0], pool[1]), slots),
                2.0 * qkv.nbytes,
            ),
        }
        if multiplies_fp8(device):
            runs["rms_norm_fp8"] = (
                lambda: rms_norm_fp8_triton(x, residual, weight, 1e-5),
                3.0 * x.nbytes + x.numel(),
            )
            runs["quantise_fp8"] = (lambda: quantise_rows_triton(x), x.nbytes + x.numel())
        for name, (run, num_bytes) in runs.items():
            self._add(name, f"{rows} rows", seconds(device, run), num_bytes=num_bytes)

    def sampling(self) -> None:
        rows, size, device = 64, 128_256, self._device
        logits = torch.randn(rows, size, device=device).to(self._dtype)
        uniforms = torch.rand(rows, device=device)
        operations = TritonOperations()
        for name, heat, k, p in (
            ("greedy", 0.0, 0, 1.0),
            ("temperature", 0.8, 0, 1.0),
            ("top-k 40, top-p 0.9", 0.8, 40, 0.9),
        ):
            draws = Draws(
                torch.full((rows,), heat, device=device),
                torch.full((rows,), k, dtype=torch.int32, device=device),
                torch.full((rows,), p, device=device),
                uniforms,
                torch.zeros(rows, device=device),
            )
            spent = seconds(device, lambda d=draws: operations.sample(logits, d))
            self._add("sampling", f"{name}, {rows} rows", spent, num_bytes=float(logits.nbytes))
        targets = torch.arange(rows, device=device)
        for top in (0, 5):
            spent = seconds(device, lambda n=top: operations.logprobs(logits, targets, n))
            self._add("logprobs", f"top {top}, {rows} rows", spent, num_bytes=float(logits.nbytes))
