"""`python -m services.simulator SEED [COUNT]`: replay one history, or run COUNT of them from SEED
on.

Shell: prints.
"""

from __future__ import annotations

import sys

from .replay import failure_text, run_seed, summary
from .world import FAILURES, World


def main(argv: list[str]) -> int:
    first = int(argv[0]) if argv else 1
    count = int(argv[1]) if len(argv) > 1 else 1
    if count == 1:
        return _one(first)
    for seed in range(first, first + count):
        outcome = run_seed(seed)
        if outcome.failure:
            sys.stdout.write(f"{outcome.failure}\n")
            return 1
    return 0


def _one(seed: int) -> int:
    """The options come first: what the run is, whatever becomes of it."""
    world = World(seed)
    sys.stdout.write(f"seed {seed}: {world.options}\n")
    sys.stdout.flush()
    try:
        report = world.run()
    except FAILURES as error:
        sys.stdout.write(f"{failure_text(world, error)}\n")
        return 1
    sys.stdout.write(f"{summary(report)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
