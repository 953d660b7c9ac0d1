"""Steps in which every sequence decodes, captured once for each of a few batch sizes and replayed.

A step is padded to the next size: a padded lane reads no key, writes nowhere, and its token is kept
for no lane. Chunks of prompts run as they come, without a graph.

Invariants: a captured step reads its inputs where its first run found them; what a replay returns
is valid until the next one. Without a GPU the same padded step runs, operation by operation.

Device: captures and replays work on the device.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from gpu_worker.inputs import NO_LOGPROBS, SamplingBatch, StepInputs
from gpu_worker.staging import ALIGNED, COLUMNS, Staging, StepTensors

MAX_GRAPH_SIZE = 512
"""Sequences beyond which a device is busy enough to hide the launches of single operations."""

T = TypeVar("T")


def graph_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """1, 2, 4, 8, then in steps that grow with the size, up to the most sequences: 19 at most.

    10 -> 1 2 4 8 10; 100 -> 1 2 4 8 16 24 32 48 64 96 100
    """
    steps = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512)
    largest = min(max_num_seqs, MAX_GRAPH_SIZE)
    return (*(size for size in steps if size < largest), largest)


def is_all_decodes(inputs: StepInputs) -> bool:
    """Whether every sequence has one token, which is sampled, and nothing else is wanted."""
    num_seqs = inputs.seqlens_k.shape[0]
    return (
        inputs.num_decodes == num_seqs == inputs.logits_rows.shape[0]
        and not inputs.prompt_logprobs
        and inputs.penalties is None
        and bool((inputs.logits_rows == np.arange(num_seqs)).all())
    )


def pad_decodes(inputs: StepInputs, size: int, no_lane: int) -> StepInputs:
    """``inputs`` with so many sequences; those added have no keys and no slot.

    no_lane: the output lane of rows whose token nobody keeps
    """
    num_seqs = inputs.seqlens_k.shape[0]
    if num_seqs == size:
        return inputs

    def pad(array: npt.NDArray[Any], value: int) -> npt.NDArray[Any]:
        padded = np.full((size, *array.shape[1:]), value, dtype=array.dtype)
        padded[:num_seqs] = array
        return padded

    sampling, every = inputs.sampling, np.arange(size + 1, dtype=np.int32)
    in_lanes, out_lanes = inputs.input_lanes, inputs.output_lanes
    return dataclasses.replace(
        inputs,
        input_ids=pad(inputs.input_ids, 0),
        positions=pad(inputs.positions, 0),
        slot_mapping=pad(inputs.slot_mapping, -1),
        cu_seqlens_q=every,
        seqlens_k=pad(inputs.seqlens_k, 0),
        block_table=pad(inputs.block_table, 0),
        num_decodes=size,
        logits_rows=every[:-1],
        input_lanes=None if in_lanes is None else pad(in_lanes, -1),
        output_lanes=None if out_lanes is None else pad(out_lanes, no_lane),
        sampling=SamplingBatch(
            temperature=pad(sampling.temperature, 0),
            top_p=pad(sampling.top_p, 1),
            top_k=pad(sampling.top_k, 0),
            min_p=pad(sampling.min_p, 0),
            seed=pad(sampling.seed, 0),
            position=pad(sampling.position, 0),
            num_logprobs=pad(sampling.num_logprobs, NO_LOGPROBS),
        ),
    )


class DecodeGraphs(Generic[T]):
    """Padded decode steps of one model.

    compute:    a whole step, which reads nothing back from the device
    sizes:      see ``graph_sizes``
    max_blocks: of a sequence; the width of the block table that captured steps read
    no_lane:    see ``pad_decodes``
    """

    def __init__(
        self,
        compute: Callable[[StepTensors], T],
        device: torch.device,
        sizes: tuple[int, ...],
        max_blocks: int,
        no_lane: int,
    ) -> None:
        self._compute = compute
        self._device = device
        self._sizes = sizes
        self._no_lane = no_lane
        # Two words for each column are more than any takes; it must never grow.
        room = sizes[-1] * (max_blocks + 2 * len(COLUMNS)) + (len(COLUMNS) + 1) * (ALIGNED + 1)
        self._staging = Staging(device, no_lane, room)
        table = (sizes[-1], max_blocks)
        self._table = torch.zeros(table, dtype=torch.int32, device=device)
        self._captured: dict[int, Callable[[], T]] = {}
        self._pool: Any = None

    def size_for(self, inputs: StepInputs) -> int | None:
        """The captured size that a step is padded to; None where it runs as it is."""
        if not is_all_decodes(inputs):
            return None
        num_seqs = inputs.seqlens_k.shape[0]
        return next((size for size in self._captured if size >= num_seqs), None)

    def run(self, inputs: StepInputs, size: int) -> T:
        """The step, padded; its rows past those of ``inputs`` mean nothing."""
        self._stage(pad_decodes(inputs, size, self._no_lane))
        return self._captured[size]()

    def capture_all(self, blank: Callable[[int], StepInputs]) -> None:
        """Every size, the largest first, whose memory the others then share.

        blank: so many decodes that write nowhere
        """
        captured = {}
        for size in reversed(self._sizes):
            padded = blank(size)
            self._stage(padded)
            captured[size] = self._capture(padded)
        self._captured = dict(sorted(captured.items()))

    def _stage(self, padded: StepInputs) -> None:
        self._staging.stage(padded)
        size, width = padded.block_table.shape
        self._table[:size, :width].copy_(self._staging.table(padded))

    def _capture(self, padded: StepInputs) -> Callable[[], T]:
        size = padded.seqlens_k.shape[0]
        step = self._staging.tensors(padded)
        step = step._replace(batch=dataclasses.replace(step.batch, block_table=self._table[:size]))
        if self._device.type != "cuda":
            return lambda: self._compute(step)
        # Kernels are compiled and libraries make their plans at the first run, outside the capture.
        self._compute(step)
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            result = self._compute(step)
        self._pool = graph.pool()

        def replay() -> T:
            graph.replay()
            return result

        return replay
