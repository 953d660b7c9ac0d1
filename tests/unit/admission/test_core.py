"""The request table: one terminal frame for every ticket, whatever is lost on the way."""

from __future__ import annotations

import msgspec
import pytest

from services.admission.core import DEADLINE_GRACE_NS, SUBMIT_GIVE_UP_NS, SUBMIT_RETRY_NS
from services.admission.engines import LOST_NS
from services.admission.events import BeatSent, CancelAsked, DrainAsked, SubmitFailed
from services.contracts.errors import ErrorCode
from services.contracts.limits import BEAT_PERIOD_MS, ENDED_SECONDS
from services.contracts.public import Encoding, FinishReason
from services.contracts.sampling import SamplingParams
from services.contracts.vectors import unpack
from tests.unit.admission.streams import ENGINE, MS, SECOND, Desk, ticket

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


def test_a_request_from_its_ticket_to_its_one_terminal_frame() -> None:
    desk = Desk()
    tag = desk.open()
    message = desk.submits[0].message
    assert (message.seq_id, message.admission_id) == ("r1", "admission-0")
    assert unpack(message.prompt).tolist() == [1, 2, 3] and not message.accepted
    desk.updates(tag, 0, [4], cached=2)
    desk.updates(tag, 1, [5])
    (last,) = desk.updates(tag, 2, [6], end=LENGTH)
    assert [frame.offset for _, frame in desk.frames] == [0, 1, 2]
    assert [frame.token_ids for _, frame in desk.frames] == [[4], [5], [6]]
    assert desk.text() == "w4 w5 w6 "
    assert last.finish_reason is LENGTH and last.usage is not None
    assert (last.usage.prompt_tokens, last.usage.completion_tokens, last.usage.cached_tokens) == (
        3,
        3,
        2,
    )
    assert [abort.message.seq_ids for abort in desk.aborts] == [["r1"]], "the end is acknowledged"
    assert not desk.core.requests
    assert not desk.updates(tag, 3, [7], end=LENGTH), "nothing after the terminal frame"


def test_news_are_merged_until_the_flush() -> None:
    desk = Desk()
    tag = desk.open()
    for offset in range(4):
        desk.updates(tag, offset, [offset + 1], lost=True)
        desk.number -= 1
    frames = desk.updates(tag, 0, [1, 2, 3, 4], end=LENGTH)
    assert [frame.token_ids for frame in frames] == [[1, 2, 3, 4]]


def test_requests_take_turns_in_the_order_of_their_news() -> None:
    desk = Desk()
    tags = [desk.open(name) for name in ("a", "b", "c")]
    for offset in range(2):
        desk.news([(tag, offset, 1) for tag in reversed(tags)])
    shown = [[f.request_id for f in desk.flush(2)] for _ in range(3)]
    assert shown == [["c", "b"], ["a"], []]
    assert all(len(frame.token_ids) == 2 for _, frame in desk.frames)


def test_a_non_streaming_request_gets_one_frame() -> None:
    desk = Desk()
    tag = desk.open(stream=False)
    assert not desk.updates(tag, 0, [4, 5])
    (frame,) = desk.updates(tag, 2, [6], end=LENGTH)
    assert (frame.offset, frame.token_ids, frame.text) == (0, [4, 5, 6], "w4 w5 w6 ")
    assert frame.usage is not None and frame.usage.completion_tokens == 3


def test_no_tokens_at_all_is_empty_text() -> None:
    desk = Desk()
    tag = desk.open(stop_token_ids=[9])
    (frame,) = desk.updates(tag, 0, [9], end=STOP)
    assert (frame.text, frame.token_ids, frame.finish_reason) == ("", [], STOP)
    assert frame.usage is not None and frame.usage.completion_tokens == 0


def test_case_28_a_trimmed_stop_token_takes_its_logprob_along() -> None:
    for stream in (True, False):
        desk = Desk()
        tag = desk.open(stop_token_ids=[2], sampling=SamplingParams(num_logprobs=1), stream=stream)
        desk.updates(tag, 0, [5], scored=True)
        desk.updates(tag, 1, [6], scored=True)
        desk.updates(tag, 2, [2], end=STOP, scored=True)
        token_ids = [token for _, frame in desk.frames for token in frame.token_ids]
        entries = [entry for _, frame in desk.frames for entry in frame.logprobs or []]
        assert token_ids == [5, 6] == [entry.token_id for entry in entries]
        (end,) = desk.ends()
        assert end.finish_reason is STOP
        assert end.usage is not None and end.usage.completion_tokens == 2


