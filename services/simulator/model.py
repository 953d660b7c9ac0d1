"""The shadow model with marked requests: some make the worker die, some make logits that are not
finite; with blocks whose content is not finite, and in a memory that may be short.

A request is known by its sampling seed. Slots that a failed row wrote are spoilt, so that whoever
reads them later answers wrong. Whoever reads a slot that is not finite has no finite logits, and
what it writes is not finite either.

Pure: numpy only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import numpy as np

from gpu_worker.executor import EngineShape
from gpu_worker.inputs import StepInputs, StepOutputs
from gpu_worker.poison import WorkerDied
from gpu_worker.shadow import ShadowModel

VOCAB_SIZE: Final = 512
_SPOILT: Final = np.int32(VOCAB_SIZE + 7)
_NOT_FINITE: Final = np.int32(VOCAB_SIZE + 9)


class Mark(StrEnum):
    """deadly: the worker dies whenever it computes it; only in company: where any other runs too;
    together: where two of these do.
    """

    NAN = "nan"
    DEADLY = "deadly"
    DEADLY_IN_COMPANY = "deadly in company"
    DEADLY_TOGETHER = "deadly together"


@dataclass(slots=True)
class Memory:
    """Of every worker: tokens of the largest step that fits, None where all do; num_unfit: steps
    that did not.
    """

    tokens: int | None = None
    num_unfit: int = 0

    def take(self, num_tokens: int) -> None:
        if self.tokens is not None and num_tokens > self.tokens:
            self.num_unfit += 1
            raise MemoryError(f"{num_tokens} tokens in a memory for {self.tokens}")


class MarkedModel(ShadowModel):
    """marks: by seed, and from which length of its sequence on it counts. victims: seeds that have
    read what is not finite, added to.
    """

    def __init__(
        self,
        shape: EngineShape,
        marks: Mapping[int, tuple[Mark, int]],
        victims: set[int],
        memory: Memory,
    ) -> None:
        super().__init__(
            num_blocks=shape.num_blocks,
            block_size=shape.block_size,
            vocab_size=shape.vocab_size,
            host_blocks=shape.host_blocks,
        )
        self._marks = marks
        self._victims = victims
        self._memory = memory
        self._is_spoilt = False

    def spoil(self, block_id: int) -> None:
        """The content of `block_id` is not finite any more."""
        self._is_spoilt = True
        self._tokens.reshape(-1, self.block_size)[block_id] = _NOT_FINITE

    def execute(self, inputs: StepInputs) -> StepOutputs:
        self._memory.take(len(inputs.input_ids))
        outputs = self._execute(inputs)
        return self._spread(inputs, outputs) if self._is_spoilt else outputs

    def _spread(self, inputs: StepInputs, outputs: StepOutputs) -> StepOutputs:
        """Rows that read what is not finite write and sample what is not."""
        read: set[int] = set()
        for row, length in enumerate(inputs.seqlens_k.tolist()):
            if np.any(self._tokens[self._slots(inputs, row, length)] == _NOT_FINITE):
                start, end = inputs.cu_seqlens_q[row], inputs.cu_seqlens_q[row + 1]
                self._tokens[inputs.slot_mapping[start:end]] = _NOT_FINITE
                read.add(row)
        finite = outputs.finite.copy()
        for index, row in enumerate(self._rows_of(inputs).tolist()):
            if row in read:
                finite[index] = False
                self._victims.add(int(inputs.sampling.seed[index]))
        return dataclasses.replace(outputs, finite=finite)

    def _execute(self, inputs: StepInputs) -> StepOutputs:
        if not self._marks:
            return super().execute(inputs)
        rows = self._rows_of(inputs)
        spoilt: list[int] = []
        num_together = 0
        for index, (row, seed) in enumerate(
            zip(rows.tolist(), inputs.sampling.seed.tolist(), strict=True)
        ):
            mark, length = self._marks.get(seed, (None, 0))
            if mark is None or inputs.seqlens_k[row] < length:
                continue
            if mark is Mark.DEADLY or (mark is Mark.DEADLY_IN_COMPANY and len(rows) > 1):
                raise WorkerDied
            num_together += mark is Mark.DEADLY_TOGETHER
            if num_together > 1:
                raise WorkerDied
            if mark is Mark.NAN:
                spoilt.append(index)
        outputs = super().execute(inputs)
        return self._spoil(inputs, outputs, rows, spoilt) if spoilt else outputs

    def _spoil(
        self, inputs: StepInputs, outputs: StepOutputs, rows: np.ndarray, spoilt: list[int]
    ) -> StepOutputs:
        finite, token_ids = outputs.finite.copy(), outputs.token_ids.copy()
        finite[spoilt], token_ids[spoilt] = False, 0
        for row in rows[spoilt].tolist():
            start, end = inputs.cu_seqlens_q[row], inputs.cu_seqlens_q[row + 1]
            self._tokens[inputs.slot_mapping[start:end]] = _SPOILT
        return dataclasses.replace(outputs, finite=finite, token_ids=token_ids)
