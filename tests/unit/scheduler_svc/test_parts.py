"""The scheduler's small parts, each alone: lanes, queue, sequence, lease."""

from __future__ import annotations

import numpy as np
import pytest

from scheduler_svc.lanes import LaneTable
from scheduler_svc.lease import Lease, Pool, low_water_blocks, reserve_blocks
from scheduler_svc.sequence import NO_LANE, SequenceStatus
from scheduler_svc.waiting import WaitingQueue
from services.contracts.kv import KvStatus, LeaseReply
from services.contracts.streams import StreamReceiver
from services.contracts.vectors import pack
from tests.unit.scheduler_svc.rig import MS, lanes_of
from tests.unit.scheduler_svc.sequences import sequence

# ---- lanes


def test_lanes_are_taken_lowest_first() -> None:
    lanes = LaneTable(3, 16)
    seqs = [sequence(uid) for uid in (1, 2, 3)]
    for seq in seqs:
        seq.block_ids = [seq.uid]
    assert [lanes.join(seq, 0, 16) for seq in seqs] == [0, 1, 2]
    assert lanes.num_free == 0
    lanes.leave(1)
    lanes.leave(0)
    assert (lanes.num_active, lanes.num_free) == (1, 2)
    assert lanes.join(seqs[1], 0, 16) == 0
    lanes.check_invariants(16)


def test_a_lane_gives_back_what_was_accepted_and_no_more() -> None:
    lanes = LaneTable(1, 16)
    seq = sequence(1)
    seq.block_ids = [1]
    lane = lanes.join(seq, 2, 8)
    lanes.token_ids[lane, 4:6] = [7, 8]
    lanes.tokens[lane], lanes.computed[lane] = 7, 6
    lanes.accepted_tokens[lane], lanes.accepted_computed[lane] = 6, 5
    assert lanes.known_token_ids(seq).tolist() == [100, 101, 102, 103, 7, 8]
    assert lanes.leave(lane) is seq
    assert (seq.num_tokens, seq.num_computed_tokens, seq.lane) == (6, 5, NO_LANE)
    assert seq.token_ids[seq.num_prompt_tokens : seq.num_tokens].tolist() == [7, 8]
    assert lanes.known_token_ids(seq).tolist() == [100, 101, 102, 103, 7, 8]


def test_stop_ids_of_the_lane_before_are_gone() -> None:
    lanes = LaneTable(2, 16)
    many, one = sequence(1, stop=(3, 4, 5)), sequence(2, stop=(9,))
    lanes.join(many, 0, 16)
    lanes.leave(0)
    lanes.join(one, 0, 16)
    assert sorted(lanes.stop_ids[:, 0].tolist()) == [-1, -1, 9]


def test_a_free_lane_has_no_occupant() -> None:
    with pytest.raises(AssertionError):
        LaneTable(1, 4).occupant(0)


# ---- queue


def test_the_queue_orders_by_priority_then_arrival_and_passes_over_lookups() -> None:
    queue = WaitingQueue()
    urgent, first, second = sequence(3, priority=-1), sequence(1), sequence(2)
    for seq in (second, first, urgent):
        queue.add(seq)
    assert list(queue) == [urgent, first, second]
    queue.begin_lookup(urgent)
    assert list(queue.ready()) == [first, second]
    assert queue.head(2) == [urgent, first] and len(queue) == 3
    queue.end_lookup(urgent)
    assert next(queue.ready()) is urgent
    queue.begin_lookup(first)
    queue.remove(first)
    queue.add(first)
    assert list(queue.ready()) == [urgent, first, second]


# ---- sequence


def test_a_sequence_moves_only_along_its_transitions() -> None:
    seq = sequence(1)
    with pytest.raises(AssertionError):
        seq.move(SequenceStatus.DRAINING)
    seq.move(SequenceStatus.RUNNING)
    seq.move(SequenceStatus.FINISHED)
    for status in SequenceStatus:
        with pytest.raises(AssertionError):
            seq.move(status)


# ---- lease


def test_low_water_is_two_steps_and_a_quarter_of_the_pool_at_most() -> None:
    assert low_water_blocks(1024, 16, 512, 64) == 2 * (32 + 64)
    assert low_water_blocks(101, 16, 512, 64) == 25
    assert low_water_blocks(2, 16, 512, 64) == 1


def test_the_reserve_follows_how_fast_blocks_go() -> None:
    assert reserve_blocks(64, 5 * MS, 16) == 1600
    assert reserve_blocks(64, 100 * MS, 16) == 80
    assert reserve_blocks(0, 0, 16) == 0


def _lease(
    granted: list[int], *, low_water: int = 4, available: int = 9, host_blocks: int = 0
) -> Lease:
    lease = Lease(Pool("engine-0", 1, 1, 33, 2, host_blocks), low_water)
    ask = lease.ask_lease(0, 1)
    assert ask is not None and ask.num_blocks == low_water
    assert lease.on_lease(LeaseReply(1, 1, ask.number, KvStatus.OK, pack(granted), available))
    return lease


def test_taking_more_than_there_is_is_a_shortage() -> None:
    lease = _lease([1, 2, 3])
    seq = sequence(1)
    assert lease.take(seq, 5) == 3
    assert lease.shortage == 2 and sorted(seq.block_ids) == [1, 2, 3]
    assert lease.num_held == 3 and not lease.spare
    lease.check_invariants([seq])


