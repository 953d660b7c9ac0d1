from __future__ import annotations

from services.contracts.streams import Arrival, StreamReceiver


def test_next_duplicate_and_gap() -> None:
    stream = StreamReceiver(4)
    assert stream.arrive(6) is Arrival.GAP and stream.last == 4
    assert stream.arrive(4) is Arrival.DUPLICATE
    assert stream.arrive(1) is Arrival.DUPLICATE
    assert stream.arrive(5) is Arrival.NEXT and stream.last == 5
    assert stream.arrive(5) is Arrival.DUPLICATE


def test_the_first_number_is_one() -> None:
    assert StreamReceiver().arrive(1) is Arrival.NEXT
    assert StreamReceiver().arrive(2) is Arrival.GAP


def test_a_beat_proves_what_is_missing() -> None:
    stream = StreamReceiver(4)
    assert not stream.behind(4) and not stream.behind(0) and stream.behind(5)


def test_a_repaired_stream_goes_on_after_its_repair() -> None:
    stream = StreamReceiver(4)
    stream.restart(9)
    assert stream.arrive(9) is Arrival.DUPLICATE and stream.arrive(10) is Arrival.NEXT
    stream.restart(0)
    assert stream.arrive(1) is Arrival.NEXT
