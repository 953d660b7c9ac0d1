"""The pool of KV blocks: keys and values of all layers in one piece of memory.

Invariants: physical order is [block, kv_head, slot, dim], seen as [block, slot, kv_head, dim], so a
head's keys within a block are one run of memory; the pool starts zeroed; block 0 is the null block,
which pads block tables and is never written.

Device: allocates and owns the cache tensors.
"""

from __future__ import annotations

import torch

from kernels.huge_pages import zeros_in_huge_pages
from kernels.kv_bytes import LARGEST, SCALE_BYTES
from services.models.config import ModelConfig


def bytes_per_block(config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """Bytes that one block takes over all layers, keys and values together."""
    per_slot = config.num_kv_heads * _slot_width(config, dtype) * dtype.itemsize
    return 2 * config.num_layers * block_size * per_slot


def _slot_width(config: ModelConfig, dtype: torch.dtype) -> int:
    return config.head_dim + (SCALE_BYTES if dtype in LARGEST else 0)


class KVCache:
    """The pool; ``layer(i)`` gives the logical views that kernels take.

    dtype: that of the model, or one of ``kernels.kv_bytes``, where a slot ends in its scale
    """

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        assert num_blocks >= 2, "the pool needs the null block and at least one other"
        block = (config.num_kv_heads, block_size, _slot_width(config, dtype))
        self.num_blocks = num_blocks
        self.block_size = block_size
        shape = (config.num_layers, 2, num_blocks, *block)
        if device.type == "cpu":
            self._pool = zeros_in_huge_pages(shape, dtype)
        else:
            self._pool = torch.zeros(shape, dtype=dtype, device=device)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Keys and values of every layer, each (num_blocks, num_kv_heads, block_size, head_dim);
        as plain bytes where an element is one, which every operator copies.
        """
        pool = self._pool.view(torch.uint8) if self._pool.itemsize == 1 else self._pool
        return list(pool.flatten(0, 1).unbind(0))

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a layer: (num_blocks, block_size, num_kv_heads, head_dim) views."""
        keys, values = self._pool[index].permute(0, 1, 3, 2, 4).unbind(0)
        return keys, values
