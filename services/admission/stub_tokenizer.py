"""The tokenizer of the stub worker: text is its bytes, and token n reads as "n ". For measuring
everything else.

Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

VOCAB_SIZE: Final = 32_768


class StubTokenizer:
    """What admission asks of a tokenizer, without a model."""

    token_bytes: Sequence[bytes] = tuple(f"{token_id} ".encode() for token_id in range(VOCAB_SIZE))
    vocab_size = VOCAB_SIZE
    longest_token_bytes = 6
    eos_token_ids: tuple[int, ...] = ()

    def token_text(self, token_id: int) -> str:
        return f"{token_id} "

    def encode(self, text: str) -> list[int]:
        return list(text.encode())
