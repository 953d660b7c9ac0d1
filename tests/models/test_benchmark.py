"""`streetcar bench kernels`: figures are there and hang together; no bar on time."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpu_worker import benchmark
from gpu_worker.runner import ModelRunner
from services.models.config import ModelConfig
from tests.models.tiny import Tiny, write_directory


@pytest.fixture
def runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelRunner:
    monkeypatch.setattr(benchmark, "PAIRS", 1)
    monkeypatch.setattr(benchmark, "NUM_LAYERS", 1)
    monkeypatch.setattr(benchmark, "PRODUCT_ROUNDS", 1000)
    monkeypatch.setattr(benchmark, "READ_BYTES", 1 << 20)
    path = write_directory(tmp_path / "tiny", Tiny(intermediate_size=128, num_heads=8))
    runner = ModelRunner(
        path,
        "float32",
        num_blocks=40,
        block_size=4,
        max_model_len=None,
        progress=lambda fraction, text: None,
    )
    if runner.native is None:
        pytest.skip(runner.notices[0])
    return runner


def test_every_operation_is_measured(runner: ModelRunner) -> None:
    native = runner.native
    assert native is not None and isinstance(runner.config, ModelConfig)
    ceilings = benchmark.measure_ceilings(native)
    assert ceilings.read_gb_s > 0 and min(ceilings.gflop_s.values()) > 0
    figures = benchmark.KernelBench(runner.config, runner.dtype, native, ceilings).run()
    operations = {figure.operation for figure in figures}
    assert {"linear", "linear_int8", "attention", "rms_norm", "silu_mul"} <= operations
    assert all(figure.ms > 0 and figure.share > 0 for figure in figures)
    assert all(f.torch_ms > 0 for f in figures if f.operation.startswith("linear"))
    assert benchmark.batch_invariant_cost(figures, native, "float32") > -1.0
    assert benchmark.between_share(figures, 1.0, 2) > 0


def test_steps_are_measured_and_must_fit(runner: ModelRunner) -> None:
    assert benchmark.measure_steps(runner, 3, 20) > 0
    with pytest.raises(ValueError, match="do not fit"):
        benchmark.measure_steps(runner, 20, 20)