def test_half_of_the_spare_blocks_make_room_for_content_from_host_memory() -> None:
    assert _lease([1, 2, 3, 4]).make_room(9) is None, "there is no host memory"
    lease = _lease([1, 2, 3, 4], host_blocks=8)
    delta = lease.make_room(9)
    assert delta is not None and len(lanes_of(delta.released)) == 2 == len(lease.spare)
    assert lease.make_room(1) is not None and lease.make_room(1) is None
    lease.check_invariants([])


def test_committed_blocks_go_to_the_ledger_and_others_back_to_spare() -> None:
    lease = _lease([1, 2, 3])
    seq = sequence(1)
    lease.take(seq, 3)
    lease.commit(seq, 0, seq.token_ids)
    first, *rest = seq.block_ids
    delta = lease.flush()
    assert delta is not None and delta.commits is not None
    assert (delta.number, lanes_of(delta.commits.block_ids)) == (1, [first])
    lease.release(seq)
    delta = lease.flush()
    assert delta is not None and lanes_of(delta.released) == [first] and delta.number == 2
    assert sorted(lease.spare) == sorted(rest)
    assert lease.flush() is None
    lease.check_invariants([])


def test_a_block_is_committed_once() -> None:
    lease = _lease([1])
    seq = sequence(1)
    lease.take(seq, 1)
    lease.commit(seq, 0, seq.token_ids)
    with pytest.raises(AssertionError, match="committed twice"):
        lease.commit(seq, 0, seq.token_ids)


def test_blocks_in_flight_are_not_released() -> None:
    lease = _lease([1])
    seq = sequence(1)
    lease.take(seq, 1)
    seq.num_in_flight = 1
    with pytest.raises(AssertionError):
        lease.release(seq)


def test_a_shared_pin_is_released_once_per_holder_case_08() -> None:
    lease = _lease([9])
    seqs = [sequence(uid, prompt=5) for uid in (1, 2)]
    for seq in seqs:
        ask = lease.ask_lookup(seq, seq.token_ids[:5], 0)
        assert ask is not None
        assert lease.close_lookup(ask.number, np.array([4, 5], np.int32)) is seq
    assert lease.holds == {4: 2, 5: 2} and lease.num_held == 2
    released = []
    for seq in seqs:
        lease.release(seq)
        delta = lease.flush()
        assert delta is not None
        released.append(lanes_of(delta.released))
    assert released == [[5, 4], [5, 4]] and not lease.holds and not lease.committed


def test_an_empty_ledger_is_not_asked_again_before_something_went_back() -> None:
    lease = _lease([1, 2], available=0)
    assert lease.exhausted and lease.ask_lease(0, 1) is None
    seq = sequence(1)
    lease.take(seq, 2)
    lease.commit(seq, 0, seq.token_ids)
    lease.release(seq)
    assert lease.ask_lease(0, 1) is not None


def test_what_is_shed_can_be_asked_for_again() -> None:
    """Found by the simulator: the ledger's last blocks came, and the surplus went back."""
    lease = _lease(list(range(1, 13)), available=0)
    assert lease.exhausted
    lease.shed()
    delta = lease.flush()
    assert delta is not None and len(lanes_of(delta.released)) == 4 and len(lease.spare) == 8
    lease.take(sequence(1), 9)
    assert lease.ask_lease(0, 1) is not None


def test_a_silent_ledger_is_given_up_and_its_grant_abandoned() -> None:
    lease = Lease(Pool("engine-0", 1, 1, 33, 2), 4)
    ask = lease.ask_lease(0, 1)
    assert ask is not None and lease.ask_lease(0, 1) is None
    lease.give_up_lease()
    delta = lease.flush()
    assert delta is not None and lanes_of(delta.abandoned) == [ask.number]
    late = LeaseReply(1, 1, ask.number, KvStatus.OK, pack([1, 2]), 9)
    assert not lease.on_lease(late) and not lease.spare
    again = lease.ask_lease(0, 1)
    assert again is not None and again.number > ask.number


def test_a_snapshot_that_is_lost_leaves_a_gap() -> None:
    """Found by the simulator (seed 6467): a second one with the number of the first was lost, and
    with it that a lease was closed, whose block was nobody's from then on.
    """
    lease, heard = _lease([1, 2]), StreamReceiver()
    (first,) = lease.snapshot([])
    heard.restart(first.number)
    assert not heard.behind(lease.delta_number)
    assert lease.ask_lease(0, 1) is not None
    assert [part.closed_through for part in lease.snapshot([])] == [2]
    assert heard.behind(lease.delta_number)


def test_a_snapshot_says_all_in_order_and_in_parts() -> None:
    lease = _lease([1, 2, 3, 4])
    seq = sequence(1, prompt=6)
    lease.take(seq, 3)
    for index in (0, 1):
        lease.commit(seq, index, seq.token_ids)
    (snapshot,) = lease.snapshot([(seq, seq.token_ids[:6])])
    assert lanes_of(snapshot.block_ids) == [*seq.block_ids, *lease.spare]
    assert lanes_of(snapshot.holds) == [1, 1, 1, 1]
    assert lanes_of(snapshot.commits.block_ids) == seq.block_ids[:2]
    assert lanes_of(snapshot.commits.parents) == [-1, seq.block_ids[0]]
    assert snapshot.closed_through == 1
    assert lease.flush() is None, "what was not yet told is in the snapshot"
