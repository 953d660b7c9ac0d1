"""Turns tokens into text, one token at a time.

Invariants: the text after k tokens is a pure function of the last bytes of the prompt and of those
k tokens, however they were delivered; at most 3 bytes are held back, those of a character that is
not complete; the cost of a token does not grow with what came before.

A character that the prompt began and the output completes is shown once, whole; text of the prompt
is never shown. Bytes that can be no character are shown as U+FFFD, as `bytes.decode` does it.

Pure.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Final

MAX_CHARACTER_BYTES: Final = 4
"""Of UTF-8; an incomplete character is at most one byte shorter."""

_new_decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """Text of one sequence's output.

    token_bytes: bytes of each token id, empty for tokens that are not shown (control tokens). Ids
    beyond it, which models with padded vocabularies can sample, show nothing.
    prompt_token_ids: the prompt, for a character that it leaves open; its last tokens are enough.
    """

    __slots__ = ("_decoder", "_prompt_tail", "_token_bytes")

    def __init__(self, token_bytes: Sequence[bytes], prompt_token_ids: Sequence[int] = ()) -> None:
        self._token_bytes = token_bytes
        self._decoder = _new_decoder("replace")
        self._prompt_tail = open_character(token_bytes, prompt_token_ids)

    def push(self, *token_ids: int) -> str:
        """Text that `token_ids` add; empty while a character is incomplete."""
        known = self._token_bytes
        piece = b"".join([known[token_id] for token_id in token_ids if token_id < len(known)])
        if self._prompt_tail and piece:
            # The prompt's bytes count only where the output goes on with the same character.
            if _is_continuation(piece[0]):
                piece = self._prompt_tail + piece
            self._prompt_tail = b""
        return self._decoder.decode(piece)

    def flush(self) -> str:
        """Text of what was held back, at the end of the sequence: U+FFFD, or nothing."""
        return self._decoder.decode(b"", True)


def open_character(token_bytes: Sequence[bytes], token_ids: Sequence[int]) -> bytes:
    """The bytes of a character that `token_ids` begin and do not end: at most 3, usually none.

    Ids of "a" and of the first two bytes of an emoji -> those two bytes.
    """
    tail = b""
    for token_id in reversed(token_ids[-MAX_CHARACTER_BYTES:]):
        piece = token_bytes[token_id]
        if not piece:
            break
        tail = piece[-MAX_CHARACTER_BYTES:] + tail
        if len(tail) >= MAX_CHARACTER_BYTES:
            break
    decoder = _new_decoder("replace")
    decoder.decode(tail)
    return decoder.getstate()[0]


def _is_continuation(byte: int) -> bool:
    return byte & 0xC0 == 0x80
