"""Penalties in Triton: see ``kernels.penalties``.

Invariants: one program to some entries, each of which changes a place of its own; offsets are int64
before they are multiplied.

Device: changes its logits in place.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

ENTRIES = 256
"""Of one program."""


@triton.jit(do_not_specialize=["num_entries"])
def penalties_kernel(
    logits, rows, token_ids, counts, factors, stride, num_entries, ENTRIES: tl.constexpr
):
    """Grid (tiles of entries); factors: repetition, presence and frequency of each row."""
    entries = tl.program_id(0) * ENTRIES + tl.arange(0, ENTRIES)
    inside = entries < num_entries
    row = tl.load(rows + entries, mask=inside, other=0).to(tl.int64)
    token = tl.load(token_ids + entries, mask=inside, other=0).to(tl.int64)
    count = tl.load(counts + entries, mask=inside, other=0)
    repetition = tl.load(factors + row * 3, mask=inside, other=1.0)
    presence = tl.load(factors + row * 3 + 1, mask=inside, other=0.0)
    frequency = tl.load(factors + row * 3 + 2, mask=inside, other=0.0)
    at = logits + row * stride + token
    held = tl.load(at, mask=inside, other=0.0)
    held = tl.where(held > 0.0, held / repetition, held * repetition)
    held = held - tl.where(count > 0, presence, 0.0) - frequency * count.to(tl.float32)
    tl.store(at, held, mask=inside)


def apply_penalties_triton(
    logits: torch.Tensor,
    rows: torch.Tensor,
    token_ids: torch.Tensor,
    counts: torch.Tensor,
    factors: torch.Tensor,
) -> None:
    """Shapes as in ``kernels.penalties``; logits have last stride 1, the rest is contiguous."""
    num_entries = rows.shape[0]
    if num_entries:
        penalties_kernel[(triton.cdiv(num_entries, ENTRIES),)](
            logits,
            rows,
            token_ids,
            counts,
            factors,
            logits.stride(0),
            num_entries,
            ENTRIES=ENTRIES,
        )
