from __future__ import annotations

import codecs
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.admission import detokenizer
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


class CountingBytes(list[bytes]):
    """Counts how often a token was looked up."""

    num_read = 0

    def __getitem__(self, index: Any) -> Any:
        self.num_read += 1
        return super().__getitem__(index)


def test_case_16_bytes_that_are_no_character_flow_and_each_is_looked_at_a_few_times(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Counted, not timed: a cost that grew with the text would be of thousands a token."""
    num_decoded = 0

    class CountingDecoder(codecs.getincrementaldecoder("utf-8")):  # type: ignore[misc]
        def decode(self, data: bytes, final: bool = False) -> str:
            nonlocal num_decoded
            num_decoded += len(self.getstate()[0]) + len(data)
            return str(super().decode(data, final))

    monkeypatch.setattr(detokenizer, "_new_decoder", CountingDecoder)
    known, count = CountingBytes(BYTES), 4000
    reader = detokenizer.Detokenizer(known)
    for byte in (0x80, 0xF0):
        known.num_read = num_decoded = 0
        deltas = [reader.push(byte) for _ in range(count)]
        assert set(deltas[1:]) == {"\ufffd"}, "nothing is held back but what may become a character"
        assert known.num_read == count and count <= num_decoded <= 2 * count


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
