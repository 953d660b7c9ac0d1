"""The device side works where the services' packages are not installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ALLOWED = ("torch", "triton", "numpy", "safetensors", "gpu_worker", "kernels", "services")
SCRIPT = ("check_gpu", "correctness", "engine", "random_weights", "report", "speed")

PROGRAM = f"""
import sys

class OnlyThese:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top in {ALLOWED + SCRIPT} or top in sys.stdlib_module_names:
            return None
        frame = sys._getframe(1)
        while "importlib" in frame.f_code.co_filename:
            frame = frame.f_back
        # What torch imports is torch's, also from an environment within this directory.
        importer = frame.f_code.co_filename
        if importer.startswith({str(ROOT)!r} + "/") and not importer.startswith(sys.prefix + "/"):
            raise ImportError("our own " + importer + " imports " + name)
        return None

sys.meta_path.insert(0, OnlyThese())
sys.path.insert(0, {str(ROOT / "tests" / "gpu")!r})
import gpu_worker.check
import gpu_worker.runner
import gpu_worker.sampler
import gpu_worker.model.llama
import check_gpu
from kernels.gpu import attention, linear, rms_norm, rope_write_kv, sampling, silu_mul
try:
    import gpu_worker.executor
except ImportError as error:
    print(error)
"""


@pytest.mark.timeout(180)
def test_torch_triton_numpy_and_safetensors_are_enough() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    # The gate can close.
    assert "imports msgspec" in done.stdout