def test_case_13_a_stop_string_cuts_the_text_and_ends_the_sequence() -> None:
    desk = Desk()
    tag = desk.open(stop_strings=["5 w"])
    desk.updates(tag, 0, [4])
    (frame,) = desk.updates(tag, 1, [5, 6, 7])
    assert frame.finish_reason is STOP and desk.text() == "w4 w"
    assert frame.token_ids == [5, 6]
    assert desk.aborts[-1].message.seq_ids == ["r1"]
    assert not desk.updates(tag, 4, [8], end=LENGTH)


def test_a_stop_string_may_be_shown() -> None:
    desk = Desk()
    tag = desk.open(stop_strings=["5 w"], include_stop=True)
    desk.updates(tag, 0, [4, 5, 6])
    assert desk.text() == "w4 w5 w"


# ---- refusals


@pytest.mark.parametrize(
    "code",
    [ErrorCode.NEVER_FITS, ErrorCode.QUEUE_FULL, ErrorCode.CONTEXT_LENGTH_EXCEEDED],
)
def test_a_refused_submission_is_an_error_frame(code: ErrorCode) -> None:
    desk = Desk()
    desk.handle(ticket())
    desk.acknowledge(code=code)
    (frame,) = desk.ends()
    assert frame.finish_reason is FinishReason.ERROR
    assert frame.error is not None and (frame.error.code, frame.error.message) == (code, "because")
    assert not desk.aborts and not desk.core.requests


def test_no_engine_is_said_at_once_and_names_the_model() -> None:
    desk = Desk(engine=False)
    desk.handle(ticket())
    (frame,) = desk.ends()
    assert frame.error is not None and frame.error.code is ErrorCode.NO_WORKER
    assert "words" in frame.error.message


def test_an_engine_that_was_there_lately_is_waited_for() -> None:
    desk = Desk()
    desk.beat(ready=False)
    desk.handle(ticket())
    assert not desk.ends() and not desk.submits
    desk.tick(SUBMIT_RETRY_NS)
    desk.beat()
    desk.tick(SUBMIT_RETRY_NS)
    assert [submit.engine for submit in desk.submits] == [ENGINE]


def test_a_request_that_waits_for_an_engine_can_be_cancelled() -> None:
    desk = Desk()
    desk.beat(ready=False)
    desk.handle(ticket())
    desk.handle(CancelAsked("r1"))
    assert desk.ends()[0].finish_reason is FinishReason.ABORT
    assert not desk.aborts and not desk.submits


def test_an_engine_that_stays_away_is_given_up() -> None:
    desk = Desk()
    desk.beat(ready=False)
    desk.handle(ticket())
    desk.tick(SUBMIT_GIVE_UP_NS - 1)
    assert not desk.ends()
    desk.tick(SUBMIT_RETRY_NS)
    error = desk.ends()[0].error
    assert error is not None and error.code is ErrorCode.NO_WORKER and not desk.submits


def test_an_engine_that_was_not_heard_for_ten_seconds_is_no_engine() -> None:
    desk = Desk()
    desk.now_ns = SUBMIT_GIVE_UP_NS
    desk.handle(ticket("r1"))
    assert not desk.ends("r1")
    desk.now_ns += 1
    desk.handle(ticket("r2"))
    assert desk.ends("r2")[0].error is not None


@pytest.mark.parametrize("code", [ErrorCode.DRAINING, ErrorCode.NO_WORKER])
def test_an_engine_between_two_lives_is_asked_again(code: ErrorCode) -> None:
    desk = Desk()
    desk.handle(ticket())
    desk.acknowledge(code=code)
    assert not desk.ends()
    desk.beat()
    desk.tick(SUBMIT_RETRY_NS)
    assert len(desk.submits) == 2
    desk.now_ns = SUBMIT_GIVE_UP_NS
    desk.acknowledge(code=code)
    error = desk.ends()[0].error
    assert error is not None and error.code is code


