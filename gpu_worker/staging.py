"""A step's arrays as tensors: views of the same memory on the CPU; on a device, everything packed
into one pinned buffer that is copied at once.

Invariants: a pinned buffer is written again only after its copy has ended; where a step's arrays
lie on the device depends on the numbers of tokens, sequences and sampled rows alone, and the block
table is the last, so that a captured step finds its inputs where they were.

Device: copies inputs to the device.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from gpu_worker.inputs import Int32s, StepInputs
from gpu_worker.model.operations import Draws, PackedBatch, draw_uniforms

NUM_BUFFERS = 2
"""Steps in flight: one runs while the next one is prepared."""

MIN_WORDS = 1 << 16

COLUMNS = (
    ("slot_mapping", torch.int64),
    ("input_ids", torch.int32),
    ("positions", torch.int32),
    ("input_lanes", torch.int32),
    ("cu_seqlens_q", torch.int32),
    ("seqlens_k", torch.int32),
    ("logits_rows", torch.int32),
    ("output_lanes", torch.int32),
    ("temperature", torch.float32),
    ("top_k", torch.int32),
    ("top_p", torch.float32),
    ("uniforms", torch.float32),
    ("min_p", torch.float32),
)
"""In the order of the buffer, each beginning at a multiple of ALIGNED words."""

ALIGNED = 4
"""Triton makes another program for pointers that are no multiples of 16 bytes: with columns that
begin anywhere, steps would wait for its compiler again and again.
"""


class StepTensors(NamedTuple):
    """One step on its device.

    logits_rows:  (S) int32
    input_lanes:  (T) int32 or None, output_lanes: (S) int32 or None: see ``StepInputs``
    penalties:    the tensors of ``PenaltyBatch``, or None
    """

    batch: PackedBatch
    logits_rows: torch.Tensor
    draws: Draws
    input_lanes: torch.Tensor | None
    output_lanes: torch.Tensor | None
    penalties: tuple[torch.Tensor, ...] | None


def view_inputs(inputs: StepInputs) -> StepTensors:
    """The arrays as tensors over the same memory; nothing is copied."""
    assert int(inputs.cu_seqlens_q[-1]) == inputs.input_ids.shape[0], "every token has a sequence"
    columns = {
        name: torch.from_numpy(getattr(inputs, name))
        for name in (
            *("slot_mapping", "input_ids", "positions", "cu_seqlens_q", "seqlens_k"),
            *("logits_rows", "block_table"),
        )
    }
    columns["input_lanes"] = _optional(inputs.input_lanes)
    columns["output_lanes"] = _optional(inputs.output_lanes)
    sampling = inputs.sampling
    for name in ("temperature", "top_k", "top_p", "min_p"):
        columns[name] = torch.from_numpy(getattr(sampling, name))
    columns["uniforms"] = torch.from_numpy(draw_uniforms(sampling))
    return _step(columns, inputs)


def _optional(array: Int32s | None) -> Any:
    return None if array is None else torch.from_numpy(array)


def _step(columns: dict[str, Any], inputs: StepInputs) -> StepTensors:
    batch = PackedBatch(
        input_ids=columns["input_ids"],
        positions=columns["positions"],
        slot_mapping=columns["slot_mapping"],
        cu_seqlens_q=columns["cu_seqlens_q"],
        seqlens_k=columns["seqlens_k"],
        block_table=columns["block_table"],
        max_seqlen_q=int(np.diff(inputs.cu_seqlens_q).max()),
        max_seqlen_k=int(inputs.seqlens_k.max()),
        num_decodes=inputs.num_decodes,
    )
    draws = Draws(*(columns[name] for name in Draws._fields))
    lanes = columns["input_lanes"], columns["output_lanes"]
    penalties = None
    if inputs.penalties is not None:
        # In few steps, so they have no place in the buffer.
        device = batch.input_ids.device
        penalties = tuple(torch.from_numpy(column).to(device) for column in inputs.penalties)
    return StepTensors(batch, columns["logits_rows"], draws, *lanes, penalties)


class Staging:
    """Buffers of one device, which grow to the largest step seen.

    no_lane:   what ``output_lanes`` says of a row whose token is kept for no lane
    num_words: room of four bytes each to begin with
    """

    def __init__(self, device: torch.device, no_lane: int, num_words: int = MIN_WORDS) -> None:
        self._device = device
        self._no_lane = no_lane
        self._turn = 0
        self._copied: list[Any] = [None] * NUM_BUFFERS
        self._allocate(num_words)

    def stage(self, inputs: StepInputs) -> None:
        """Pack the arrays and queue their copy; ``tensors`` gives them."""
        arrays = self._arrays(inputs)
        num_words = sum(_room(array.size) for array in arrays)
        if num_words > self._buffer.shape[0]:
            self._allocate(1 << (num_words - 1).bit_length())
        self._turn = (self._turn + 1) % NUM_BUFFERS
        if self._copied[self._turn] is not None:
            self._copied[self._turn].synchronize()
        host = self._hosts[self._turn]
        words: npt.NDArray[np.int32] = host.numpy()
        at = 0
        for array in arrays:
            words[at : at + array.size] = array
            at += _room(array.size)
        self._buffer[:at].copy_(host[:at], non_blocking=True)
        if self._device.type == "cuda":
            self._copied[self._turn] = torch.cuda.Event()
            self._copied[self._turn].record()

    def tensors(self, inputs: StepInputs) -> StepTensors:
        """Where a step of these sizes lies."""
        columns: dict[str, Any] = {}
        at = 0
        for name, dtype in COLUMNS:
            count = _column_length(name, inputs)
            num_words = count * dtype.itemsize // 4
            columns[name] = self._buffer[at : at + num_words].view(dtype)
            at += _room(num_words)
        columns["block_table"] = self.table(inputs)
        return _step(columns, inputs)

    def table(self, inputs: StepInputs) -> torch.Tensor:
        """The block table alone, for a step that finds all else where it was."""
        sizes = (_column_length(name, inputs) * dtype.itemsize // 4 for name, dtype in COLUMNS)
        at = sum(map(_room, sizes))
        table = inputs.block_table
        return self._buffer[at : at + table.size].view(table.shape)

    def _arrays(self, inputs: StepInputs) -> list[Int32s]:
        """Every column as words, then the block table."""
        sampling = inputs.sampling
        arrays: dict[str, npt.NDArray[Any]] = {
            "uniforms": draw_uniforms(sampling),
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p,
            "input_lanes": _or_all(inputs.input_lanes, inputs.input_ids, -1),
            "output_lanes": _or_all(inputs.output_lanes, inputs.logits_rows, self._no_lane),
        }
        columns = [arrays.get(name, getattr(inputs, name, None)) for name, _ in COLUMNS]
        columns.append(inputs.block_table)
        return [np.ascontiguousarray(column).view(np.int32).reshape(-1) for column in columns]

    def _allocate(self, num_words: int) -> None:
        pinned = self._device.type == "cuda"
        self._hosts = [
            torch.zeros(num_words, dtype=torch.int32, pin_memory=pinned) for _ in range(NUM_BUFFERS)
        ]
        self._copied = [None] * NUM_BUFFERS
        self._buffer = torch.zeros(num_words, dtype=torch.int32, device=self._device)


def _room(num_words: int) -> int:
    return -(-num_words // ALIGNED) * ALIGNED


def _or_all(given: Int32s | None, like: Int32s, value: int) -> Int32s:
    return np.full(like.shape, value, dtype=np.int32) if given is None else given


def _column_length(name: str, inputs: StepInputs) -> int:
    """Elements of a column: one for each token, sequence or sampled row."""
    if name in ("slot_mapping", "input_ids", "positions", "input_lanes"):
        return int(inputs.input_ids.shape[0])
    if name == "cu_seqlens_q":
        return int(inputs.cu_seqlens_q.shape[0])
    if name == "seqlens_k":
        return int(inputs.seqlens_k.shape[0])
    return int(inputs.logits_rows.shape[0])
