"""Log-probabilities in Triton, without a table of them and without sorting: see
``kernels.logprobs``.

The likeliest tokens are found one after the other, each as the first, in the order of logits and
ids, behind the one before; a row stays in the device's cache meanwhile.

Invariant: one program to a row, sums in a fixed order: a row's numbers are the same in any company.

Device: pure function of its tensors.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.gpu.sampling import TILE, order_keys


@triton.jit(do_not_specialize=["num_top"])
def logprobs_kernel(
    logits, targets, chosen, ids, values, stride, size, num_top, TILE: tl.constexpr
):
    """Grid (rows)."""
    row = tl.program_id(0)
    logits += row.to(tl.int64) * stride
    peak = tl.full([], float("-inf"), tl.float32)
    for start in range(0, size, TILE):
        columns = start + tl.arange(0, TILE)
        held, _ = order_keys(logits, columns, columns < size)
        peak = tl.maximum(peak, tl.max(held, axis=0))
    total = 0.0
    for start in range(0, size, TILE):
        columns = start + tl.arange(0, TILE)
        inside = columns < size
        held, _ = order_keys(logits, columns, inside)
        total += tl.sum(tl.where(inside, tl.exp(held - peak), 0.0), axis=0)
    log_total = peak + tl.log(total)
    target = tl.load(logits + tl.load(targets + row)).to(tl.float32)
    tl.store(chosen + row, target - log_total)
    previous = tl.full([], 2147483647, tl.int32)
    last = tl.full([], -1, tl.int32)
    for place in range(0, num_top):
        best = tl.full([], -2147483648, tl.int32)
        token = tl.full([], 0, tl.int32)
        for start in range(0, size, TILE):
            columns = start + tl.arange(0, TILE)
            inside = columns < size
            _, keys = order_keys(logits, columns, inside)
            behind = inside & ((keys < previous) | ((keys == previous) & (columns > last)))
            most = tl.max(tl.where(behind, keys, -2147483648), axis=0)
            first = tl.min(tl.where(behind & (keys == most), columns, size), axis=0)
            token = tl.where(most > best, first, token)
            best = tl.maximum(best, most)
        held = tl.load(logits + token).to(tl.float32)
        tl.store(ids + row * num_top + place, token.to(tl.int64))
        tl.store(values + row * num_top + place, held - log_total)
        previous = best
        last = token


def token_logprobs_triton(
    logits: torch.Tensor, targets: torch.Tensor, num_top: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Shapes as in ``kernels.logprobs``; rows of logits have last stride 1."""
    rows, size = logits.shape
    wanted = min(num_top, size)
    chosen = torch.empty(rows, dtype=torch.float32, device=logits.device)
    ids = torch.empty((rows, wanted), dtype=torch.int64, device=logits.device)
    values = torch.empty((rows, wanted), dtype=torch.float32, device=logits.device)
    if rows:
        logprobs_kernel[(rows,)](
            logits,
            targets.contiguous(),
            chosen,
            ids,
            values,
            logits.stride(0),
            size,
            wanted,
            TILE=min(TILE, triton.next_power_of_2(size)),
        )
    return chosen, ids, values
