"""Everything that only a GPU can show, in six minutes, as one JSON.

    python tests/gpu/check_gpu.py --out gpu.json

Needs torch, triton, numpy and safetensors; `transformers` is measured beside us where it is
installed. Every kernel is checked against its reference on the device; decode and prefill are
measured as shares of what copies and products reached in the same run; then models of 1B and 8B
with random weights answer a load of requests. `--dry-run` does the least of each on the CPU, in
Triton's interpreter. Ends with 0 where all checks hold.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
from pathlib import Path

if "--dry-run" in sys.argv:
    # Read when triton is imported.
    os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(Path(__file__).parents[2]))

import correctness
import engine
import speed
import torch
from random_weights import CONFIGS
from report import Report, say

LIMIT_S = 345.0
"""Of the whole; six minutes, less what starting Python takes."""


def run(report: Report, device: torch.device, is_dry: bool) -> None:
    ceilings = speed.measure_ceilings(device, is_dry)
    report.content["ceilings"] = {
        "copy_gb_s": ceilings.copy_gb_s,
        "product_gflop_s": ceilings.gflop_s,
    }
    correctness.run(report, device, is_dry)
    if is_dry:
        tiny = CONFIGS["tiny"]
        report.attempt("tokens", 1, lambda: engine.check_tokens(report, device, tiny, (2, 4, 2)))
        speed.Bench(report, device, ceilings, is_dry).run()
        return
    small = CONFIGS["small"]
    report.attempt("tokens", 20, lambda: engine.check_tokens(report, device, small, (12, 40, 24)))
    speed.Bench(report, device, ceilings, is_dry).run()
    load = engine.Load()
    for name in ("1B", "8B"):

        def measure(name: str = name, **options: object) -> None:
            engine.measure_engine(report, device, name, CONFIGS[name], ceilings, load, **options)

        report.attempt(f"engine {name}", engine.NEEDED_S[name], measure)
        release()

        def peer(name: str = name) -> None:
            engine.measure_transformers(report, device, name, CONFIGS[name], load)

        report.attempt(f"transformers {name}", engine.PEER_NEEDED_S[name], peer)
        release()
    for label, options in (
        ("fp8", {"quantization": "fp8", "kv_cache_dtype": "fp8"}),
        ("batch_invariant", {"batch_invariant": True}),
    ):
        report.attempt(
            f"engine 8B {label}",
            engine.NEEDED_S["8B"],
            lambda o=options: engine.measure_engine(
                report, device, "8B", CONFIGS["8B"], ceilings, load, **o
            ),
        )
        release()


def release() -> None:
    """What a part has left behind is freed before the next one."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("gpu.json"))
    parser.add_argument("--limit-s", type=float, default=LIMIT_S)
    parser.add_argument("--dry-run", action="store_true", help="the least, on the CPU")
    arguments = parser.parse_args()
    if not arguments.dry_run and not torch.cuda.is_available():
        say("torch sees no GPU here; --dry-run runs what needs none")
        return 2
    device = torch.device("cpu" if arguments.dry_run else "cuda:0")
    report = Report(arguments.out, arguments.limit_s)
    run(report, device, arguments.dry_run)
    report.write()
    return 0 if report.is_good else 1


if __name__ == "__main__":
    sys.exit(main())
