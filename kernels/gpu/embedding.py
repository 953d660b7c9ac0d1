"""The rows of a table that tokens name, in Triton: see ``kernels.embedding``.

Invariant: ids are int64 before they are multiplied, so a table may have more than 2^31 elements.

Device: pure function of its tensors.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

COLUMNS = 1024


@triton.jit
def embedding_kernel(table, token_ids, out, stride, size, COLUMNS: tl.constexpr):
    """Grid (tokens, column tiles)."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < size
    row = tl.load(token_ids + token).to(tl.int64)
    held = tl.load(table + row * stride + columns, mask=inside, other=0.0)
    tl.store(out + token * size + columns, held, mask=inside)


def embed_triton(table: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """table (vocab_size, size), last stride 1; an id outside it is the caller's to refuse: nothing
    is read back from the device.
    """
    num_tokens, size = token_ids.shape[0], table.shape[1]
    out = torch.empty((num_tokens, size), dtype=table.dtype, device=table.device)
    if num_tokens:
        tile = min(COLUMNS, triton.next_power_of_2(size))
        embedding_kernel[(num_tokens, triton.cdiv(size, tile))](
            table, token_ids.contiguous(), out, table.stride(0), size, COLUMNS=tile
        )
    return out
