"""How much of a cached prefix to take: what lies in the pool is free, what lies in host memory
costs a copy, what is not taken costs a recompute.

Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Costs:
    """Of one block, in one unit: copied in from host memory, computed again. 0: not known."""

    copy: int = 0
    recompute: int = 0


UNKNOWN_COSTS: Final = Costs()


def cheapest_hit(in_host: Sequence[bool], copy_cost: int, recompute_cost: int) -> int:
    """How many blocks of a cached prefix to take so that copies and recomputes cost least together.

    in_host: for each block of the prefix, whether it must be copied in. Costs of one block, in any
    one unit; where either is 0 it is not known, and the whole prefix is taken. A prefix is taken
    from its start, so a dear copy is worth it for what lies behind it:
    cheapest_hit([False, True, False], copy 30, recompute 20) = 3: 30 for two blocks, 40 without;
    cheapest_hit([False, True], copy 30, recompute 20) = 1.
    """
    if not copy_cost or not recompute_cost:
        return len(in_host)
    best, best_gain, gain = 0, 0, 0
    for count, must_copy in enumerate(in_host, start=1):
        gain += recompute_cost - (copy_cost if must_copy else 0)
        if gain >= best_gain:
            best, best_gain = count, gain
    return best


def affordable_hit(in_pool: Sequence[bool], is_cached: Sequence[bool], num_available: int) -> int:
    """How many blocks of a prefix there is room for.

    Every block that is not in the pool needs another one; those that the hit itself takes out of
    the cache (`is_cached`) can not be had for it. num_available: free and cached blocks.
    """
    for count, (present, cached) in enumerate(zip(in_pool, is_cached, strict=True)):
        num_available -= cached or not present
        if num_available < 0:
            return count
    return len(in_pool)
