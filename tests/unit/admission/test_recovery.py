"""Requests that outlive their admission, and admissions that outlive their right to a request."""

from __future__ import annotations

import pytest

from scheduler_svc.events import AbortAsked, OfferAdoption, Reply, SendUpdates, Submitted
from services.admission import open_request
from services.admission.adoption import envelope_of, ticket_of
from services.admission.core import (
    DOUBT_AFTER_NS,
    REPAIR_NS,
    SUBMIT_RETRY_NS,
    UNHEARD_NS,
    AdmissionCore,
)
from services.admission.ended import EndedRequests
from services.admission.events import (
    BeatSent,
    CancelAsked,
    DrainAsked,
    ResumeAsked,
    Submit,
    SubmitFailed,
    Unheard,
)
from services.admission.open_request import OpenRequest, Ticket
from services.contracts.beats import Beat, ServiceKind
from services.contracts.envelope import Envelope, seal
from services.contracts.errors import ErrorCode, RequestError
from services.contracts.limits import ENDED_SECONDS, MAX_ENDED, MAX_ENDED_BYTES, MAX_ENVELOPE_BYTES
from services.contracts.public import Encoding, FinishReason, Frame
from services.contracts.sampling import SamplingParams
from services.contracts.sequences import (
    AbortSequences,
    AdoptSequences,
    SubmitReply,
    SubmitSequence,
)
from services.contracts.vectors import unpack
from tests.unit.admission.streams import ENGINE, SECOND, Desk, Words, ticket
from tests.unit.scheduler_svc.rig import Rig

LENGTH = FinishReason.LENGTH


def submitted(asked: Ticket | None = None) -> SubmitSequence:
    """A sequence as some other admission has submitted it."""
    desk = Desk()
    desk.handle(asked or ticket())
    return desk.submits[-1].message


def offer(desk: Desk, *messages: SubmitSequence, engine: str = ENGINE) -> list[Submit]:
    effects = desk.handle(AdoptSequences(engine, list(messages)))
    return [effect for effect in effects if isinstance(effect, Submit)]


# ---- envelopes


def test_a_ticket_survives_its_envelope() -> None:
    asked = ticket(
        encoding=Encoding.MSGPACK,
        stop_strings=["a", "bé"],
        include_stop=True,
        stream=False,
        stop_token_ids=[2, 9],
        sampling=SamplingParams(temperature=0.5, seed=2**64 - 1, num_logprobs=3),
        salt=b"tenant",
        priority=-3,
        deadline_ms=5000,
        traceparent="00-aa-bb-01",
        retry=True,
    )
    assert ticket_of(submitted(asked)) == asked


def test_an_envelope_that_nobody_could_keep_is_refused() -> None:
    with pytest.raises(RequestError) as caught:
        seal(Envelope(model="m", reply="i" * MAX_ENVELOPE_BYTES, encoding=Encoding.JSON))
    assert caught.value.code is ErrorCode.PAYLOAD_TOO_LARGE
    desk = Desk()
    desk.handle(ticket(reply="i" * MAX_ENVELOPE_BYTES))
    error = desk.ends()[0].error
    assert error is not None and error.code is ErrorCode.PAYLOAD_TOO_LARGE
    assert not desk.core.requests and not desk.submits


# ---- adoption


def test_an_adopted_request_is_submitted_and_shown_from_its_first_token() -> None:
    desk = Desk()
    (submit,) = offer(desk, submitted())
    assert (submit.engine, submit.message.admission_id) == (ENGINE, "admission-0")
    assert unpack(submit.message.prompt).tolist() == [1, 2, 3] and not submit.message.accepted
    assert submit.message.envelope == envelope_of(ticket())
    desk.acknowledge()
    desk.updates(submit.message.tag, 0, [4, 5])
    assert desk.updates(submit.message.tag, 2, [6], end=LENGTH)
    assert desk.text() == "w4 w5 w6 " and desk.frames[0][0] == "inbox.r1"
    assert len(desk.ends()) == 1


def test_an_offer_that_is_repeated_changes_nothing() -> None:
    desk = Desk()
    assert len(offer(desk, submitted())) == 1
    assert offer(desk, submitted()) == [], "its submission is on the way"
    desk.acknowledge()
    assert len(offer(desk, submitted())) == 1, "the scheduler does not know whose it is"
    assert len(desk.core.requests) == 1 and not desk.frames


