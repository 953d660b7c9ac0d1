"""Copies that wait for a plan, and what their plan's result confirms."""

from __future__ import annotations

import numpy as np

from scheduler_svc.copies import Copies
from services.contracts.vectors import Int32Array, unpack

NONE: frozenset[int] = frozenset()


def pairs(*ends: int) -> Int32Array:
    return np.array(ends, dtype=np.int32)


def test_everything_pending_goes_into_the_next_plan_and_its_result_confirms_it() -> None:
    copies = Copies()
    copies.add_outs(1, pairs(5, 0))
    copies.add_outs(2, pairs(6, 1))
    copies.add_ins(2, pairs(3, 6), NONE)
    outs, ins = copies.publish(7)
    assert unpack(outs).tolist() == [5, 0, 6, 1] and unpack(ins).tolist() == [3, 6]
    assert copies.publish(8) == (b"", b"") and copies.are_in_flight
    assert copies.confirm(6) == [] and copies.confirm(7) == [1, 2]
    assert not copies.are_in_flight and copies.confirm(7) == []


def test_a_block_that_is_held_already_is_not_filled_twice_but_the_request_is_confirmed() -> None:
    copies = Copies()
    copies.add_ins(4, pairs(3, 6), frozenset({6}))
    assert not copies.pending_blocks
    assert copies.publish(1) == (b"", b"") and copies.confirm(1) == [4]


def test_the_later_copy_to_a_block_is_the_one_that_counts() -> None:
    copies = Copies()
    copies.add_ins(1, pairs(3, 6), NONE)
    copies.add_ins(2, pairs(4, 6), NONE)
    _, ins = copies.publish(1)
    assert unpack(ins).tolist() == [4, 6] and copies.confirm(1) == [1, 2]


def test_what_no_plan_carries_can_be_called_off() -> None:
    copies = Copies()
    copies.add_ins(1, pairs(3, 6), NONE)
    copies.clear_pending()
    assert copies.publish(1) == (b"", b"") and not copies.are_in_flight
