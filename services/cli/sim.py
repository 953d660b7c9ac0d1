"""`streetcar sim`: histories of the simulator, replayed from their seeds.

Shell: runs the simulator; a history itself touches nothing.
"""

from __future__ import annotations

import sys
import traceback

from services.cli.output import print_json


def sim(*, seed: int = 1, count: int = 1, json: bool = False) -> int:
    """Replay one history, or several from a seed on; status 1 at the first that fails.

    Parameters
    ----------
    seed
        The first history's seed.
    count
        How many histories.
    json
        Print one object per history.
    """
    from services.contracts.errors import StreetcarError
    from services.simulator.world import World

    for number in range(seed, seed + count):
        world = World(number)
        failure, report = "", ""
        try:
            report = str(world.run())
        except (AssertionError, StreetcarError) as error:
            failure = f"{type(error).__name__}: {error}"
            traceback.print_exc()
        options = str(world.options)
        if json:
            print_json({"seed": number, "options": options, "report": report, "failure": failure})
        elif count == 1 or failure:
            print(f"seed {number}: {options}\n{report or failure}")
        if failure:
            print(f"reproduce: make sim SEED={number}", file=sys.stderr)
            return 1
    if not json and count > 1:
        print(f"{count} histories from seed {seed} on: all kept their invariants")
    return 0