def test_what_has_ended_here_is_acknowledged_and_not_opened_again() -> None:
    desk = Desk()
    tag = desk.open()
    desk.updates(tag, 0, [4], end=LENGTH)
    desk.aborts.clear()
    assert offer(desk, submitted()) == []
    assert [abort.message.seq_ids for abort in desk.aborts] == [["r1"]]
    assert len(desk.ends()) == 1


def test_what_runs_on_another_engine_is_not_wanted_twice() -> None:
    desk = Desk()
    desk.open()
    assert offer(desk, submitted(), engine="engine-1") == []
    assert [(a.engine, a.message.seq_ids) for a in desk.aborts] == [("engine-1", ["r1"])]


def test_what_waits_for_an_engine_is_not_aborted_at_the_one_that_offers_it() -> None:
    """Found by the simulator (seed 487): a retry had come to another admission than the request."""
    desk = Desk()
    desk.beat(ready=False)
    desk.handle(ticket(retry=True))
    assert offer(desk, submitted()) == [] and not desk.aborts
    desk.beat()
    desk.tick(SUBMIT_RETRY_NS)
    assert [submit.engine for submit in desk.submits] == [ENGINE]


def test_what_waits_for_an_engine_was_not_submitted_by_its_life_of_before() -> None:
    """Found by the simulator (seed 5449): another had taken it and then its client came back, all
    while a submission was in the air, whose answer left it waiting for ever.
    """
    desk = Desk()
    desk.handle(ticket())
    tag = desk.submits.pop().message.tag
    desk.updates(tag, 0, [], moved=[tag])
    desk.beat(ready=False)
    desk.handle(ticket(retry=True))
    desk.acknowledge()
    desk.beat()
    desk.tick(SUBMIT_RETRY_NS)
    assert [submit.engine for submit in desk.submits] == [ENGINE]


@pytest.mark.parametrize("why", ["full", "draining", "model"])
def test_an_offer_may_be_left_to_another(why: str) -> None:
    desk = Desk(max_open=1)
    message = submitted()
    if why == "full":
        desk.open("r2")
    elif why == "draining":
        desk.handle(DrainAsked())
    else:
        desk.core.vocabularies = {}
    assert offer(desk, message) == [] and not desk.frames and not desk.aborts


def test_a_late_abort_is_not_the_end_of_what_has_come_back() -> None:
    """Found by the simulator (seed 3904): it had ended here, its abort could not be delivered until
    it was forgotten and then adopted again, and its client heard `abort` without having asked.
    """
    desk, rig = Desk(), Rig()
    desk.open()
    desk.core.fail_all(ErrorCode.NO_WORKER, "cut off from it")
    late = AbortAsked(AbortSequences("admission-0", ["r1"]), "inbox")
    desk.tick((ENDED_SECONDS + 1) * SECOND)
    (submit,) = offer(desk, submitted())
    rig.handle(Submitted(submit.message, "inbox"))
    desk.acknowledge()
    desk.updates(submit.message.tag, 0, [4])
    (sent,) = [effect for effect in rig.handle(late) if isinstance(effect, SendUpdates)]
    (end,) = sent.updates.finished
    desk.updates(end.tag, 1, [], end=end.reason)
    assert not desk.ends()
    again = desk.submits[-1].message
    assert again is not submit.message and unpack(again.accepted).tolist() == [4]
    rig.handle(Submitted(again, "inbox"))
    assert rig.last(Reply).message.code is None
    desk.acknowledge()
    desk.updates(again.tag, 1, [5], end=LENGTH)
    assert [frame.finish_reason for frame in desk.ends()] == [LENGTH] and desk.text() == "w4 w5 "


def test_an_adopted_request_whose_owner_lives_is_forgotten_without_a_word() -> None:
    desk = Desk()
    offer(desk, submitted())
    desk.refuse()
    assert not desk.core.requests and not desk.frames and not desk.aborts


def test_an_adopted_request_outlives_its_scheduler() -> None:
    desk = Desk()
    offer(desk, submitted())
    desk.handle(SubmitFailed("r1"))
    desk.beat()
    (again,) = [e for e in desk.tick(SUBMIT_RETRY_NS) if isinstance(e, Submit)]
    assert again.message.seq_id == "r1"


# ---- whose is it


