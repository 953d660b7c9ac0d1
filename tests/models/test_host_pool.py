"""Blocks that go to host memory and come back are the same bits, in every layer."""

from __future__ import annotations

import pytest
import torch

from gpu_worker.host_pool import MAX_STAGED_BLOCKS, HostPool

BLOCKS, SLOTS = 200, 150


def _tensors(device: str, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    shape = (BLOCKS, 2, 4, 8)
    return [torch.randn(shape, generator=generator).to(device, dtype) for _ in range(6)]


def _index(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _round_trip(device: str, dtype: torch.dtype) -> None:
    tensors = _tensors(device, dtype)
    before = [tensor.clone() for tensor in tensors]
    host = HostPool(tensors, SLOTS)
    count = 2 * MAX_STAGED_BLOCKS + 3
    blocks = torch.randperm(BLOCKS, generator=torch.Generator().manual_seed(2))[:count].int()
    slots = torch.randperm(SLOTS, generator=torch.Generator().manual_seed(3))[:count].int()
    host.copy_out(blocks, slots)
    for tensor in tensors:
        tensor.zero_()
    host.copy_in(slots, blocks)
    for tensor, old in zip(tensors, before, strict=True):
        assert torch.equal(tensor[blocks.long()], old[blocks.long()])
        others = torch.ones(BLOCKS, dtype=torch.bool)
        others[blocks.long()] = False
        assert not tensor[others.to(device)].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_come_back_as_they_went(dtype: torch.dtype) -> None:
    _round_trip("cpu", dtype)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_come_back_as_they_went_beside_a_gpu(dtype: torch.dtype) -> None:
    _round_trip("cuda", dtype)


def test_outs_before_ins_swaps_a_block() -> None:
    tensors = _tensors("cpu", torch.float32)
    old = tensors[0][5].clone()
    host = HostPool(tensors, 4)
    host.copy_out(_index(7), _index(1))
    host.copy_out(_index(5), _index(2))
    host.copy_in(_index(1), _index(5))
    assert torch.equal(tensors[0][5], tensors[0][7])
    host.copy_in(_index(2), _index(5))
    assert torch.equal(tensors[0][5], old)


def test_measuring_leaves_every_block_alone() -> None:
    tensors = _tensors("cpu", torch.float32)
    for tensor in tensors:
        tensor[0] = 0
    before = [tensor.clone() for tensor in tensors]
    assert HostPool(tensors, 4).measure_us() >= 1
    assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))
    assert HostPool(tensors, 0).measure_us() == 0