def test_an_accepted_request_outlives_a_full_queue() -> None:
    desk = Desk()
    desk.open()
    desk.epoch = 2
    desk.beat()
    desk.acknowledge(code=ErrorCode.QUEUE_FULL)
    assert not desk.ends()


def test_too_many_open_requests() -> None:
    desk = Desk(max_open=1)
    desk.open("r1")
    desk.handle(ticket("r2"))
    error = desk.ends("r2")[0].error
    assert error is not None and error.code is ErrorCode.QUEUE_FULL


def test_a_draining_admission_ends_what_it_has() -> None:
    desk = Desk()
    tag = desk.open("r1")
    desk.handle(DrainAsked())
    desk.handle(ticket("r2"))
    error = desk.ends("r2")[0].error
    assert error is not None and error.code is ErrorCode.DRAINING
    desk.updates(tag, 0, [4], end=LENGTH)
    assert desk.ends("r1")[0].finish_reason is LENGTH


def test_a_drain_that_takes_too_long_ends_everything_once() -> None:
    desk = Desk()
    tag = desk.open("r1")
    desk._take(desk.core.fail_all(ErrorCode.DRAINING, "stopping"))
    assert len(desk.ends("r1")) == 1 and not desk.core.requests
    desk.updates(tag, 0, [4], end=LENGTH)
    assert len(desk.ends("r1")) == 1


# ---- the same request again


def test_an_id_in_use_is_refused_and_the_first_goes_on() -> None:
    desk = Desk()
    tag = desk.open("r1")
    desk.handle(ticket("r1", reply="inbox.other"))
    (refusal,) = desk.ends()
    assert desk.frames[-1][0] == "inbox.other"
    assert refusal.error is not None and refusal.error.code is ErrorCode.DUPLICATE_REQUEST
    desk.updates(tag, 0, [4], end=LENGTH)
    assert desk.frames[-1][0] == "inbox.r1" and desk.frames[-1][1].finish_reason is LENGTH


def test_a_retry_takes_over_the_inbox_and_hears_everything_again() -> None:
    desk = Desk()
    tag = desk.open("r1", sampling=SamplingParams(num_logprobs=0))
    desk.updates(tag, 0, [4, 5], scored=True)
    again = ticket(
        "r1",
        retry=True,
        reply="inbox.new",
        encoding=Encoding.MSGPACK,
        sampling=SamplingParams(num_logprobs=0),
    )
    desk.handle(again)
    desk.flush()
    reply, frame = desk.frames[-1]
    assert reply == "inbox.new" and (frame.offset, frame.token_ids) == (0, [4, 5])
    assert frame.text == "w4 w5 " and len(frame.logprobs or []) == 2
    assert [s.message.seq_id for s in desk.submits] == ["r1", "r1"], "its envelope is renewed"
    desk.acknowledge()
    desk.updates(tag, 2, [6], end=LENGTH, scored=True)
    assert desk.frames[-1][0] == "inbox.new" and len(desk.ends()) == 1


def test_a_retry_of_an_unknown_request_runs() -> None:
    desk = Desk()
    desk.handle(ticket("r1", retry=True))
    assert len(desk.submits) == 1 and not desk.frames


# ---- cancel


def test_a_cancelled_request_ends_once_and_stops_its_sequence() -> None:
    desk = Desk()
    tag = desk.open()
    desk.updates(tag, 0, [4])
    desk.handle(CancelAsked("r1", "inbox.cancel"))
    (frame,) = desk.ends()
    assert (frame.finish_reason, frame.offset) == (FinishReason.ABORT, 1)
    assert frame.usage is not None and frame.usage.completion_tokens == 1
    assert [(c.request_id, c.reply) for c in desk.cancelled] == [("r1", "inbox.cancel")]
    assert desk.aborts[-1].engine == ENGINE
    desk.updates(tag, 1, [5], end=FinishReason.ABORT)
    assert len(desk.ends()) == 1