def scored_desk() -> tuple[Desk, SubmitSequence]:
    """An admission with three tokens and their log-probabilities, whose scheduler is another one
    since -> what it has submitted there.
    """
    desk = Desk()
    tag = desk.open(sampling=SamplingParams(num_logprobs=0))
    desk.updates(tag, 0, [4, 5, 6], scored=True)
    desk.epoch += 1
    desk.beat()
    return desk, desk.submits[-1].message


def adopter_of(rig: Rig) -> Desk:
    """Another admission that has taken the one sequence that is on offer, and heard all of it."""
    desk = Desk(engine=False)
    desk.core = AdmissionCore("admission-9", {"words": Words()}, 10)
    desk.beat()
    rig.handle(Beat(ServiceKind.ADMISSION, "admission-0", leaving=True))
    desk.handle(rig.last(OfferAdoption).message)
    sent = rig.handle(Submitted(desk.submits[-1].message, "inbox"))
    for effect in sent:
        if isinstance(effect, SendUpdates) and effect.admission_id == "admission-9":
            desk.handle(effect.updates)
    desk.flush()
    return desk


def test_log_probabilities_outlive_a_scheduler_and_then_an_admission() -> None:
    first, submission = scored_desk()
    rig = Rig()
    rig.handle(Submitted(submission, "inbox"))
    second = adopter_of(rig)
    ((_, before),) = first.frames
    ((_, after),) = second.frames
    assert after.token_ids == before.token_ids == [4, 5, 6]
    assert after.logprobs == before.logprobs and len(after.logprobs or []) == 3


def test_log_probabilities_that_are_too_many_to_be_sent_again_are_named_where_they_are_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(open_request, "MAX_RESENT_LOGPROB_BYTES", 11)
    _, submission = scored_desk()
    assert submission.accepted_logprobs is None
    rig = Rig()
    rig.handle(Submitted(submission, "inbox"))
    (end,) = adopter_of(rig).ends()
    assert end.error is not None and end.error.code is ErrorCode.LOGPROBS_LOST
    assert "send the request again" in end.error.message


def test_a_retry_of_what_another_has_ends_in_silence() -> None:
    desk = Desk()
    desk.handle(ticket(retry=True))
    desk.refuse()
    assert not desk.core.requests and not desk.frames


def test_a_new_request_with_an_id_in_use_elsewhere_is_refused() -> None:
    desk = Desk()
    desk.handle(ticket())
    desk.refuse()
    error = desk.ends()[0].error
    assert error is not None and error.code is ErrorCode.DUPLICATE_REQUEST


def test_a_request_that_its_own_retry_has_overtaken_is_forgotten_in_silence() -> None:
    """Found by the simulator (seed 68): a late first sending came after its retry elsewhere, and
    its client was told that its own request was in its way.
    """
    desk = Desk()
    desk.handle(ticket())
    desk.handle(SubmitReply("r1", desk.epoch, owned_elsewhere=True, is_same=True))
    assert not desk.ends() and not desk.core.requests


def test_what_was_taken_away_is_not_called_a_duplicate() -> None:
    desk = Desk()
    desk.handle(ticket())
    desk.handle(SubmitFailed("r1"))
    desk.beat()
    desk.tick(SUBMIT_RETRY_NS)
    desk.refuse()
    assert not desk.core.requests and not desk.frames


def test_the_scheduler_tells_who_has_lost_a_request() -> None:
    desk = Desk()
    tag = desk.open()
    other = desk.open("r2")
    desk.updates(tag, 0, [4], moved=[other])
    assert list(desk.core.requests) == ["r1"]
    assert not desk.ends("r2")


def asleep(desk: Desk) -> None:
    """Its last beat is a while ago; what came meanwhile is only now looked at."""
    desk.handle(BeatSent())
    desk.now_ns += DOUBT_AFTER_NS + 1
    desk.submits.clear()


def test_after_a_sleep_nothing_is_shown_before_the_scheduler_has_said_whose_it_is() -> None:
    desk = Desk()
    tag = desk.open()
    asleep(desk)
    assert not desk.updates(tag, 0, [4, 5])
    assert [submit.message.seq_id for submit in desk.submits] == ["r1"]
    desk.handle(ResumeAsked("r1", 0))
    desk.handle(BeatSent())
    assert not desk.frames
    desk.acknowledge()
    (frame,) = desk.flush()
    assert frame.token_ids == [4, 5]


