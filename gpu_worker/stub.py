"""The worker without a model: steps of a fixed length, tokens from the shadow. For measuring
everything else.

Device in name only: sleeps where a model would compute.
"""

from __future__ import annotations

import time
from typing import Final

from gpu_worker.inputs import CopyLists, StepInputs, StepOutputs
from gpu_worker.shadow import ShadowModel

# What a device does while the next step is prepared: a step that is ready so soon after the end of
# the one before begins at that end, as the next launch in a queue would.
HIDDEN_S: Final = 0.001


class StubModel:
    """`step_s`: how long every step takes, the shadow's own work included."""

    def __init__(self, shadow: ShadowModel, step_s: float) -> None:
        self._shadow = shadow
        self._step_s = step_s
        self._busy_until = 0.0

    def copy_blocks(self, copies: CopyLists) -> None:
        self._shadow.copy_blocks(copies)

    def execute(self, inputs: StepInputs) -> StepOutputs:
        now = time.monotonic()
        start = self._busy_until if now - self._busy_until < HIDDEN_S else now
        self._busy_until = start + self._step_s
        outputs = self._shadow.execute(inputs)
        time.sleep(max(0.0, self._busy_until - time.monotonic()))
        return outputs