def test_a_cancel_before_the_acknowledgement_aborts_after_it() -> None:
    desk = Desk()
    desk.handle(ticket())
    desk.handle(CancelAsked("r1"))
    assert len(desk.ends()) == 1 and not desk.aborts
    desk.acknowledge()
    assert [abort.message.seq_ids for abort in desk.aborts] == [["r1"]]


def test_a_cancel_between_two_submissions_aborts_at_once() -> None:
    """Found by the simulator (seeds 1, 16, 87): nothing was on its way, so the abort that waited
    for an answer waited for ever.
    """
    desk = Desk()
    desk.open()
    desk.handle(SubmitFailed("r1"))
    desk.handle(CancelAsked("r1"))
    assert [abort.message.seq_ids for abort in desk.aborts] == [["r1"]]


def test_what_a_late_submission_brings_to_life_is_aborted() -> None:
    desk = Desk()
    tag = desk.open()
    desk.epoch += 1
    desk.beat()
    desk.updates(tag, 0, [4], end=LENGTH)
    assert len(desk.submits) == 2 and not desk.aborts, "the second submission is on its way"
    desk.acknowledge()
    assert [abort.message.seq_ids for abort in desk.aborts] == [["r1"]]


def test_a_cancelled_newcomer_has_a_usage_too() -> None:
    desk = Desk()
    desk.handle(CancelAsked("r1"))
    desk.handle(ticket())
    (end,) = desk.ends()
    assert end.usage is not None and end.usage.prompt_tokens == 3


def test_cached_tokens_are_never_more_than_the_prompt() -> None:
    """Of a resubmitted sequence the hit may cover output too."""
    desk = Desk()
    tag = desk.open()
    (end,) = desk.updates(tag, 0, [4, 5], end=LENGTH, cached=4)
    assert end.usage is not None and end.usage.cached_tokens == 3


def test_a_cancel_before_the_acknowledgement_aborts_also_where_that_is_lost() -> None:
    desk = Desk()
    desk.handle(ticket())
    desk.handle(CancelAsked("r1"))
    desk.handle(SubmitFailed("r1"))
    assert [abort.message.seq_ids for abort in desk.aborts] == [["r1"]]


def test_a_cancel_that_overtakes_its_request_leaves_a_tombstone() -> None:
    desk = Desk()
    desk.handle(CancelAsked("r1"))
    assert not desk.cancelled
    desk.handle(ticket("r1"))
    assert desk.ends()[0].finish_reason is FinishReason.ABORT and not desk.submits
    desk.handle(ticket("r1"))
    assert len(desk.submits) == 1, "a tombstone is used once"


def test_a_tombstone_lasts_ten_seconds() -> None:
    desk = Desk()
    desk.handle(CancelAsked("r1"))
    assert desk.core.wake_at_ns is not None
    desk.tick(10 * SECOND)
    assert desk.core.wake_at_ns is None
    desk.beat()
    desk.handle(ticket("r1"))
    assert len(desk.submits) == 1


# ---- losses


def test_a_gap_submits_again_with_what_is_there() -> None:
    desk = Desk()
    tag = desk.open()
    desk.updates(tag, 0, [4])
    desk.updates(tag, 1, [5], lost=True)
    assert not desk.updates(tag, 2, [6]), "a token after a hole is not shown"
    repair = desk.submits[-1].message
    assert unpack(repair.accepted).tolist() == [4] and repair.tag == tag
    desk.acknowledge()
    desk.updates(tag, 1, [5, 6, 7])
    desk.updates(tag, 4, [8], end=LENGTH)
    assert [frame.offset for _, frame in desk.frames] == [0, 1, 4]
    assert desk.text() == "w4 w5 w6 w7 w8 "


def test_a_repeated_message_is_taken_once() -> None:
    desk = Desk()
    tag = desk.open()
    desk.updates(tag, 0, [4])
    desk.number -= 1
    assert not desk.updates(tag, 0, [4])
    desk.updates(tag, 1, [5], end=LENGTH)
    assert desk.text() == "w4 w5 "


def test_a_lost_last_message_is_noticed_by_the_beat() -> None:
    desk = Desk()
    tag = desk.open()
    desk.updates(tag, 0, [4])
    desk.beat(mark=1)
    assert len(desk.submits) == 1
    desk.updates(tag, 1, [5], end=LENGTH, lost=True)
    desk.beat(mark=2)
    assert unpack(desk.submits[-1].message.accepted).tolist() == [4]
    desk.updates(tag, 1, [5], end=LENGTH)
    assert desk.ends()[0].finish_reason is LENGTH


