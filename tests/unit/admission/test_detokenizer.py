from __future__ import annotations

import time

from hypothesis import given
from hypothesis import strategies as st

from services.admission.detokenizer import Detokenizer, open_character

BYTES = [bytes([value]) for value in range(256)] + [b"", b"hello", "é🍕".encode()]
CONTROL = 256
HELLO = 257


def text_of(token_ids: list[int], prompt: list[int] | None = None) -> tuple[list[str], str]:
    detokenizer = Detokenizer(BYTES, prompt or [])
    deltas = [detokenizer.push(token_id) for token_id in token_ids]
    return deltas, "".join(deltas) + detokenizer.flush()


def test_a_character_appears_when_it_is_complete() -> None:
    deltas, text = text_of(list("🍕".encode()))
    assert deltas == ["", "", "", "🍕"]
    assert text == "🍕"


def test_an_unfinished_character_ends_as_one_replacement() -> None:
    assert text_of([HELLO, *"🍕".encode()[:3]])[1] == "hello\ufffd"


def test_control_tokens_are_not_shown_and_ids_beyond_the_vocabulary_neither() -> None:
    assert text_of([HELLO, CONTROL, HELLO, 10_000])[1] == "hellohello"


def test_case_16_bytes_that_are_no_character_flow_and_cost_linear_time() -> None:
    def seconds(count: int) -> float:
        started = time.process_time()
        deltas, text = text_of([0x80] * count)
        assert text == "\ufffd" * count
        assert all(deltas), "nothing is held back"
        return time.process_time() - started

    seconds(2000)
    small, large = min(seconds(2000) for _ in range(5)), min(seconds(16_000) for _ in range(5))
    # Quadratic cost would be 64 times; linear is 8.
    assert large < 24 * small


def test_case_14_the_prompt_is_never_shown() -> None:
    emoji = "🍕".encode()
    prompt = [HELLO, *emoji[:2]]
    assert text_of([emoji[2], emoji[3], HELLO], prompt)[1] == "🍕hello"
    assert text_of([HELLO], prompt)[1] == "hello"
    assert text_of([], prompt)[1] == ""
    assert text_of([CONTROL], prompt)[1] == ""


def test_case_14_a_prompt_character_that_goes_wrong_is_one_replacement() -> None:
    emoji = "🍕".encode()
    assert text_of([emoji[2], HELLO], [HELLO, *emoji[:2]])[1] == "\ufffdhello"


def test_open_character() -> None:
    assert open_character(BYTES, [HELLO]) == b""
    assert open_character(BYTES, [HELLO, 0xF0, 0x9F, 0x8D]) == b"\xf0\x9f\x8d"
    assert open_character(BYTES, [0xF0, CONTROL]) == b""
    assert open_character(BYTES, [0x80, 0x80]) == b""


@given(st.lists(st.integers(0, len(BYTES) - 1), max_size=60))
def test_the_text_is_that_of_the_bytes_and_at_most_three_are_held(token_ids: list[int]) -> None:
    detokenizer = Detokenizer(BYTES)
    shown, seen = "", b""
    for token_id in token_ids:
        shown += detokenizer.push(token_id)
        seen += BYTES[token_id]
        held = [seen[: len(seen) - num_held].decode("utf-8", "replace") for num_held in range(4)]
        assert shown in held
    assert shown + detokenizer.flush() == seen.decode("utf-8", "replace")
