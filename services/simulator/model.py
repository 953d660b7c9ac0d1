"""The shadow model with marked requests: some make the worker die, some make logits that are not
finite.

A request is known by its sampling seed. Slots that a failed row wrote are spoilt, so that whoever
reads them later answers wrong.

Pure: numpy only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from enum import StrEnum
from typing import Final

import numpy as np

from gpu_worker.executor import EngineShape
from gpu_worker.inputs import StepInputs, StepOutputs
from gpu_worker.poison import WorkerDied
from gpu_worker.shadow import ShadowModel

VOCAB_SIZE: Final = 512
_SPOILT: Final = np.int32(VOCAB_SIZE + 7)


class Mark(StrEnum):
    """deadly: the worker dies whenever it computes it; only in company: where any other runs too;
    together: where two of these do.
    """

    NAN = "nan"
    DEADLY = "deadly"
    DEADLY_IN_COMPANY = "deadly in company"
    DEADLY_TOGETHER = "deadly together"


class MarkedModel(ShadowModel):
    """marks: by seed, and from which length of its sequence on it counts."""

    def __init__(self, shape: EngineShape, marks: Mapping[int, tuple[Mark, int]]) -> None:
        super().__init__(
            num_blocks=shape.num_blocks,
            block_size=shape.block_size,
            vocab_size=shape.vocab_size,
            host_blocks=shape.host_blocks,
        )
        self._marks = marks

    def execute(self, inputs: StepInputs) -> StepOutputs:
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