def test_an_end_whose_tokens_were_lost_waits_for_them() -> None:
    desk = Desk()
    tag = desk.open(sampling=SamplingParams(num_logprobs=0))
    desk.updates(tag, 0, [4], lost=True, scored=True)
    assert not desk.updates(tag, 1, [5], end=LENGTH, scored=True)
    desk.acknowledge()
    (frame,) = desk.updates(tag, 0, [4, 5], end=LENGTH, scored=True)
    assert frame.token_ids == [4, 5] and len(frame.logprobs or []) == 2


def test_a_lost_resubmission_is_sent_again_though_an_older_one_is_answered() -> None:
    desk = Desk()
    tag = desk.open()
    desk.updates(tag, 0, [4], lost=True)
    desk.updates(tag, 1, [5])
    submits = len(desk.submits)
    assert submits > 1
    desk.acknowledge()
    desk.handle(SubmitFailed("r1"))
    desk.tick(SUBMIT_RETRY_NS)
    assert len(desk.submits) == submits + 1


def test_tokens_after_a_hole_that_nobody_repairs_ask_for_the_missing_ones() -> None:
    desk = Desk()
    tag = desk.open()
    assert not desk.updates(tag, 2, [6])
    assert len(desk.submits) == 2 and not desk.submits[-1].message.accepted


def test_a_higher_epoch_gets_every_open_request() -> None:
    desk = Desk()
    tag = desk.open()
    desk.updates(tag, 0, [4, 5])
    desk.epoch, desk.number = 2, 0
    desk.beat()
    repair = desk.submits[-1].message
    assert unpack(repair.accepted).tolist() == [4, 5]
    desk.acknowledge()
    desk.updates(tag, 2, [6], end=LENGTH)
    assert desk.text() == "w4 w5 w6 " and len(desk.ends()) == 1


def test_a_lower_epoch_says_nothing_any_more() -> None:
    desk = Desk()
    tag = desk.open()
    desk.epoch = 5
    desk.beat()
    desk.epoch = 4
    assert not desk.updates(tag, 0, [4], end=LENGTH)
    assert len(desk.core.requests) == 1


def test_a_new_generation_may_begin_with_a_lower_epoch() -> None:
    desk = Desk()
    desk.epoch = 5
    desk.beat()
    tag = desk.open()
    desk.generation, desk.epoch, desk.number = 2, 1, 0
    desk.beat()
    desk.acknowledge()
    assert desk.updates(tag, 0, [4], end=LENGTH)


def test_between_two_workers_an_accepted_request_waits() -> None:
    desk = Desk()
    tag = desk.open()
    desk.updates(tag, 0, [4])
    desk.epoch, desk.number = 2, 0
    desk.beat()
    desk.acknowledge(code=ErrorCode.NO_WORKER)
    assert not desk.ends()
    desk.beat()
    submits = len(desk.submits)
    desk.tick(SUBMIT_RETRY_NS)
    assert len(desk.submits) == submits + 1


def _absent(desk: Desk, for_ns: int, *, other: bool = False) -> None:
    """The engine beats and cannot serve; the other one, where there is one, can."""
    end_ns = desk.now_ns + for_ns
    while desk.now_ns < end_ns:
        desk.tick(BEAT_PERIOD_MS * MS)
        desk.beat(ready=False)
        if other:
            desk.beat(engine="engine-1")


def test_case_45_what_an_engine_has_begun_waits_for_it_in_bounded_time() -> None:
    desk = Desk()
    tag = desk.open()
    desk.updates(tag, 0, [4])
    _absent(desk, LOST_NS - SECOND)
    assert not desk.ends()
    _absent(desk, 2 * SECOND)
    (frame,) = desk.ends()
    assert frame.error is not None and frame.error.code is ErrorCode.NO_WORKER
    assert frame.offset == 1


