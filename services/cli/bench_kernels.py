"""`streetcar bench kernels`: every operation beside what this machine can do, and whole steps.

Shell: loads a model in this process, the terminal; no bus, no services.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Final

from services.cli.options import ClusterOptions
from services.cli.output import print_json
from services.runtime.problem import Problem

DEFAULT_LANES: Final = (1, 32)


def kernels(
    options: ClusterOptions | None = None,
    *,
    lanes: tuple[int, ...] = DEFAULT_LANES,
    context: int = 200,
    steps_only: bool = False,
    json: bool = False,
) -> int:
    """Measure the native kernels one by one, then decode steps of the model.

    Parameters
    ----------
    lanes
        Sequences that decode in a step; several give several steps.
    context
        Tokens that each of them has.
    steps_only
        Measure the steps alone.
    json
        Print the result as one object.
    """
    result = _measure(options or ClusterOptions(), lanes, context, steps_only)
    if json:
        print_json(result)
    else:
        _print(result)
    return 0


def _measure(
    options: ClusterOptions, lanes: tuple[int, ...], context: int, steps_only: bool
) -> dict[str, Any]:
    from gpu_worker import benchmark
    from services.cli.model_runner import load_runner

    settings = options.settings()
    runner, dtype = load_runner(settings)
    if runner.native is None:
        raise Problem("E407", "No native kernels to measure", cause="; ".join(runner.notices))
    result: dict[str, Any] = {
        "instruction_set": runner.instruction_set,
        "dtype": dtype,
        "quantization": settings.quantization,
        "kv_cache_dtype": settings.kv_cache_dtype,
    }
    try:
        seconds = {number: benchmark.measure_steps(runner, number, context) for number in lanes}
    except ValueError as error:
        raise Problem("E105", "Steps cannot be measured", cause=str(error)) from error
    result["steps"] = [
        {"lanes": number, "context": context, "ms": spent * 1e3, "tokens_per_s": number / spent}
        for number, spent in seconds.items()
    ]
    if steps_only:
        return result
    ceilings = benchmark.measure_ceilings(runner.native)
    bench = benchmark.KernelBench(runner.config, runner.dtype, runner.native, ceilings)
    figures = bench.run()
    result["ceilings"] = dataclasses.asdict(ceilings)
    result["operations"] = [dataclasses.asdict(figure) for figure in figures]
    result["batch_invariant_cost"] = benchmark.batch_invariant_cost(figures, runner.native, dtype)
    if DEFAULT_LANES[-1] in seconds:
        step_ms = seconds[DEFAULT_LANES[-1]] * 1e3
        layers = runner.config.num_layers
        result["between_share"] = benchmark.between_share(figures, step_ms, layers)
    return result


def _print(result: dict[str, Any]) -> None:
    described = ("instruction_set", "dtype", "quantization", "kv_cache_dtype")
    print(", ".join(f"{name} {result[name]}" for name in described))
    for step in result["steps"]:
        print(
            f"step of {step['lanes']} x 1 over {step['context']:<6} {step['ms']:9.2f} ms "
            f"{step['tokens_per_s']:8.1f} tok/s"
        )
    if "ceilings" not in result:
        return
    ceilings = result["ceilings"]
    products = ", ".join(f"{kind} {rate:.0f}" for kind, rate in ceilings["gflop_s"].items())
    print(f"ceilings: read {ceilings['read_gb_s']:.1f} GB/s, GFLOP/s {products}")
    for row in result["operations"]:
        beside = f"   torch {row['torch_ms']:8.2f} ms" if row["torch_ms"] else ""
        print(
            f"{row['operation']:<14} {row['case']:<30} {row['ms']:9.3f} ms {row['gb_s']:7.1f} GB/s "
            f"{row['gflop_s']:7.0f} GFLOP/s {row['share']:6.0%}{beside}"
        )
    print(f"batch_invariant costs {result['batch_invariant_cost']:.1%} of linears over 32 rows")
    if "between_share" in result:
        print(f"between linears, attention apart: {result['between_share']:.1%} of a 32-lane step")
