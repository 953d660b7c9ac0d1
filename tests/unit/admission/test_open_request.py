"""One request: tokens in, frames out."""

from __future__ import annotations

from typing import Any

import pytest

from services.admission.open_request import OpenRequest
from services.contracts.errors import ErrorCode
from services.contracts.public import FinishReason
from services.contracts.sampling import SamplingParams
from services.contracts.sequences import SequenceFinished
from tests.unit.admission.streams import Words, logprobs, ticket


def request(**more: Any) -> OpenRequest:
    return OpenRequest(ticket=ticket(**more), vocabulary=Words(), tag=1, arrival_ns=0)


def finish(opened: OpenRequest, reason: FinishReason = FinishReason.LENGTH) -> None:
    opened.finished = SequenceFinished(1, reason, len(opened.token_ids))


@pytest.mark.parametrize(
    ("pieces", "known"),
    [
        ([(0, [4]), (1, [5])], [4, 5]),
        ([(0, [4, 5]), (0, [4, 5])], [4, 5]),
        ([(0, [4, 5]), (1, [5, 6])], [4, 5, 6]),
        ([(0, [4, 5, 6]), (0, [4])], [4, 5, 6]),
        ([(1, [5]), (0, [4])], [4]),
    ],
)
def test_tokens_are_taken_in_order_and_once(
    pieces: list[tuple[int, list[int]]], known: list[int]
) -> None:
    opened = request()
    for offset, token_ids in pieces:
        opened.accept(offset, token_ids)
    assert opened.token_ids.tolist() == known


def test_a_hole_is_told() -> None:
    opened = request()
    assert opened.accept(0, [4]) and not opened.accept(2, [6])


def test_nothing_new_is_no_frame() -> None:
    opened = request()
    assert opened.frame() is None
    opened.accept(0, [4])
    assert opened.frame() is not None and opened.frame() is None


def test_frames_join_to_the_answer_however_they_are_cut() -> None:
    tokens = [4, 100 + 0xE2, 100 + 0x82, 100 + 0xAC, 5, 100 + 0xFF, 6]
    for cut in range(1, len(tokens)):
        opened = request()
        opened.accept(0, tokens[:cut])
        frames = [opened.frame()]
        opened.accept(cut, tokens[cut:])
        finish(opened)
        frames.append(opened.frame())
        shown = [frame for frame in frames if frame is not None]
        assert "".join(frame.text for frame in shown) == "w4 €w5 �w6 "
        assert [token for frame in shown for token in frame.token_ids] == tokens
        at = 0
        for frame in shown:
            assert frame.offset == at
            at += len(frame.token_ids)


def test_a_character_left_open_is_shown_at_the_end() -> None:
    opened = request()
    opened.accept(0, [4, 100 + 0xE2])
    frame = opened.frame()
    assert frame is not None and frame.text == "w4 "
    finish(opened)
    frame = opened.frame()
    assert frame is not None and frame.text == "�" and frame.finish_reason is FinishReason.LENGTH


def test_case_14_text_of_the_prompt_is_never_shown() -> None:
    opened = request(prompt_token_ids=[7, 100 + 0xE2, 100 + 0x82])
    opened.accept(0, [100 + 0xAC, 4])
    frame = opened.frame()
    assert frame is not None and frame.text == "€w4 "


def test_text_held_back_for_a_stop_string_comes_with_the_end() -> None:
    opened = request(stop_strings=["w5 w6 END"])
    opened.accept(0, [5, 6])
    frame = opened.frame()
    shown = "" if frame is None else frame.text
    finish(opened)
    frame = opened.frame()
    assert frame is not None and shown + frame.text == "w5 w6 "


def test_a_stop_string_wins_over_the_end_that_came_with_it() -> None:
    opened = request(stop_strings=["w5"])
    opened.accept(0, [4, 5, 6])
    finish(opened)
    frame = opened.frame()
    assert frame is not None
    assert (frame.text, frame.finish_reason, frame.token_ids) == ("w4 ", FinishReason.STOP, [4, 5])
    assert frame.usage is not None and frame.usage.completion_tokens == 2


def test_logprobs_follow_their_tokens() -> None:
    opened = request(sampling=SamplingParams(num_logprobs=0))
    opened.accept(0, [4, 5])
    opened.accept_logprobs(1, logprobs())
    opened.accept_logprobs(0, logprobs())
    opened.accept_logprobs(7, logprobs())
    frame = opened.frame()
    assert frame is not None and frame.logprobs is not None
    assert [(entry.token_id, entry.token) for entry in frame.logprobs] == [(4, "w4 "), (5, "w5 ")]


def test_prompt_logprobs_come_with_the_first_frame_only() -> None:
    opened = request(sampling=SamplingParams(num_prompt_logprobs=0))
    opened.accept_prompt_logprobs(1, logprobs(1))
    opened.accept_prompt_logprobs(2, logprobs(1))
    opened.accept(0, [4])
    first = opened.frame()
    assert first is not None and first.prompt_logprobs is not None
    ids = [entry.token_id if entry else None for entry in first.prompt_logprobs]
    assert ids == [None, 2, 3]
    opened.accept(1, [5])
    second = opened.frame()
    assert second is not None and second.prompt_logprobs is None


def test_an_error_frame_shows_no_token() -> None:
    opened = request()
    opened.accept(0, [4])
    opened.frame()
    opened.accept(1, [5])
    frame = opened.error_frame(ErrorCode.INTERNAL, "why")
    assert (frame.offset, frame.token_ids, frame.usage) == (1, [], None)


def test_a_replay_begins_from_nothing() -> None:
    opened = request(stop_strings=["w6"])
    opened.accept(0, [4, 100 + 0xE2])
    opened.frame()
    opened.answer_to(ticket(reply="inbox.new"))
    opened.rewind(0)
    opened.accept(2, [100 + 0x82, 100 + 0xAC, 6])
    frame = opened.frame()
    assert frame is not None
    assert (frame.offset, frame.text, frame.finish_reason) == (0, "w4 €", FinishReason.STOP)


def test_a_rewind_goes_on_in_the_middle_of_what_was_held_back() -> None:
    token_ids = [4, 100 + 0xE2, 100 + 0x82, 100 + 0xAC, 5, 6]
    opened = request(stop_strings=["w5 w9"])
    opened.accept(0, token_ids)
    whole = opened.frame()
    assert whole is not None
    for offset in range(len(token_ids) + 1):
        opened.rewind(0)
        before = request(stop_strings=["w5 w9"])
        before.accept(0, token_ids[:offset])
        shown = before.frame()
        opened.rewind(offset)
        rest = opened.frame()
        text = (shown.text if shown else "") + (rest.text if rest else "")
        assert text == whole.text, f"text after {offset} tokens depends on those alone"


def test_much_to_catch_up_with_goes_out_in_parts() -> None:
    opened = request(max_tokens=3000)
    opened.accept(0, [4] * 2500)
    opened.finished = SequenceFinished(1, FinishReason.LENGTH, 2500)
    frames = [opened.frame()]
    while opened.has_more:
        frames.append(opened.frame())
    sizes = [len(frame.token_ids) for frame in frames if frame is not None]
    assert sizes == [1024, 1024, 452]
    assert [frame.finish_reason for frame in frames if frame] == [None, None, FinishReason.LENGTH]
    assert "".join(frame.text for frame in frames if frame) == "w4 " * 2500
