"""The drill's checker: it must turn red for everything that a drill is run for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from services.simulator.drill import report
from services.simulator.drill.checker import Books, Outcome, Stream, Verdict, Wrong, compare, judge
from services.simulator.drill.schedule import Fault, Kind

EXPECTED = list(range(100, 200))
SOUND = Books(total=100, free=50, leased=30, cached=20, held=0, spare=30)
KILL = Fault("worker", Kind.KILL)


def _stream(**changes: object) -> Stream:
    whole = Stream(0, "nats", asked_s=1.0, last_s=2.0, ended_s=2.0, num_tokens=5, complete=True)
    return replace(whole, **changes)


def _outcome(**changes: object) -> Outcome:
    whole = Outcome(KILL, 0, 10.0, True, "process 1 was ended by SIGKILL", 0.1, 0.8)
    return replace(whole, **changes)


def _verdict(
    *streams: Stream, outcomes: list[Outcome] | None = None, books: Books = SOUND
) -> Verdict:
    return judge(streams, [_outcome()] if outcomes is None else outcomes, [books])


def test_whole_streams_verified_faults_and_sound_books_pass() -> None:
    verdict = _verdict(_stream(), _stream(via="http"))
    assert verdict.passed
    assert (verdict.accepted, verdict.finished, verdict.faults_verified) == (2, 2, 1)


@pytest.mark.parametrize(
    ("got", "wrong"),
    [
        ([], None),
        (EXPECTED[:50], None),
        (EXPECTED, None),
        (EXPECTED[:50] + EXPECTED[40:60], Wrong.DUPLICATED),
        (EXPECTED[:50] + EXPECTED[60:], Wrong.LOST),
        (EXPECTED[50:] + EXPECTED[:50], Wrong.LOST),
        (EXPECTED[:50] + list(reversed(EXPECTED[50:])), Wrong.REORDERED),
        ([*EXPECTED[:50], 7], Wrong.OTHER),
        ([*EXPECTED, 7], Wrong.OTHER),
        (EXPECTED + EXPECTED[-3:], Wrong.DUPLICATED),
    ],
)
def test_what_is_wrong_with_tokens_is_named(got: list[int], wrong: Wrong | None) -> None:
    assert compare(EXPECTED, got) is wrong


@pytest.mark.parametrize("wrong", list(Wrong))
def test_wrong_tokens_fail(wrong: Wrong) -> None:
    verdict = _verdict(_stream(), _stream(wrong=wrong, complete=False))
    assert not verdict.passed
    counts = (verdict.lost, verdict.duplicated, verdict.reordered, verdict.wrong)
    assert sum(counts) == 1


def test_a_stream_that_failed_or_never_ended_is_lost() -> None:
    for code in ("timeout", "lost_frames", "internal", "no_end", ""):
        verdict = _verdict(_stream(complete=False, code=code))
        assert (verdict.lost, verdict.passed) == (1, False)
        assert sum(verdict.failed.values()) == 1


def test_no_word_at_all_is_a_loss_and_a_refusal_is_none() -> None:
    silent = _stream(complete=False, num_tokens=0, code="timeout")
    refused = _stream(complete=False, num_tokens=0, code="no_worker")
    verdict = _verdict(_stream(), silent, refused)
    assert (verdict.lost, verdict.accepted, dict(verdict.refused)) == (1, 2, {"no_worker": 1})


def test_a_refusal_after_tokens_is_a_loss() -> None:
    assert _verdict(_stream(complete=False, num_tokens=3, code="no_worker")).lost == 1


def test_own_deadlines_and_cancels_are_no_loss_and_others_deadlines_are() -> None:
    late = _stream(complete=False, deadline=True, code="deadline_exceeded")
    cancelled = _stream(complete=False, cancelled=True)
    verdict = _verdict(_stream(), late, cancelled)
    assert verdict.passed
    assert (dict(verdict.failed), verdict.cancelled) == ({"deadline_exceeded": 1}, 1)
    assert _verdict(replace(late, deadline=False)).lost == 1


def test_a_cut_is_excused_only_while_a_gateway_was_being_hit() -> None:
    cut = _stream(complete=False, cut=True, asked_s=5.0, ended_s=11.0)
    gateway = _outcome(fault=Fault("gateway", Kind.KILL), began_s=10.9)
    assert _verdict(cut, outcomes=[gateway]).cut == 1
    assert _verdict(_stream(), cut, outcomes=[gateway]).passed
    assert _verdict(cut, outcomes=[_outcome(began_s=10.9)]).lost == 1
    assert _verdict(cut, outcomes=[replace(gateway, began_s=12.0)]).lost == 1


def test_a_fault_that_did_not_happen_fails_the_drill() -> None:
    verdict = _verdict(_stream(), outcomes=[_outcome(), _outcome(verified=False)])
    assert (verdict.faults, verdict.faults_verified, verdict.passed) == (2, 1, False)


def test_a_drill_without_streams_or_faults_proves_nothing() -> None:
    assert not _verdict().passed
    assert not _verdict(_stream(), outcomes=[]).passed


def test_an_unexpected_death_fails_the_drill() -> None:
    assert not judge([_stream()], [_outcome()], [SOUND], ["kv_store: it exited with 1"]).passed


@pytest.mark.parametrize(
    ("books", "leaked"),
    [
        (SOUND, 0),
        (replace(SOUND, free=49), 1),
        (replace(SOUND, held=2), 2 + 2),
        (replace(SOUND, spare=27), 3),
        (replace(SOUND, fault="block 7 has two holders"), 1),
    ],
)
def test_blocks_that_nobody_accounts_for_are_leaked(books: Books, leaked: int) -> None:
    assert books.leaked == leaked
    assert _verdict(_stream(), books=books).passed is (leaked == 0)


def test_recovery_is_the_longest_silence_from_the_fault_on() -> None:
    stream = _stream()
    stream.last_s = 9.8
    stream.heard(10.1, 1)  # it was under way when the fault came
    stream.heard(10.15, 1)
    stream.heard(12.5, 1)
    stream.heard(19.0, 1)  # for another reason, later
    outcome = _outcome(began_s=10.0)
    verdict = judge([stream], [outcome], [SOUND])
    assert outcome.silence_s == verdict.worst_recovery_s == pytest.approx(2.5)


def test_a_crash_is_told_from_a_hang_and_from_an_ordered_end() -> None:
    kinds = {Kind.KILL: 0.1, Kind.HANG: 4.1, Kind.TERMINATE: 2.5}
    outcomes = [_outcome(fault=Fault("worker", k), noticed_s=s) for k, s in kinds.items()]
    verdict = _verdict(_stream(), outcomes=outcomes)
    assert (verdict.crash_noticed_s, verdict.hang_noticed_s) == (0.1, 4.1)


def test_the_report_has_its_keys_and_names_what_failed() -> None:
    outcomes = [_outcome(), _outcome(verified=False, evidence="it was never passed")]
    found = report.as_dict(5, {"streams": 3}, _verdict(_stream(), outcomes=outcomes), outcomes)
    assert {
        *("accepted", "finished", "failed", "faults", "faults_verified", "lost", "duplicated"),
        *("reordered", "blocks_leaked", "worst_recovery_s", "seed", "options"),
    } <= set(found)
    text = "\n".join(report.lines(found))
    assert "worker kill: it was never passed" in text
    assert text.endswith("FAILED")