def test_an_answer_of_before_the_sleep_proves_nothing() -> None:
    desk = Desk()
    desk.handle(ticket())
    tag = desk.submits[-1].message.tag
    asleep(desk)
    desk.acknowledge()
    assert not desk.updates(tag, 0, [4], end=LENGTH)
    desk.refuse()
    assert not desk.core.requests and not desk.frames and not desk.aborts


def test_an_end_that_was_withheld_is_shown_where_the_scheduler_of_before_is_gone() -> None:
    """Found by the simulator (seed 445): its successor refused a sequence that has all tokens."""
    desk = Desk()
    tag = desk.open(max_tokens=2)
    asleep(desk)
    assert not desk.updates(tag, 0, [4, 5], end=LENGTH)
    desk.acknowledge(code=ErrorCode.INVALID_REQUEST)
    desk.flush()
    assert [frame.finish_reason for frame in desk.ends()] == [LENGTH] and desk.text() == "w4 w5 "


def test_a_sleep_is_noticed_once_and_time_between_beats_is_none() -> None:
    desk = Desk()
    desk.open()
    asleep(desk)
    desk.now_ns -= 1
    desk.tick()
    assert not desk.submits
    desk.tick(1)
    desk.tick(SECOND)
    assert len(desk.submits) == 1
    desk.handle(BeatSent())
    desk.tick(DOUBT_AFTER_NS + 1)
    assert len(desk.submits) == 2


def test_after_a_sleep_what_waits_for_an_engine_waits_on() -> None:
    """Found by the simulator (seeds 1185, 1376): it was submitted to nobody, and then thought to be
    submitted.
    """
    desk = Desk()
    desk.beat(ready=False)
    desk.handle(ticket())
    asleep(desk)
    desk.tick()
    assert not desk.submits
    desk.beat()
    desk.tick(SUBMIT_RETRY_NS)
    assert [submit.engine for submit in desk.submits] == [ENGINE]


def test_a_deadline_that_passed_asleep_is_for_the_owner_to_tell() -> None:
    desk = Desk()
    desk.open(deadline_ms=10)
    asleep(desk)
    desk.tick(SECOND)
    assert not desk.frames
    desk.refuse()
    assert not desk.frames and not desk.core.requests


# ---- resume


def test_resume_shows_again_from_the_offset() -> None:
    desk = Desk()
    tag = desk.open()
    desk.updates(tag, 0, [4, 5, 6])
    desk.handle(ResumeAsked("r1", 1))
    (frame,) = desk.flush()
    assert (frame.offset, frame.token_ids, frame.text) == (1, [5, 6], "w5 w6 ")
    desk.updates(tag, 3, [7], end=LENGTH)
    assert len(desk.ends()) == 1


@pytest.mark.parametrize("offset", [2, 9])
def test_resume_of_what_is_up_to_date_says_that_it_is_somebodys(offset: int) -> None:
    desk = Desk()
    tag = desk.open()
    desk.updates(tag, 0, [4, 5])
    desk.handle(ResumeAsked("r1", offset))
    assert desk.frames[-1] == ("inbox.r1", Frame(request_id="r1", offset=offset))
    assert not desk.flush()


def test_resume_of_what_is_not_known_is_left_to_others() -> None:
    desk = Desk()
    assert desk.handle(ResumeAsked("r9", 0)) == []


@pytest.mark.parametrize("how", ["length", "stop string", "abort", "error"])
@pytest.mark.parametrize("offset", [0, 2, 3])
def test_a_lost_terminal_frame_comes_again(how: str, offset: int) -> None:
    desk = Desk()
    tag = desk.open(stop_strings=["w9"])
    desk.updates(tag, 0, [4, 5])
    desk.updates(tag, 2, [6])
    if how == "length":
        desk.updates(tag, 3, [7], end=LENGTH)
    elif how == "stop string":
        desk.updates(tag, 3, [8, 9])
    elif how == "abort":
        desk.handle(CancelAsked("r1"))
    else:
        desk.updates(tag, 3, [], end=FinishReason.ERROR, code=ErrorCode.NUMERICS)
    (end,) = desk.ends()
    del desk.frames[:]
    desk.handle(ResumeAsked("r1", offset))
    frames = [frame for _, frame in desk.frames]
    assert frames[-1] == end and frames[0].offset == offset
    token_ids = [token_id for frame in frames for token_id in frame.token_ids]
    tail = {"length": [7], "stop string": [8, 9]}.get(how, [])
    assert token_ids == [*[4, 5, 6][offset:], *tail]


