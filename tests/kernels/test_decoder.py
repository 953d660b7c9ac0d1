"""All layers in one native call against the same operations one by one: equal to the last bit."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from kernels.attention import varlen_paged_attention
from kernels.decoder import DecoderShape, LayerWeights, Matrix, NativeDecoder
from kernels.kv_bytes import quantise_heads
from kernels.linear import make_linear
from kernels.linear_int8 import Int8Linear
from kernels.native import NativeKernels
from kernels.rms_norm import fused_add_rms_norm, rms_norm
from kernels.rope import build_rope_table
from kernels.rope_write_kv import rope_write_kv
from kernels.silu_mul import silu_mul

HIDDEN, BLOCK_SIZE, NUM_BLOCKS = 128, 16, 40
SHAPE = DecoderShape(4, 2, 32, 192, 1e-5, 32**-0.5)
KINDS = ["float32", "bfloat16", "int8", "int8 with int8 KV"]


@dataclass
class Step:
    residual: torch.Tensor
    cos_sin: torch.Tensor
    slots: torch.Tensor
    indices: tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Model:
    def __init__(self, native: NativeKernels, kind: str, num_layers: int = 3) -> None:
        self.native = native
        self.dtype = torch.float32 if kind == "float32" else torch.bfloat16
        if kind == "bfloat16" and native.isa != "avx512bf16":
            pytest.skip("the native linear takes bfloat16 only where products of it are native")
        if kind == "float32" and not native.isa.startswith("avx512"):
            pytest.skip("the native linear takes float32 only with AVX-512")
        self.int8 = kind.startswith("int8")
        self.kv_int8 = kind.endswith("KV")
        self.layers = [self.layer() for _ in range(num_layers)]
        self.final_norm = torch.randn(HIDDEN).to(self.dtype)
        shape = (num_layers, 2, NUM_BLOCKS, SHAPE.num_kv_heads, BLOCK_SIZE)
        pool = torch.full((*shape, SHAPE.head_dim), float("nan"), dtype=self.dtype)
        if self.kv_int8:
            # Bytes of 255 are a scale that is NaN, too.
            pool = torch.full((*shape, SHAPE.head_dim + 4), 255, dtype=torch.uint8)
        self.pool = pool
        views = pool.permute(0, 1, 2, 4, 3, 5)
        self.caches = [(layer[0], layer[1]) for layer in views]

    def layer(self) -> LayerWeights:
        heads = (SHAPE.num_heads + 2 * SHAPE.num_kv_heads) * SHAPE.head_dim
        return LayerWeights(
            input_norm=torch.randn(HIDDEN).to(self.dtype),
            qkv=self.matrix(heads, HIDDEN),
            attention_output=self.matrix(HIDDEN, SHAPE.num_heads * SHAPE.head_dim),
            feed_forward_norm=torch.randn(HIDDEN).to(self.dtype),
            gate_up=self.matrix(2 * SHAPE.intermediate_size, HIDDEN),
            down=self.matrix(HIDDEN, SHAPE.intermediate_size),
        )

    def matrix(self, rows: int, columns: int) -> Matrix:
        weight = (torch.randn(rows, columns) * columns**-0.5).to(self.dtype)
        return Int8Linear(weight, self.native) if self.int8 else make_linear(weight, self.native)

    def decoder(self) -> NativeDecoder:
        return NativeDecoder(self.native, self.layers, self.final_norm, self.caches, SHAPE)

    def one_by_one(self, step: Step) -> torch.Tensor:
        residual, native = step.residual.clone(), self.native
        normed = rms_norm(residual, self.layers[0].input_norm, SHAPE.epsilon, native)
        norms = [layer.input_norm for layer in self.layers[1:]] + [self.final_norm]
        for layer, caches, norm in zip(self.layers, self.caches, norms, strict=True):
            qkv = layer.qkv(normed).view(len(normed), -1, SHAPE.head_dim)
            q = rope_write_kv(qkv, step.cos_sin, *caches, step.slots, native)
            mixed = varlen_paged_attention(
                q,
                *caches,
                *step.indices,
                max_seqlen_q=int(step.indices[0].diff().max()),
                max_seqlen_k=int(step.indices[1].max()),
                scale=SHAPE.scale,
                native=native,
            )
            moved = layer.attention_output(mixed.view(len(normed), -1))
            normed, residual = fused_add_rms_norm(
                moved, residual, layer.feed_forward_norm, SHAPE.epsilon, native
            )
            moved = layer.down(silu_mul(layer.gate_up(normed), native))
            normed, residual = fused_add_rms_norm(moved, residual, norm, SHAPE.epsilon, native)
        return normed


def make_step(model: Model, lengths: list[tuple[int, int]], seed: int = 0) -> Step:
    """Sequences of (new, cached) tokens; what is cached is written to the pool as noise."""
    generator = torch.Generator().manual_seed(seed)
    order = (torch.randperm(NUM_BLOCKS - 1, generator=generator) + 1).tolist()
    table = torch.full((len(lengths), 6), 2**31 - 1, dtype=torch.int32)
    slots, positions, bounds = [], [], [0]
    for row, (new, cached) in enumerate(lengths):
        for i in range(-(-(new + cached) // BLOCK_SIZE)):
            table[row, i] = order.pop()
        where = [
            int(table[row, p // BLOCK_SIZE]) * BLOCK_SIZE + p % BLOCK_SIZE
            for p in range(new + cached)
        ]
        for slot in where[:cached]:
            shape = (*model.pool[:, :, 0, :, 0].shape[:-1], SHAPE.head_dim)
            noise = torch.randn(shape, generator=generator).to(model.dtype)
            stored = quantise_heads(noise) if model.kv_int8 else noise
            model.pool[:, :, slot // BLOCK_SIZE, :, slot % BLOCK_SIZE] = stored
        slots += where[cached:]
        positions += range(cached, cached + new)
        bounds.append(len(slots))
    rope = build_rope_table(SHAPE.head_dim, 128, 10000.0)
    residual = torch.randn(len(slots), HIDDEN, generator=generator).to(model.dtype)
    return Step(
        residual,
        rope[positions].contiguous(),
        torch.tensor(slots),
        (
            torch.tensor(bounds, dtype=torch.int32),
            torch.tensor([new + cached for new, cached in lengths], dtype=torch.int32),
            table,
        ),
    )


def run(decoder: NativeDecoder, step: Step) -> torch.Tensor:
    return decoder(step.residual.clone(), step.cos_sin, step.slots, step.indices).clone()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_threads", [1, 2, 3])
@pytest.mark.parametrize(
    "lengths", [[(1, 20)], [(1, 3), (1, 40), (30, 5), (70, 0)], [(0, 5), (2, 2)]]
)
def test_one_call_is_the_operations_one_by_one(
    native: NativeKernels, kind: str, num_threads: int, lengths: list[tuple[int, int]]
) -> None:
    model = Model(native, kind)
    step = make_step(model, lengths)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(num_threads)
        together = run(model.decoder(), step)
        written = model.pool.clone()
        assert torch.isfinite(together).all()
        assert torch.equal(model.one_by_one(step), together)
        assert torch.equal(model.pool.nan_to_num(), written.nan_to_num())
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_is_the_same_alone_and_in_company(native: NativeKernels, kind: str) -> None:
    model = Model(native, kind)
    decoder = model.decoder()
    step = make_step(model, [(1, 40), (9, 5), (1, 7)])
    together = run(decoder, step)
    bounds, lengths, table = step.indices
    for row in range(3):
        start, end = int(bounds[row]), int(bounds[row + 1])
        alone = Step(
            step.residual[start:end],
            step.cos_sin[start:end],
            step.slots[start:end],
            (
                torch.tensor([0, end - start], dtype=torch.int32),
                lengths[row : row + 1],
                table[row : row + 1],
            ),
        )
        assert torch.equal(run(decoder, alone), together[start:end])


def test_room_grows_with_the_step(native: NativeKernels) -> None:
    model = Model(native, "int8")
    decoder = model.decoder()
    for lengths in ([(1, 0)], [(90, 0), (80, 0)], [(1, 5)]):
        step = make_step(model, lengths)
        assert torch.equal(run(decoder, step), model.one_by_one(step))


def test_a_block_or_slot_outside_the_cache_is_refused(native: NativeKernels) -> None:
    model = Model(native, "int8")
    step = make_step(model, [(1, 20)])
    step.indices[2][0, 1] = NUM_BLOCKS
    with pytest.raises(ValueError, match="outside the pool"):
        run(model.decoder(), step)
    step = make_step(model, [(1, 20)])
    step.slots[0] = NUM_BLOCKS * BLOCK_SIZE
    with pytest.raises(ValueError, match="outside the pool"):
        run(model.decoder(), step)


def test_what_it_supports(native: NativeKernels) -> None:
    model = Model(native, "int8")
    assert NativeDecoder.supports(native, model.layers, model.caches)
    odd = LayerWeights(
        model.layers[0].input_norm,
        lambda x: x,
        model.layers[0].attention_output,
        model.layers[0].feed_forward_norm,
        model.layers[0].gate_up,
        model.layers[0].down,
    )
    assert not NativeDecoder.supports(native, [odd, *model.layers[1:]], model.caches)
    keys, values = model.caches[0]
    moved = [(keys, values.contiguous()), *model.caches[1:]]
    assert not NativeDecoder.supports(native, model.layers, moved)
