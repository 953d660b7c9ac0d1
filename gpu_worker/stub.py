"""The worker without a model: steps of a fixed length, tokens from the shadow. For measuring
everything else.

Device in name only: sleeps where a model would compute.
"""

from __future__ import annotations

import time

from gpu_worker.inputs import StepInputs, StepOutputs
from gpu_worker.mirror import CopyLists
from gpu_worker.shadow import ShadowModel


class StubModel:
    """`step_s`: how long every step takes, the shadow's own work included."""

    def __init__(self, shadow: ShadowModel, step_s: float) -> None:
        self._shadow = shadow
        self._step_s = step_s

    def copy_blocks(self, copies: CopyLists) -> None:
        self._shadow.copy_blocks(copies)

    def execute(self, inputs: StepInputs) -> StepOutputs:
        end = time.monotonic() + self._step_s
        outputs = self._shadow.execute(inputs)
        time.sleep(max(0.0, end - time.monotonic()))
        return outputs