def test_a_retry_of_what_has_ended_runs_nothing_again() -> None:
    desk = Desk()
    tag = desk.open()
    desk.updates(tag, 0, [4], end=LENGTH)
    desk.submits.clear()
    desk.handle(ticket(retry=True, reply="inbox.other"))
    assert not desk.submits and not desk.core.requests
    assert [reply for reply, _ in desk.frames] == ["inbox.r1", "inbox.other"]
    assert desk.frames[1][1] == desk.frames[0][1]


def test_an_id_may_be_used_again_after_its_request_has_ended() -> None:
    desk = Desk()
    desk.updates(desk.open(), 0, [4], end=LENGTH)
    tag = desk.open(reply="inbox.other")
    desk.updates(tag, 0, [5], end=LENGTH)
    assert [(reply, frame.token_ids) for reply, frame in desk.frames] == [
        ("inbox.r1", [4]),
        ("inbox.other", [5]),
    ]


def test_ended_requests_are_kept_for_a_while_and_in_bounds() -> None:
    def opened(number: int, num_tokens: int = 1) -> OpenRequest:
        asked = ticket(f"r{number}", prompt_token_ids=[1] * num_tokens)
        return OpenRequest(ticket=asked, vocabulary=Words(), tag=1, arrival_ns=0)

    ended, frame = EndedRequests(), Frame(request_id="r", offset=0)
    for number in range(MAX_ENDED + 10):
        ended.keep(opened(number), frame, 0)
    assert len(ended) == MAX_ENDED and "r9" not in ended and "r10" in ended
    big = opened(0, MAX_ENDED_BYTES // 100)
    for number in range(5):
        ended.keep(opened(number, MAX_ENDED_BYTES // 100), frame, 1)
    assert big.num_bytes * len(ended) <= MAX_ENDED_BYTES and "r4" in ended
    ended.forget_old(ENDED_SECONDS * SECOND)
    assert len(ended) > 0
    ended.forget_old(ENDED_SECONDS * SECOND + 1)
    assert len(ended) == 0 and ended._num_bytes == 0


# ---- clients that vanish


def test_a_client_that_nobody_hears_of_for_five_seconds_is_gone() -> None:
    desk = Desk()
    tag = desk.open()
    desk.updates(tag, 0, [4])
    desk.handle(Unheard("r1"))
    desk.now_ns += UNHEARD_NS - 1
    desk.handle(Unheard("r1"))
    assert not desk.ends() and not desk.aborts
    desk.now_ns += 1
    desk.handle(Unheard("r1"))
    assert desk.ends()[0].finish_reason is FinishReason.ABORT
    assert [abort.message.seq_ids for abort in desk.aborts] == [["r1"]]


def test_a_client_that_resumes_was_only_away() -> None:
    desk = Desk()
    tag = desk.open()
    desk.updates(tag, 0, [4])
    desk.handle(Unheard("r1"))
    desk.now_ns += UNHEARD_NS - 1
    desk.handle(ResumeAsked("r1", 0))
    desk.now_ns += 1
    desk.handle(Unheard("r1"))
    assert not desk.ends()


def test_gaps_in_what_repairs_a_gap_do_not_multiply() -> None:
    """Found by the simulator (seed 273): each gap submitted everything again, and each answer was
    an update that could be lost.
    """
    desk = Desk()
    tag = desk.open("r1")
    desk.open("r2")
    before = len(desk.submits)
    for _ in range(10):
        desk.number += 1
        desk.updates(tag, 0, [])
        desk.acknowledge("r1")
        desk.acknowledge("r2")
    assert len(desk.submits) == before + 2
    desk.tick(REPAIR_NS)
    assert len(desk.submits) == before + 4, "the gaps since then are repaired in their turn"
    desk.tick(REPAIR_NS)
    assert len(desk.submits) == before + 4


def test_what_a_replaced_scheduler_takes_is_submitted_again() -> None:
    """Found by the simulator (seed 1793): it said yes, then heard that another has its engine."""
    desk = Desk()
    desk.open()
    desk.epoch += 1
    desk.beat()
    desk.submits.clear()
    desk.handle(SubmitReply("r1", desk.epoch - 1))
    desk.tick(SUBMIT_RETRY_NS)
    assert [submit.message.seq_id for submit in desk.submits] == ["r1"]
    desk.acknowledge()
    desk.tick(SUBMIT_RETRY_NS)
    assert len(desk.submits) == 1
