"""Which programs a served step asks Triton's compiler for, without a compiler or a device: a driver
that is none names the target, and a hook of Triton's takes note and compiles nothing.

A program that only a later step needs is compiled while requests wait.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

PROGRAM = f"""
import dataclasses
import sys
import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

class NoDriver:
    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

asked = set()

def note(*, key, fn, **rest):
    asked.add((fn.name.rpartition(".")[2], key))
    return True

driver.set_active(NoDriver())
triton.knobs.runtime.jit_cache_hook = note
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "tests" / "gpu")!r}]

import engine
from gpu_worker.model.operations import TritonOperations
from gpu_worker.inputs import PenaltyBatch, PromptLogprobRequest
from gpu_worker.blank_steps import blank_decodes
from gpu_worker.runner import ModelRunner
from random_weights import RandomWeights, llama

# Nothing is computed, so nothing that is sampled is a token.
sample = TritonOperations.sample

def sample_first(self, logits, draws):
    tokens, finite = sample(self, logits, draws)
    return torch.zeros_like(tokens), finite

TritonOperations.sample = sample_first
engine.Loop._collect = lambda self: self._pending.popleft()

for options in (
    {{}}, {{"batch_invariant": True}}, {{"quantization": "fp8", "kv_cache_dtype": "fp8"}}
):
    config = llama(256, 512, 1, (8, 2, 64), 1024, tied=False)
    runner = ModelRunner(
        RandomWeights(config, torch.device("cpu")), "bfloat16", num_blocks=200, block_size=16,
        max_model_len=512, progress=lambda fraction, text: None, native="off",
        operations="triton", max_num_seqs=17, **options,
    )
    asked.clear()
    runner.warm_up()
    known = set(asked)
    for count in (1, 2, 17):
        requests = engine.requests(config, count, (1, 200), 3)
        # A replay launches nothing by itself; here every step does.
        runner._steps._graphs = None
        engine.Loop(runner, 17, 90).run(requests)
        entries = np.zeros(16 * count, dtype=np.int32)
        penalties = PenaltyBatch(entries, entries, entries, np.ones((count, 3), dtype=np.float32))
        blank = blank_decodes(count)
        wanted = np.arange(count, dtype=np.int32)
        sampling = dataclasses.replace(blank.sampling, num_logprobs=wanted)
        request = PromptLogprobRequest(0, 1, entries[:1], count)
        runner.submit(
            dataclasses.replace(
                blank, sampling=sampling, penalties=penalties, prompt_logprobs=(request,)
            )
        )
    for name, _ in sorted(asked - known):
        print("late", name)
    print(len({{name for name, _ in known}}), len(known))
"""


@pytest.mark.timeout(180)
def test_no_program_is_compiled_after_warm_up() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "late" not in done.stdout, done.stdout
    counts = [tuple(map(int, line.split())) for line in done.stdout.splitlines()]
    assert len(counts) == 3 and all(kernels >= 6 for kernels, _ in counts), done.stdout
