"""Which queries attend to which blocks: worked out once for a step, used by every layer.

Invariants: block ids past a sequence's length are replaced before they are used; a single query is
padded by a rule that knows its own sequence's length and nothing else, so its result has the same
bits in any company.

Device: builds small index tensors.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

MIN_PADDED_LENGTH = 128
LENGTHS_PER_OCTAVE = 4
"""Padded lengths are multiples of 128, and from 1,024 on four between a power of two and the next:
at most a quarter is padding there, and few groups are needed."""

MAX_GROUP_ELEMENTS = 1 << 20
"""Keys gathered at once for a group, in elements: 4 MiB of float32 beside as many values, which the
processor's cache still holds when they are multiplied. Four times as much took 2.5 times as long
(float32, 64 sequences of 300 tokens, 2 cores)."""


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """One sequence: packed query rows [start, end), and ``length`` keys.

    row_ids: (num_kv_heads * num_blocks) int64 - (block, head) pairs as block * num_kv_heads + head
    """

    start: int
    end: int
    length: int
    row_ids: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class SingleGroup:
    """Sequences with one query each, padded to one length.

    rows:    (n) int64 - their packed query rows
    row_ids: (n * num_kv_heads * num_blocks) int64, as in Chunk
    mask:    (n * num_kv_heads, 1, padded_length), 0 where there is a key and -inf where not
    members: the same sequences one by one
    """

    rows: torch.Tensor
    row_ids: torch.Tensor
    mask: torch.Tensor
    members: tuple[Chunk, ...]


@dataclass(frozen=True, slots=True, eq=False)
class BatchLayout:
    """A step's batch: every packed row is in exactly one of chunks, singles and empty.

    groups: the singles again, grouped
    empty:  row ranges of sequences without keys
    """

    chunks: tuple[Chunk, ...]
    singles: tuple[Chunk, ...]
    groups: tuple[SingleGroup, ...]
    empty: tuple[tuple[int, int], ...]


def plan_attention(
    cu_seqlens_q: torch.Tensor,
    seqlens_k: torch.Tensor,
    block_table: torch.Tensor,
    k_cache: torch.Tensor,
) -> BatchLayout:
    """The layout of a step, from the index tensors of ``varlen_paged_attention``.

    k_cache: any layer's, for its shape and dtype
    """
    block_size, num_kv_heads, head_dim = k_cache.shape[1:]
    boundaries, lengths = cu_seqlens_q.tolist(), seqlens_k.tolist()
    heads = torch.arange(num_kv_heads, device=block_table.device).view(1, num_kv_heads, 1)
    row_ids = block_table.long().unsqueeze(1) * num_kv_heads + heads
    chunks: list[Chunk] = []
    empty: list[tuple[int, int]] = []
    grouped: dict[int, list[Chunk]] = {}
    for index, length in enumerate(lengths):
        start, end = boundaries[index], boundaries[index + 1]
        if end == start:
            continue
        if length == 0:
            empty.append((start, end))
            continue
        own = row_ids[index, :, : -(-length // block_size)]
        chunk = Chunk(start, end, length, own.reshape(-1))
        if end - start > 1:
            chunks.append(chunk)
        else:
            grouped.setdefault(-(-padded_length(length) // block_size), []).append(chunk)
    groups: list[SingleGroup] = []
    for num_blocks, members in sorted(grouped.items()):
        limit = max(1, MAX_GROUP_ELEMENTS // (num_kv_heads * num_blocks * block_size * head_dim))
        for first in range(0, len(members), limit):
            part = tuple(members[first : first + limit])
            groups.append(_group(part, num_blocks, k_cache))
    singles = tuple(chunk for group in groups for chunk in group.members)
    return BatchLayout(tuple(chunks), singles, tuple(groups), tuple(empty))


def padded_length(length: int) -> int:
    """The length that a single query's keys are padded to: 1 -> 128, 600 -> 640, 1100 -> 1280."""
    octave = 1 << (length - 1).bit_length()
    step = max(MIN_PADDED_LENGTH, octave // (2 * LENGTHS_PER_OCTAVE))
    return -(-length // step) * step


def _group(members: tuple[Chunk, ...], num_blocks: int, k_cache: torch.Tensor) -> SingleGroup:
    block_size, num_kv_heads = k_cache.shape[1], k_cache.shape[2]
    device = k_cache.device
    padded = []
    for chunk in members:
        own = chunk.row_ids.view(num_kv_heads, -1)
        # Padding repeats the first block, which holds keys that are known to be readable.
        filler = own[:, :1].expand(-1, num_blocks - own.shape[1])
        padded.append(torch.cat((own, filler), dim=1))
    lengths = torch.tensor([chunk.length for chunk in members], device=device).view(-1, 1, 1)
    beyond = torch.arange(num_blocks * block_size, device=device) >= lengths
    mask = torch.zeros(beyond.shape, dtype=k_cache.dtype, device=device)
    mask.masked_fill_(beyond, float("-inf"))
    return SingleGroup(
        rows=torch.tensor([chunk.start for chunk in members], device=device),
        row_ids=torch.stack(padded).reshape(-1),
        mask=mask.repeat_interleave(num_kv_heads, dim=0),
        members=members,
    )