def test_an_admission_that_slept_takes_no_engine_for_lost() -> None:
    desk = Desk()
    desk.handle(BeatSent())
    desk.open()
    desk.tick(2 * LOST_NS)
    desk.acknowledge()
    desk.handle(BeatSent())
    desk.tick(MS)
    assert not desk.ends()


def test_what_a_lost_engine_has_begun_goes_on_at_another() -> None:
    desk = Desk()
    tag = desk.open()
    desk.updates(tag, 0, [4])
    _absent(desk, LOST_NS + SECOND, other=True)
    moved = desk.submits[-1]
    assert moved.engine == "engine-1" and moved.message.tag != tag
    assert unpack(moved.message.accepted).tolist() == [4]
    assert [(abort.engine, abort.message.seq_ids) for abort in desk.aborts] == [(ENGINE, ["r1"])]
    assert not desk.updates(tag, 1, [9], end=LENGTH), "the engine before has no say any more"
    assert not desk.ends()


def test_a_submission_without_an_answer_is_retried_and_then_given_up() -> None:
    desk = Desk()
    desk.handle(ticket())
    desk.handle(SubmitFailed("r1"))
    assert not desk.tick(SUBMIT_RETRY_NS - 1)
    desk.tick(1)
    assert len(desk.submits) == 2
    # No beat for so long: the engine is gone.
    for _ in range(60):
        if desk.ends():
            break
        desk.handle(SubmitFailed("r1"))
        desk.tick(SUBMIT_RETRY_NS)
    (frame,) = desk.ends()
    assert frame.error is not None and frame.error.code is ErrorCode.NO_WORKER
    assert desk.now_ns >= SUBMIT_GIVE_UP_NS and not desk.core.requests


def test_a_request_moves_to_another_engine_when_its_own_is_gone() -> None:
    desk = Desk()
    desk.handle(ticket())
    desk.handle(SubmitFailed("r1"))
    desk.now_ns = SECOND
    desk.beat(engine="engine-1")
    desk.tick()
    assert [submit.engine for submit in desk.submits] == [ENGINE, "engine-1"]


def test_the_least_loaded_engine_is_chosen() -> None:
    desk = Desk()
    desk.beat(engine="engine-1")
    engines = desk.core.engines.engines
    assert engines["engine-0"].load is not None
    engines["engine-0"].load = msgspec.structs.replace(engines["engine-0"].load, num_running=3)
    desk.handle(ticket())
    assert desk.submits[-1].engine == "engine-1"


# ---- deadlines


def test_the_deadline_shrinks_with_every_submission() -> None:
    desk = Desk()
    desk.handle(ticket(deadline_ms=500))
    desk.now_ns = 200 * MS
    desk.handle(SubmitFailed("r1"))
    desk.beat()
    desk.tick(SUBMIT_RETRY_NS)
    assert [submit.message.deadline_ms for submit in desk.submits] == [500, 50]


def test_a_silent_scheduler_does_not_stretch_a_deadline() -> None:
    desk = Desk()
    desk.open(deadline_ms=100)
    assert not desk.tick(100 * MS + DEADLINE_GRACE_NS - 1)
    desk.tick(1)
    (frame,) = desk.ends()
    assert frame.error is not None and frame.error.code is ErrorCode.DEADLINE_EXCEEDED
    assert desk.aborts


def test_an_error_of_the_scheduler_reaches_the_client() -> None:
    desk = Desk()
    tag = desk.open()
    desk.updates(tag, 0, [4])
    (frame,) = desk.updates(tag, 1, [], end=FinishReason.ERROR, code=ErrorCode.DEADLINE_EXCEEDED)
    assert frame.error is not None and frame.error.code is ErrorCode.DEADLINE_EXCEEDED
    assert frame.offset == 1 and frame.usage is None


# ---- case 49


def test_case_49_nothing_is_left_of_a_thousand_requests() -> None:
    desk = Desk()
    for number in range(1000):
        tag = desk.open(f"r{number}")
        desk.updates(tag, 0, [4], end=LENGTH)
    assert not desk.core.requests and len(desk.core.ended) == 1000
    desk.tick(ENDED_SECONDS * SECOND)
    assert not desk.core.ended and desk.core.wake_at_ns is None
    assert len(desk.frames) == 1000 and not desk.core.has_news
