"""Who is next? First come, by fit with aging, or fair shares; lower priority numbers go first.

By fit, small ones pass a giant at the head of the line (head-of-line blocking), but not for ever.

Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from scheduler_svc.sequence import Sequence

# A sequence that does not fit is passed by so many others; then nobody passes until it has joined.
MAX_PASSES: Final = 16
MAX_TENANTS: Final = 4096


def next_in_line(
    queue: str, waiting: Iterable[Sequence], served: Mapping[bytes, int]
) -> list[Sequence]:
    """`waiting` (by priority, then arrival) in the order in which they may join.

    fair: within a priority, the tenant that was served the fewest tokens first (virtual token
    counters); a tenant's own sequences keep their order.
    """
    order = list(waiting)
    if queue == "fair":
        order.sort(key=lambda seq: (seq.priority, served.get(seq.salt, 0), seq.uid))
    return order


def may_pass(queue: str, blocked: Sequence) -> bool:
    """May those behind `blocked`, which does not fit now, go before it?"""
    return queue == "fit" and blocked.num_passed < MAX_PASSES


class TokenCounters:
    """Tokens served by tenant: the virtual counters of fair queueing. Bounded: the most served
    tenants are forgotten first, which costs them nothing.
    """

    def __init__(self) -> None:
        self.served: dict[bytes, int] = {}

    def arrive(self, tenant: bytes, present: Iterable[bytes]) -> None:
        """A tenant that had nothing here begins level with the least served of those `present`.

        So absence earns nothing.
        """
        served = self.served.get(tenant, 0)
        levels = [self.served.get(other, 0) for other in present]
        self.served[tenant] = max(served, min(levels)) if levels else served
        self._forget_one()

    def add(self, tenant: bytes, num_tokens: int) -> None:
        self.served[tenant] = self.served.get(tenant, 0) + num_tokens
        self._forget_one()

    def _forget_one(self) -> None:
        if len(self.served) > MAX_TENANTS:
            del self.served[max(self.served, key=lambda known: self.served[known])]
