"""Host memory below the KV cache: one slot keeps one block of all layers, keys and values together.

Invariants: copies out come before copies in, and both before what the step computes; a slot is one
run of memory, so that a block crosses the bus in one transfer; beside a GPU the memory is pinned
and all copies are queued on the current stream, which keeps their order without waiting.

Device: allocates host memory, reads and writes the cache tensors.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

MAX_STAGED_BLOCKS = 64
"""Blocks gathered on the device at once: 64 blocks of 2 MiB are 128 MiB beside the cache."""

MEASURED_COPIES = 8


class HostPool:
    """`tensors`: (num_blocks, ...) each, all of one shape, type and device. `num_slots` 0: off."""

    def __init__(self, tensors: Sequence[torch.Tensor], num_slots: int) -> None:
        first = tensors[0]
        self._tensors = list(tensors)
        self._device = first.device
        self.num_slots = num_slots
        shape = (num_slots, len(self._tensors), *first.shape[1:])
        self._slots = torch.zeros(shape, dtype=first.dtype, pin_memory=first.is_cuda)

    def copy_out(self, blocks: torch.Tensor, slots: torch.Tensor) -> None:
        """blocks, slots: (n) int32 on the host; slot i gets what block i holds now."""
        for start in range(0, len(blocks), MAX_STAGED_BLOCKS):
            chunk = slice(start, start + MAX_STAGED_BLOCKS)
            index = blocks[chunk].to(self._device, torch.int64)
            staged = torch.stack([tensor.index_select(0, index) for tensor in self._tensors], 1)
            for block, slot in zip(staged, slots[chunk].tolist(), strict=True):
                self._slots[slot].copy_(block, non_blocking=True)

    def copy_in(self, slots: torch.Tensor, blocks: torch.Tensor) -> None:
        """slots, blocks: (n) int32 on the host; block i gets what slot i holds."""
        for start in range(0, len(blocks), MAX_STAGED_BLOCKS):
            chunk = slice(start, start + MAX_STAGED_BLOCKS)
            index = blocks[chunk].to(self._device, torch.int64)
            shape = (len(index), *self._slots.shape[1:])
            staged = torch.empty(shape, dtype=self._slots.dtype, device=self._device)
            for block, slot in zip(staged, slots[chunk].tolist(), strict=True):
                block.copy_(self._slots[slot], non_blocking=True)
            for at, tensor in enumerate(self._tensors):
                tensor.index_copy_(0, index, staged[:, at])

    def measure_us(self) -> int:
        """Microseconds to bring one block in, at least 1; 0 where there is no slot.

        Copies an empty slot into the null block, which stays zero. Run before the first step.
        """
        if not self.num_slots:
            return 0
        slots = torch.zeros(1, dtype=torch.int32)
        self.copy_in(slots, slots)
        self._wait()
        started = time.perf_counter_ns()
        for _ in range(MEASURED_COPIES):
            self.copy_in(slots, slots)
        self._wait()
        return max(1, (time.perf_counter_ns() - started) // (1000 * MEASURED_COPIES))

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
