"""What torch and the system raise where there is no memory, and what the runner makes of it."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gpu_worker.executor import EngineShape, Executor
from gpu_worker.memory import is_out_of_memory, raises_memory_error
from gpu_worker.runner import ModelRunner
from services.contracts.step import Attach
from services.contracts.vectors import unpack
from tests.unit.gpu_worker.plans import join, plan

PETABYTE = 1 << 50


@pytest.mark.parametrize("allocate", [lambda: torch.empty(PETABYTE), lambda: np.empty(PETABYTE)])
def test_a_real_allocation_that_fails_is_a_memory_error(allocate: Any) -> None:
    with pytest.raises(MemoryError) as caught:
        raises_memory_error(allocate)()
    assert caught.value.__context__ is None, "it would keep the frames of the step alive"


def test_other_errors_pass() -> None:
    @raises_memory_error
    def broken() -> None:
        torch.zeros(2) @ torch.zeros(3)

    with pytest.raises(RuntimeError, match="size") as caught:
        broken()
    assert not is_out_of_memory(caught.value)
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert is_out_of_memory(RuntimeError("CUBLAS_STATUS_ALLOC_FAILED"))
    assert not is_out_of_memory(ValueError("out of memory"))


def test_what_the_step_had_taken_is_given_back() -> None:
    taken: list[weakref.ref[torch.Tensor]] = []

    @raises_memory_error
    def step() -> None:
        tensor = torch.zeros(1000)
        taken.append(weakref.ref(tensor))
        torch.empty(PETABYTE)

    with pytest.raises(MemoryError):
        step()
    gc.collect()
    assert taken[0]() is None


def test_the_worker_says_so_and_serves_on_in_the_next_epoch(
    tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = ModelRunner(
        tiny_gguf,
        "float32",
        num_blocks=40,
        block_size=4,
        max_model_len=None,
        progress=lambda fraction, text: None,
    )
    shape = EngineShape(4, runner.max_model_len, 4, 40, runner.config.vocab_size)
    worker = Executor(runner, 1, shape)
    first = {"reset": True, "joins": [join(0, [7, 8, 9], [1])], "chunks": {0: 3}}
    worker.attach(Attach("scheduler-0", "a1", 0))
    right = unpack(worker.run(plan(1, **first)).token_ids).tolist()
    worker.attach(Attach("scheduler-0", "a2", 1))
    with monkeypatch.context() as full:
        full.setattr(runner._steps, "submit", lambda inputs: torch.empty(PETABYTE))
        result = worker.run(plan(1, epoch=2, **first))
    assert result.out_of_memory and not result.token_ids
    worker.attach(Attach("scheduler-0", "a3", 2))
    again = worker.run(plan(1, epoch=3, **first))
    assert not again.out_of_memory and unpack(again.token_ids).tolist() == right
