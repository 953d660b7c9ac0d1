"""Requests that kill the worker, for tests: a marker token computed, and the process is gone.

Pure: what dying means is the caller's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np

from gpu_worker.inputs import CopyLists, StepInputs, StepOutputs


class WorkerDied(Exception):
    """Where a process cannot die, in a simulation."""


class PoisonedModel:
    """`model`, which does not survive a step that computes each of `markers`.

    One marker is a poison; two, in the prompts of two requests, kill only in company.
    """

    def __init__(self, model: Any, markers: Sequence[int], die: Callable[[], NoReturn]) -> None:
        self._model = model
        self._markers = tuple(markers)
        self._die = die

    def copy_blocks(self, copies: CopyLists) -> None:
        self._model.copy_blocks(copies)

    def execute(self, inputs: StepInputs) -> StepOutputs:
        if np.isin(self._markers, inputs.input_ids).all():
            self._die()
        outputs: StepOutputs = self._model.execute(inputs)
        return outputs
