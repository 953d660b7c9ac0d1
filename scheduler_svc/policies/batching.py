"""When may waiting sequences join? Static, dynamic and continuous batching.

Pure.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from . import Policies

# A static group that never fills would wait for ever; the oldest waits this long at most.
STATIC_PATIENCE_NS: Final = 1_000_000_000


class Door(NamedTuple):
    """num_running: sequences with a lane; num_lanes: in all; num_waiting, oldest_wait_ns: of the
    queue.
    """

    num_running: int
    num_lanes: int
    num_waiting: int
    oldest_wait_ns: int


def may_join(policies: Policies, door: Door) -> int:
    """How many waiting sequences may join now.

    continuous: as many as there are lanes. static: a whole group, once the last member of the one
    before has left. dynamic: the same, but the group also leaves when its oldest member has waited
    long enough.
    """
    if policies.batching == "continuous":
        return door.num_lanes - door.num_running
    if door.num_running:
        return 0
    size = min(policies.batch_size or door.num_lanes, door.num_lanes)
    patience_ns = STATIC_PATIENCE_NS
    if policies.batching == "dynamic":
        patience_ns = round(policies.max_delay_ms * 1e6)
    if door.num_waiting >= size or door.oldest_wait_ns >= patience_ns:
        return size
    return 0


def group_due_ns(policies: Policies, oldest_arrival_ns: int) -> int | None:
    """When a group leaves although it is not full; None where that is no question."""
    if policies.batching == "continuous":
        return None
    if policies.batching == "static":
        return oldest_arrival_ns + STATIC_PATIENCE_NS
    return oldest_arrival_ns + round(policies.max_delay_ms * 1e6)
