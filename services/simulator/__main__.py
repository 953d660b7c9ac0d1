"""`python -m services.simulator SEED [COUNT]`: replay one history, or run COUNT of them from SEED
on.

Shell: prints.
"""

from __future__ import annotations

import sys
import traceback

from services.contracts.errors import StreetcarError

from .world import World


def main(argv: list[str]) -> int:
    first = int(argv[0]) if argv else 1
    count = int(argv[1]) if len(argv) > 1 else 1
    for seed in range(first, first + count):
        world = World(seed)
        if count == 1:
            sys.stdout.write(f"seed {seed}: {world.options}\n")
        try:
            report = world.run()
        except (AssertionError, StreetcarError):
            traceback.print_exc()
            sys.stdout.write(f"seed {seed}: {world.options}\n")
            sys.stdout.write(f"reproduce: python -m services.simulator {seed}\n")
            return 1
        if count == 1:
            sys.stdout.write(f"{report}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
