"""Writing this step's keys and values into their slots of the paged cache.

Invariants: a negative slot is skipped; the slots of one step are distinct; the block size is that
of the cache, so a slot means the same to whoever computed it.

Device: writes the KV cache in place.
"""

from __future__ import annotations

import torch


def write_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Store row t of k and v at slot s = slot_mapping[t]: offset s % size of block s // size.

    k, v:             (num_tokens, num_kv_heads, head_dim), dtype of the cache
    k_cache, v_cache: (num_blocks, block_size, num_kv_heads, head_dim), any strides
    slot_mapping:     (num_tokens) int64; negative: the row is skipped

    With block_size 16, slot 35 is offset 3 of block 2.
    """
    assert k.shape == v.shape and k.shape[0] == slot_mapping.shape[0], "one slot for each row"
    if slot_mapping.shape[0] == 0:
        return
    # A negative index would count from the end and overwrite the last block.
    if int(slot_mapping.min()) < 0:
        kept = torch.nonzero(slot_mapping >= 0).squeeze(1)
        k, v, slot_mapping = k[kept], v[kept], slot_mapping[kept]
    block_size = k_cache.shape[1]
    blocks = torch.div(slot_mapping, block_size, rounding_mode="floor")
    offsets = slot_mapping - blocks * block_size
    k_cache.index_put_((blocks, offsets), k)
    v_cache.index_put_((blocks, offsets), v)
