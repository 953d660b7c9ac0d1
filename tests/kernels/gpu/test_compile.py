"""Every Triton kernel compiles to machine code for GPUs, which needs none: the interpreter takes
programs that the compiler refuses.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

# In a process of its own: here the kernels are the interpreter's.
PROGRAM = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from kernels.gpu import attention, embedding, linear, logprobs, penalties, quantise_fp8
from kernels.gpu import rms_norm, rope_write_kv, sampling, silu_mul

X, F, I, L, B, E = "*bf16", "*fp32", "*i32", "*i64", "*i8", "*fp8e4nv"
ATTENTION = dict(
    q=X, pool=(X, X, F, F), index=(I, I, I), extras=(F, F), parts=(F, F, F), results=(X, F),
    q_strides=("i64", "i64"), pool_strides=("i64",) * 12, out_strides=("i64",) * 3,
    table_stride="i64", first_seq="i32", num_seqs="i32",
    variant=("fp32", "fp32", "i32"), cu_seqlens_q=I,
)
attention_sizes = dict(
    GROUP=4, SEGMENTS=16, SINKS=True, LSE=True, KIND=(True, True, True, 0), NUM_HEADS=32
)
KERNELS = {
    "single": (attention.single_kernel, ATTENTION, attention_sizes | dict(
        SHAPE=(16, 128, 128, 16, 32))),
    "single_fp8": (attention.single_kernel, ATTENTION | dict(pool=(E, E, F, F)),
        attention_sizes | dict(KIND=(True, True, True, 2), SHAPE=(16, 128, 128, 16, 32))),
    "chunk_int8": (attention.chunk_kernel, ATTENTION | dict(pool=(B, B, F, F)),
        attention_sizes | dict(
            KIND=(True, True, True, 1), QUERIES=16, SHAPE=(16, 80, 128, 64, 32))),
    "merge": (attention.merge_kernel, ATTENTION, attention_sizes | dict(
        HEAD_DIM=128, HEAD_PAD=128)),
    "rms_norm": (rms_norm.rms_norm_kernel, dict(
        x=X, residual=X, weight=X, total=X, out=X, x_stride="i64", size="i32", epsilon="fp32",
    ), dict(SIZE_PAD=4096, ADDS=True)),
    "quantise_fp8": (quantise_fp8.quantise_fp8_kernel, dict(
        x=X, residual=X, weight=X, total=X, values=E, scales=F, x_stride="i64", size="i32",
        epsilon="fp32",
    ), dict(SIZE_PAD=4096, ADDS=True, NORMS=True, FORMAT=2)),
    "silu_mul": (silu_mul.silu_mul_kernel, dict(gate_up=X, out=X, stride="i64", size="i32"), dict(
        COLUMNS=1024)),
    "rope_write_kv": (rope_write_kv.rope_write_kv_kernel, dict(
        qkv=X, cos_sin=F, caches=(E, E, F, F), slot_mapping=L, qkv_stride="i64",
        cos_sin_stride="i64", pool_strides=("i64",) * 12,
    ), dict(NUM_HEADS=32, NUM_KV_HEADS=8, HEAD_DIM=128, ROTARY=64, BLOCK_SIZE=16, HALF_PAD=32,
            HEAD_PAD=128, FORMAT=2)),
    "linear": (linear.linear_kernel, dict(
        x=X, weight=X, out=X, x_stride="i64", weight_stride="i64", num_rows="i32",
        in_features="i32", out_features="i32",
    ), dict(TILE_ROWS=32, TILE_OUT=128, TILE_IN=64)),
    "embedding": (embedding.embedding_kernel, dict(
        table=X, token_ids=I, out=X, stride="i64", size="i32",
    ), dict(COLUMNS=1024)),
    "logprobs": (logprobs.logprobs_kernel, dict(
        logits=X, targets=L, chosen=F, ids=L, values=F, stride="i64", size="i32", num_top="i32",
    ), dict(TILE=4096)),
    "penalties": (penalties.penalties_kernel, dict(
        logits=F, rows=I, token_ids=I, counts=I, factors=F, stride="i64", num_entries="i32",
    ), dict(ENTRIES=256)),
    "sampling": (sampling.sample_kernel, dict(
        logits=F, temperature=F, top_k=I, top_p=F, uniforms=F, min_p=F, tokens=L,
        stride="i64", size="i32", min_temperature="fp32",
    ), dict(TILE=4096)),
}
for name, (function, signature, sizes) in KERNELS.items():
    names = function.arg_names
    source = ASTSource(
        fn=function,
        signature={n: "constexpr" if n in sizes else signature[n] for n in names},
        constexprs={(names.index(n),): value for n, value in sizes.items() if n in names},
    )
    built = triton.compile(source, target=GPUTarget("cuda", 90, 32))
    print(name, len(built.asm["cubin"]), built.metadata.shared)
"""

SHARED_BYTES = 96 * 1024
"""A kernel that wants more would leave room for one program at a time on most devices."""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_they_compile() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    built = [line.split() for line in done.stdout.splitlines()]
    assert len(built) == 13
    for name, size, shared in built:
        assert int(size) > 1000, name
        assert int(shared) <= SHARED_BYTES, name
